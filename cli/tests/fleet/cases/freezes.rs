//! SIGSTOP: the process exists, its connections stay open, and nothing is answered.

use rustix::process::Signal;

use crate::fleet::{Fleet, until_all_answer, until_listed, until_unlisted};
use crate::load::burst;
use crate::meeting::Meeting;

pub(crate) async fn a_frozen_worker_is_left_out_and_comes_back<M: Meeting>(fleet: Fleet<M>) {
    let [one, two] = fleet.two_workers(&[]).await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    one.signal(Signal::STOP);
    // Half of the requests wait for the frozen worker until it is considered dead.
    assert_eq!(burst(&frontend, 20).await, [""; 0]);
    assert_eq!(burst(&frontend, 20).await, [""; 0]);
    one.signal(Signal::CONT);
    until_all_answer(&frontend, &[&one]).await;
    assert_eq!(burst(&frontend, 20).await, [""; 0]);
}

pub(crate) async fn a_worker_frozen_past_its_lease_comes_back<M: Meeting>(fleet: Fleet<M>) {
    let worker = fleet.worker(&[]).await;
    let frontend = fleet.frontend_of(&[&worker]).await;
    worker.signal(Signal::STOP);
    until_unlisted(&frontend).await;
    worker.signal(Signal::CONT);
    until_listed(&frontend).await;
    worker.until_log("lease").await;
    assert_eq!(burst(&frontend, 20).await, [""; 0]);
    worker.stop().await;
}
