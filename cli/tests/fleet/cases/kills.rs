//! SIGKILL.

use rustix::process::Signal;

use crate::answers::End;
use crate::fleet::Fleet;
use crate::load::{burst, ends, streams};
use crate::meeting::Meeting;

pub(crate) async fn no_request_fails_after_an_idle_worker_was_killed<M: Meeting>(fleet: Fleet<M>) {
    let [one, two] = fleet.two_workers(&[]).await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    one.kill().await;
    assert_eq!(burst(&frontend, 200).await, [""; 0]);
}

pub(crate) async fn what_had_not_begun_moves_when_its_worker_is_killed<M: Meeting>(
    fleet: Fleet<M>,
) {
    let [one, two] = fleet.two_workers(&["--token-delay-ms=2000"]).await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    let killed = async {
        // All requests are in an engine, and none has a token.
        tokio::join!(one.until_running(10.0), two.until_running(10.0));
        one.kill().await;
    };
    let (failures, ()) = tokio::join!(burst(&frontend, 20), killed);
    assert_eq!(failures, [""; 0]);
}

pub(crate) async fn what_had_begun_fails_where_nothing_may_move<M: Meeting>(fleet: Fleet<M>) {
    let words = ["--token-delay-ms=20", "--migration-limit=0"];
    let [one, two] = fleet.two_workers(&words).await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    let begun = streams(&frontend, 20, 400).await;
    assert_eq!((one.running().await, two.running().await), (10.0, 10.0));
    one.kill().await;
    let mut failed = 0;
    for end in ends(begun).await {
        match end {
            End::Done(tokens) => assert_eq!(tokens, 400),
            End::Error(error) => {
                assert_eq!(error["type"], "server_error", "{error}");
                failed += 1;
            }
        }
    }
    assert_eq!(failed, 10);
    assert_eq!(burst(&frontend, 20).await, [""; 0]);
}

pub(crate) async fn a_killed_frontend_cancels_its_requests<M: Meeting>(fleet: Fleet<M>) {
    let worker = fleet.worker(&["--token-delay-ms=20"]).await;
    let mut frontend = fleet.frontend_of(&[&worker]).await;
    let begun = streams(&frontend, 10, 1_000_000).await;
    assert_eq!(worker.running().await, 10.0);
    frontend.signal(Signal::KILL);
    assert_eq!(frontend.exit_code().await, None);
    worker.until_running(0.0).await;
    drop(begun);
    worker.stop().await;
}
