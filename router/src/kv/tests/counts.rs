//! The router's counts of its own requests, and their lifetime.

use super::*;

#[tokio::test(start_paused = true)]
async fn blocks_that_a_request_shares_with_those_that_run_count_once() {
    let ([worker], router) = routed().await;
    worker.fake.may_answer.send_replace(None);
    let running = router.begin(&prompt(1, 320)).await;
    let (outputs, decision) = router.explained(&longer()).await;
    assert_eq!(decision["candidates"][0]["active_blocks"], 23.0);
    drop((running, outputs));
    let (_, decision) = router.explained(&longer()).await;
    assert_eq!(decision["candidates"][0]["active_blocks"], 23.0);
}

#[tokio::test(start_paused = true)]
async fn what_was_assumed_before_a_pause_is_not_gone_by() {
    let site = Site::new(false);
    let _worker = site.worker(1, vec![]).await;
    let kv = KvConfig {
        use_events: false,
        ..KvConfig::default()
    };
    let router = site.router(kv).await;
    // Yield: the router discovers the worker.
    tokio::time::sleep(Duration::from_millis(5)).await;
    router.ask(&prompt(1, 320)).await;
    let overlap = async |after: Duration| {
        tokio::time::advance(after).await;
        let (outputs, decision) = router.explained(&longer()).await;
        read(outputs).await;
        decision["candidates"][0]["overlap_blocks"].as_u64()
    };
    assert_eq!(overlap(Duration::from_secs(119)).await, Some(20));
    assert_eq!(overlap(Duration::from_secs(121)).await, Some(0));
}

#[tokio::test(start_paused = true)]
async fn what_a_worker_whose_events_are_late_has_is_to_be_prefilled() {
    let ([worker], router) = routed().await;
    router.ask(&prompt(1, 320)).await;
    router.until_blocks(20.0).await;
    worker.load(Load {
        kv_events: 1000,
        ..Load::default()
    });
    for seed in 100..1000 {
        router.ask(&prompt(seed, 16)).await;
        if router.metric("genset_router_lag_events", "") > 0.0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
    tokio::time::sleep(Duration::from_secs(6)).await;
    worker.fake.may_answer.send_replace(None);
    let mut running = Vec::new();
    // Each has 22.5 blocks, none prefilled yet.
    for prefill in [22.5, 45.0] {
        let (outputs, decision) = router.explained(&longer()).await;
        assert_eq!(decision["candidates"][0]["overlap_blocks"], 0);
        assert_eq!(decision["candidates"][0]["prefill_blocks"], prefill);
        running.push(outputs);
    }
}

#[tokio::test(start_paused = true)]
async fn the_gauges_of_a_model_go_with_it() {
    let site = Site::new(true);
    let _worker = site.worker(1, vec![]).await;
    let router = site.router(KvConfig::default()).await;
    router.ask(&prompt(1, 160)).await;
    router.until_blocks(10.0).await;
    let Router { generate, .. } = router;
    drop(generate);
    let is_gone = || !site.runtime.metrics().encode().contains("index_blocks{");
    eventually(is_gone, "the gauge is gone").await;
}
