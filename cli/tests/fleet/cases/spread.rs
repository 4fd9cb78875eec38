//! Selection spreads load over workers, from several frontends.

use crate::fleet::{Fleet, until_all_answer, until_listed};
use crate::load::{burst, streams};
use crate::meeting::Meeting;

pub(crate) async fn least_loaded_spreads_load<M: Meeting>(fleet: Fleet<M>) {
    // A frontend sees its own requests immediately and those of the other one later, so the shares may differ.
    spreads(fleet, "least-loaded", 12.0).await;
}

pub(crate) async fn power_of_two_spreads_load<M: Meeting>(fleet: Fleet<M>) {
    // With random selection, a worker gets fewer than 8 of 60 once in ten thousand runs; with power-of-two, far less often.
    spreads(fleet, "power-of-two", 8.0).await;
}

/// With 60 open streams, every worker has at least `least`.
async fn spreads<M: Meeting>(fleet: Fleet<M>, mode: &str, least: f64) {
    let delay = ["--token-delay-ms=50"];
    let ([one, two], three) = tokio::join!(fleet.two_workers(&delay), fleet.worker(&delay));
    let workers = [&one, &two, &three];
    let mut frontends = Vec::new();
    // Check both before there is load: later only the least loaded worker would answer.
    for _ in 0..2 {
        let flag = format!("--router-mode={mode}");
        let frontend = fleet.frontend(&[&flag]).await;
        until_listed(&frontend).await;
        until_all_answer(&frontend, &workers).await;
        frontends.push(frontend);
    }
    let mut open = Vec::new();
    for frontend in &frontends {
        assert_eq!(burst(frontend, 50).await, [""; 0]);
        open.extend(streams(frontend, 30, 1_000_000).await);
    }
    let mut total = 0.0;
    for worker in workers {
        let running = worker.running().await;
        assert!(running >= least, "{mode}: {running}");
        total += running;
    }
    assert_eq!(total, 60.0);
    drop(open);
    for worker in workers {
        worker.until_running(0.0).await;
    }
}
