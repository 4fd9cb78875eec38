//! Answers that outlive their worker after they have begun: the client sees a pause, and the text of an undisturbed answer.

use rustix::process::Signal;

use crate::answers::End;
use crate::fleet::{Fleet, until_listed};
use crate::load::{burst, ends, same_text, streams};
use crate::meeting::Meeting;
use crate::support::Server;

/// Tokens of an answer: it takes longer than a worker needs to exit.
const LONG: u64 = 400;

/// The text of an undisturbed answer.
async fn undisturbed(frontend: &Server) -> String {
    same_text(streams(frontend, 1, LONG).await).await
}

pub(crate) async fn what_had_begun_moves_when_its_worker_is_killed<M: Meeting>(fleet: Fleet<M>) {
    let [one, two] = fleet.two_workers(&["--token-delay-ms=20"]).await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    let whole = undisturbed(&frontend).await;
    let begun = streams(&frontend, 20, LONG).await;
    assert!(one.running().await > 0.0);
    one.kill().await;
    assert_eq!(same_text(begun).await, whole);
    let metrics = frontend.get("/metrics").await.body;
    assert!(metrics.contains("genset_migrations_total{"), "{metrics}");
    two.until_running(0.0).await;
}

pub(crate) async fn what_had_begun_moves_twice<M: Meeting>(fleet: Fleet<M>) {
    let [one, two] = fleet.two_workers(&["--token-delay-ms=20"]).await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    let whole = undisturbed(&frontend).await;
    let begun = streams(&frontend, 10, LONG).await;
    one.kill().await;
    two.until_running(10.0).await;
    let three = fleet.worker(&["--token-delay-ms=20"]).await;
    two.kill().await;
    assert_eq!(same_text(begun).await, whole);
    three.until_running(0.0).await;
}

pub(crate) async fn what_had_begun_moves_when_its_worker_freezes<M: Meeting>(fleet: Fleet<M>) {
    let [one, two] = fleet.two_workers(&["--token-delay-ms=20"]).await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    let whole = undisturbed(&frontend).await;
    let begun = streams(&frontend, 10, LONG).await;
    assert!(one.running().await > 0.0);
    one.signal(Signal::STOP);
    assert_eq!(same_text(begun).await, whole);
    // It learns that nobody reads the rest of its answers.
    one.signal(Signal::CONT);
    one.until_running(0.0).await;
}

pub(crate) async fn what_is_left_after_the_grace_moves<M: Meeting>(fleet: Fleet<M>) {
    let [one, two] = fleet
        .two_workers(&["--token-delay-ms=20", "--grace=0"])
        .await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    let whole = undisturbed(&frontend).await;
    let begun = streams(&frontend, 20, LONG).await;
    assert!(one.running().await > 0.0);
    let (text, ()) = tokio::join!(same_text(begun), one.leave());
    assert_eq!(text, whole);
    two.stop().await;
}

pub(crate) async fn a_rolling_restart_loses_no_answer_longer_than_the_grace<M: Meeting>(
    fleet: Fleet<M>,
) {
    let words = ["--token-delay-ms=20", "--grace=0.2"];
    let [one, two] = fleet.two_workers(&words).await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    let begun = streams(&frontend, 20, LONG).await;
    let restart = async {
        one.leave().await;
        let three = fleet.worker(&words).await;
        two.leave().await;
        [three, fleet.worker(&words).await]
    };
    let (text, workers) = tokio::join!(same_text(begun), restart);
    assert_eq!(text, undisturbed(&frontend).await);
    for worker in workers {
        worker.stop().await;
    }
}

pub(crate) async fn a_worker_that_comes_in_time_takes_the_answers_on<M: Meeting>(fleet: Fleet<M>) {
    let one = fleet.worker(&["--token-delay-ms=20"]).await;
    let frontend = fleet.frontend(&["--migration-wait=60"]).await;
    until_listed(&frontend).await;
    let whole = undisturbed(&frontend).await;
    let begun = streams(&frontend, 10, LONG).await;
    one.kill().await;
    let next = fleet.worker(&["--token-delay-ms=20"]);
    let (text, failures, two) = tokio::join!(same_text(begun), burst(&frontend, 20), next);
    assert_eq!(text, whole);
    assert_eq!(failures, [""; 0]);
    two.stop().await;
}

pub(crate) async fn answers_end_with_an_error_when_nobody_comes<M: Meeting>(fleet: Fleet<M>) {
    let one = fleet.worker(&["--token-delay-ms=20"]).await;
    let frontend = fleet.frontend(&["--migration-wait=0.5"]).await;
    until_listed(&frontend).await;
    let begun = streams(&frontend, 5, 1_000_000).await;
    one.kill().await;
    for end in ends(begun).await {
        let End::Error(error) = end else {
            panic!("{end:?}")
        };
        let message = error["message"].as_str().unwrap_or_default();
        assert!(message.contains("no other instance took it"), "{error}");
    }
}
