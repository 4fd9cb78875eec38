//! Discovery goes down and comes back.

use std::time::Duration;

use crate::answers::End;
use crate::fleet::{Fleet, until_all_answer};
use crate::load::{Hammer, ends, streams};
use crate::meeting::{Meeting, Outage};

/// How long traffic runs without discovery: longer than any lease of these fleets.
const OUTAGE: Duration = Duration::from_secs(6);

pub(crate) async fn traffic_outlives_discovery_that_is_gone<M: Meeting>(fleet: Fleet<M>) {
    traffic_outlives(fleet, Outage::Gone).await;
}

pub(crate) async fn traffic_outlives_discovery_that_is_stuck<M: Meeting>(fleet: Fleet<M>) {
    traffic_outlives(fleet, Outage::Stuck).await;
}

async fn traffic_outlives<M: Meeting>(mut fleet: Fleet<M>, outage: Outage) {
    let [one, two] = fleet.two_workers(&["--token-delay-ms=20"]).await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    let begun = streams(&frontend, 10, 400).await;
    let hammer = Hammer::start(&frontend, 4);
    fleet.meeting.interrupt(outage).await;
    tokio::time::sleep(OUTAGE).await;
    fleet.meeting.resume(outage).await;
    let three = fleet.worker(&[]).await;
    until_all_answer(&frontend, &[&one, &two, &three]).await;
    hammer.expect_no_failure().await;
    for end in ends(begun).await {
        assert!(matches!(end, End::Done(400)), "{end:?}");
    }
    for worker in [one, two, three] {
        worker.stop().await;
    }
}
