//! The choice of a worker, by its cached prefix and its load.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_prompt_goes_where_it_is_cached_and_others_by_turns() {
    let (workers, router) = routed::<3>().await;
    for seed in 1..=3 {
        router.ask(&prompt(seed, 320)).await;
    }
    assert!(workers.iter().all(|worker| worker.asked() == 1));
    router.until_blocks(60.0).await;
    for round in 1..=4 {
        for seed in 1..=3 {
            let mut longer = prompt(seed, 320);
            longer.extend(prompt(seed + 10 + round, 40));
            router.ask(&longer).await;
        }
    }
    for worker in &workers {
        let asked = worker.fake.asked.lock();
        assert!(asked.len() == 5 && asked.iter().all(|tokens| tokens[..320] == asked[0]));
    }
    assert_eq!(router.metric(CHOICES, "overlap"), 12.0);
    let (predicted, actual) = (
        router.metric("genset_router_predicted_cached_tokens_total", ""),
        router.metric("genset_router_actual_cached_tokens_total", ""),
    );
    assert_eq!((predicted, actual), (12.0 * 320.0, 12.0 * 320.0));
    assert!(router.metric("genset_router_decision_seconds_count", "") >= 15.0);
}

#[tokio::test(start_paused = true)]
async fn requests_that_come_together_go_to_different_workers() {
    let (workers, router) = routed::<2>().await;
    for worker in &workers {
        worker.fake.may_answer.send_replace(None);
    }
    let mut open = Vec::new();
    for seed in 0..8 {
        open.push(router.begin(&prompt(seed, 100)).await);
    }
    assert_eq!(workers.each_ref().map(Worker::asked), [4, 4]);
    // A worker busy with long prompts gets none until they end.
    let long = router.begin(&prompt(50, 10_000)).await;
    let before = workers.each_ref().map(Worker::asked);
    let busy = usize::from(before[1] == 5);
    for seed in 60..70 {
        open.push(router.begin(&prompt(seed, 100)).await);
    }
    assert_eq!(workers[busy].asked(), 5);
    assert_eq!(workers[1 - busy].asked(), 14);
    drop((open, long));
    for seed in 80..84 {
        drop(router.begin(&prompt(seed, 100)).await);
    }
    assert_eq!(workers[busy].asked(), 7);
}

#[tokio::test(start_paused = true)]
async fn what_others_ask_of_a_worker_counts() {
    let site = Site::new(true);
    let workers = site.workers::<2>().await;
    workers[0].load(Load {
        running_requests: 5,
        kv_used_blocks: 500,
        kv_total_blocks: 1000,
        ..Load::default()
    });
    let router = site.router(KvConfig::default()).await;
    router.until_snapshots(2.0).await;
    // The router has subscribed to the loads by now; one more request may still be routed before they arrive.
    let ask = async |seed| {
        for seed in seed..seed + 6 {
            router.ask(&prompt(seed, 64)).await;
        }
    };
    ask(0).await;
    let before = workers[0].asked();
    ask(10).await;
    assert_eq!(workers[0].asked(), before);
    workers[0].load(Load::default());
    eventually_asked(&router, &workers[0], before).await;
}

/// Chats with images are such requests, beside chats that are tokens here.
#[tokio::test(start_paused = true)]
async fn requests_whose_blocks_are_unknown_count_where_they_run() {
    let (workers, router) = routed::<2>().await;
    for worker in &workers {
        worker.fake.may_answer.send_replace(None);
    }
    let mut running = Vec::new();
    for _ in 0..6 {
        // The key keeps them at one worker.
        let ctx = RequestContext::new("r").with_affinity("me");
        let request = GenerateRequest::from_text("m", "a question");
        running.push(router.generate.generate(request, ctx).await.unwrap());
    }
    let busy = usize::from(workers[1].asked() == 6);
    assert_eq!(workers[busy].asked(), 6);
    for seed in 0..6 {
        drop(router.begin(&prompt(seed, 64)).await);
    }
    assert_eq!(workers.each_ref().map(Worker::asked), [6, 6]);
    drop(running);
    for seed in 10..16 {
        drop(router.begin(&prompt(seed, 64)).await);
    }
    assert_eq!(workers.each_ref().map(Worker::asked), [9, 9]);
}

/// Waits until new prompts reach the worker again.
async fn eventually_asked(router: &Router, worker: &Worker, before: usize) {
    for seed in 100..1000 {
        router.ask(&prompt(seed, 64)).await;
        if worker.asked() > before {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("it is asked no more");
}

#[tokio::test(start_paused = true)]
async fn workers_without_kv_blocks_are_chosen_by_their_requests() {
    let site = Site::new(false);
    let workers = site.workers::<2>().await;
    let router = site.router(KvConfig::default()).await;
    for _ in 0..6 {
        router.ask(&prompt(1, 320)).await;
    }
    assert_eq!(workers.each_ref().map(Worker::asked), [3, 3]);
    assert_eq!(router.metric(CHOICES, "fallback"), 6.0);
}

#[tokio::test(start_paused = true)]
async fn with_a_weight_of_zero_nobody_looks_at_caches() {
    let site = Site::new(true);
    let workers = site.workers::<2>().await;
    let kv = KvConfig {
        overlap_score_weight: 0.0,
        ..KvConfig::default()
    };
    let router = site.router(kv).await;
    for _ in 0..6 {
        router.ask(&prompt(1, 320)).await;
    }
    assert_eq!(workers.each_ref().map(Worker::asked), [3, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_decision_is_explained_when_asked() {
    let (workers, router) = routed::<2>().await;
    router.ask(&prompt(1, 320)).await;
    router.until_blocks(20.0).await;
    let holder = 1 + workers[1].asked() as u64;
    let (_, decision) = router.explained(&longer()).await;
    let other = InstanceId(3 - holder).to_string();
    let holder = InstanceId(holder).to_string();
    assert_eq!(decision["instance"], holder);
    assert_eq!(
        (&decision["reason"], &decision["mode"]),
        (&"overlap".into(), &"kv".into())
    );
    assert_eq!(
        (&decision["prompt_blocks"], &decision["block_size"]),
        (&23.into(), &16.into())
    );
    let candidates = serde_json::json!([
        {"instance": holder, "cost": 25.5, "overlap_blocks": 20, "prefill_blocks": 22.5, "active_blocks": 23.0},
        {"instance": other, "cost": 45.5, "overlap_blocks": 0, "prefill_blocks": 22.5, "active_blocks": 23.0},
    ]);
    assert_eq!(decision["candidates"], candidates);
}
