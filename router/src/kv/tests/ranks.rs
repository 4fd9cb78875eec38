//! Workers with several data-parallel ranks.

use super::*;

#[tokio::test(start_paused = true)]
async fn ranks_are_targets_of_their_own_and_a_named_one_is_honoured() {
    for use_events in [true, false] {
        let mut site = Site::new(true);
        site.card.data_parallel_size = 2;
        site.card.capabilities.kv_ranks = true;
        let worker = site.worker(1, vec![]).await;
        let kv = KvConfig {
            use_events,
            ..KvConfig::default()
        };
        let router = site.router(kv).await;
        if use_events {
            router.until_snapshots(2.0).await;
        } else {
            // Yield: the router discovers the worker.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        for seed in 1..=2 {
            router.ask(&prompt(seed, 320)).await;
        }
        router.until_blocks(40.0).await;
        let ranks = worker.fake.ranks.lock().clone();
        assert!([Some(0), Some(1)].iter().all(|rank| ranks.contains(rank)));
        for _ in 0..3 {
            router.ask(&prompt(1, 320)).await;
        }
        let mut request = GenerateRequest::from_tokens("m", prompt(1, 320));
        let other = 1 - ranks[0].unwrap();
        request.data_parallel_rank = Some(other);
        let ctx = RequestContext::new("r");
        read(
            router
                .generate
                .generate(request.clone(), ctx)
                .await
                .unwrap(),
        )
        .await;
        let expected = [ranks[0], ranks[0], ranks[0], Some(other)];
        assert_eq!(worker.fake.ranks.lock()[2..], expected);
        // The engine refuses a rank that does not exist.
        request.data_parallel_rank = Some(7);
        let ctx = RequestContext::new("r");
        read(router.generate.generate(request, ctx).await.unwrap()).await;
        assert_eq!(worker.fake.ranks.lock().last(), Some(&Some(7)));
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_tells_no_ranks_apart_chooses_among_them() {
    let mut site = Site::new(true);
    site.card.data_parallel_size = 2;
    let worker = site.worker(1, vec![]).await;
    let router = site.router(KvConfig::default()).await;
    router.until_snapshots(1.0).await;
    router.ask(&prompt(1, 320)).await;
    assert_eq!(worker.fake.ranks.lock()[..], [None]);
}
