//! Requests with an affinity key.

use super::*;

/// New prompts, which no worker has cached.
#[tokio::test(start_paused = true)]
async fn a_key_stays_where_it_was_served_as_long_as_that_costs_little() {
    let (workers, router) = routed::<3>().await;
    for seed in 0..7 {
        read(router.begin_for("me", &prompt(seed, 64)).await).await;
    }
    let served = workers.each_ref().map(Worker::asked);
    let mine = served.iter().position(|asked| *asked == 7).unwrap();
    assert_eq!(router.metric(CHOICES, "affinity"), 6.0);
    // Two long prompts wait there: 2 * 20 blocks exceed 32.
    workers[mine].fake.may_answer.send_replace(None);
    let waiting = [
        router.begin_for("me", &prompt(50, 160)).await,
        router.begin_for("me", &prompt(51, 160)).await,
    ];
    assert_eq!(workers[mine].asked(), 9);
    read(router.begin_for("me", &prompt(52, 64)).await).await;
    assert_eq!(workers[mine].asked(), 9);
    // The key has moved to another worker.
    drop(waiting);
    read(router.begin_for("me", &prompt(53, 64)).await).await;
    assert_eq!(workers[mine].asked(), 9);
    // Requests without a key alternate.
    workers[mine].fake.may_answer.send_replace(Some(1));
    for seed in 100..109 {
        router.ask(&prompt(seed, 64)).await;
    }
    assert!(workers.iter().all(|worker| worker.asked() >= 3));
}

#[tokio::test(start_paused = true)]
async fn a_key_stays_where_it_was_served_without_kv_blocks_too() {
    for (affinity_blocks, expected) in [(32, [0, 6]), (0, [3, 3])] {
        let site = Site::new(false);
        let workers = site.workers::<2>().await;
        let kv = KvConfig {
            affinity_blocks,
            ..KvConfig::default()
        };
        let router = site.router(kv).await;
        for seed in 0..6 {
            read(router.begin_for("me", &prompt(seed, 64)).await).await;
        }
        let mut asked = workers.each_ref().map(Worker::asked);
        asked.sort_unstable();
        assert_eq!(asked, expected);
    }
}
