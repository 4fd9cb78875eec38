//! SIGTERM, and rolling replacement of fleets.

use rustix::process::Signal;

use crate::answers::End;
use crate::fleet::{Fleet, until_all_answer, until_listed};
use crate::load::{Hammer, ends, streams};
use crate::meeting::Meeting;
use crate::support::until;

/// Clients that send requests continuously.
const CLIENTS: usize = 8;

pub(crate) async fn a_draining_worker_finishes_its_streams_and_nothing_fails<M: Meeting>(
    fleet: Fleet<M>,
) {
    let [one, two] = fleet.two_workers(&["--token-delay-ms=20"]).await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    let hammer = Hammer::start(&frontend, CLIENTS);
    let begun = streams(&frontend, 50, 200).await;
    assert!(one.running().await > 0.0);
    let (ends, _log) = tokio::join!(ends(begun), one.stop());
    for end in ends {
        assert!(matches!(end, End::Done(200)), "{end:?}");
    }
    hammer.expect_no_failure().await;
    two.stop().await;
}

pub(crate) async fn a_rolling_restart_fails_nothing<M: Meeting>(fleet: Fleet<M>) {
    let [one, two] = fleet.two_workers(&["--token-delay-ms=1"]).await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    let hammer = Hammer::start(&frontend, CLIENTS);
    one.stop().await;
    // The next one leaves as soon as the new one is ready.
    let three = fleet.worker(&["--token-delay-ms=1"]).await;
    two.stop().await;
    let four = fleet.worker(&["--token-delay-ms=1"]).await;
    three.stop().await;
    hammer.expect_no_failure().await;
    four.stop().await;
}

pub(crate) async fn a_draining_frontend_finishes_its_streams<M: Meeting>(fleet: Fleet<M>) {
    let worker = fleet.worker(&["--token-delay-ms=20"]).await;
    let frontend = fleet.frontend_of(&[&worker]).await;
    let begun = streams(&frontend, 20, 100).await;
    let (ends, ()) = tokio::join!(ends(begun), frontend.stop());
    for end in ends {
        assert!(matches!(end, End::Done(100)), "{end:?}");
    }
    worker.until_running(0.0).await;
}

pub(crate) async fn a_second_signal_to_a_frontend_ends_streams_with_an_error<M: Meeting>(
    fleet: Fleet<M>,
) {
    let worker = fleet.worker(&["--token-delay-ms=20"]).await;
    // Within the time of a test, the grace period alone would not end the streams.
    let mut frontend = fleet.frontend(&["--grace=100000"]).await;
    until_listed(&frontend).await;
    until_all_answer(&frontend, &[&worker]).await;
    let begun = streams(&frontend, 10, 1_000_000).await;
    frontend.signal(Signal::TERM);
    until(async || frontend.log().contains("draining")).await;
    frontend.signal(Signal::TERM);
    for end in ends(begun).await {
        let End::Error(error) = end else {
            panic!("{end:?}")
        };
        let message = error["message"].as_str().unwrap_or_default();
        assert!(message.contains("the server is shutting down"), "{error}");
    }
    // Requests were cut short.
    assert_eq!(frontend.exit_code().await, Some(3));
    let log = frontend.log();
    assert!(log.contains("stopped outcome=Forced"), "{log}");
    worker.until_running(0.0).await;
}

pub(crate) async fn a_second_signal_ends_streams_with_an_error<M: Meeting>(fleet: Fleet<M>) {
    let words = ["--token-delay-ms=20", "--grace=100000"];
    let [one, two] = fleet.two_workers(&words).await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    let begun = streams(&frontend, 10, 1_000_000).await;
    for worker in [&one, &two] {
        worker.signal(Signal::TERM);
        worker.until_log("finishing requests").await;
        worker.signal(Signal::TERM);
    }
    for end in ends(begun).await {
        let End::Error(error) = end else {
            panic!("{end:?}")
        };
        assert_eq!(error["type"], "server_error", "{error}");
    }
    // Requests were cut short.
    assert_eq!(one.exit_code().await, Some(3));
    assert_eq!(two.exit_code().await, Some(3));
}
