//! Workers' KV events, valid or not, and assumed cache contents for workers without events.

use std::num::NonZeroU32;

use genset_backend_common::kv::{KvEvent, KvSnapshot, StoredBlock};

use super::*;

#[tokio::test(start_paused = true)]
async fn a_worker_takes_its_entries_along_and_comes_back_with_its_snapshot() {
    let site = Site::new(true);
    let first = site.worker(1, vec![]).await;
    let router = site.router(KvConfig::default()).await;
    router.until_snapshots(1.0).await;
    router.ask(&prompt(1, 160)).await;
    router.until_blocks(10.0).await;
    let second = site.worker(2, vec![]).await;
    router.until_snapshots(2.0).await;
    drop(first);
    router.until_blocks(0.0).await;
    router.ask(&prompt(1, 160)).await;
    assert_eq!(second.asked(), 1);
    router.until_blocks(10.0).await;
    // A frontend that starts now learns the worker's blocks.
    let other = site.router(KvConfig::default()).await;
    let third = site.worker(3, vec![]).await;
    other.until(SNAPSHOTS, "", |taken| taken >= 5.0).await;
    for _ in 0..6 {
        other.ask(&prompt(1, 160)).await;
    }
    assert_eq!((second.asked(), third.asked()), (7, 0));
}

#[tokio::test(start_paused = true)]
async fn gaps_and_nonsense_are_counted_and_harm_nobody_else() {
    let site = Site::new(true);
    let honest = site.worker(1, vec![]).await;
    let real = blocks_of(&prompt(1, 160));
    let stored = |id, parent: Option<u64>, blocks: Vec<BlockHash>| {
        let parent = parent.map(BlockHash);
        KvItem::Change(KvEvent {
            id,
            data: KvEventData::Stored { parent, blocks },
        })
    };
    let nonsense = vec![
        KvItem::Snapshot(KvSnapshot {
            last_event_id: 7,
            blocks: vec![
                StoredBlock {
                    hash: BlockHash(5),
                    parent: Some(BlockHash(6)),
                },
                StoredBlock {
                    hash: BlockHash(6),
                    parent: Some(BlockHash(5)),
                },
            ],
        }),
        stored(8, Some(99), vec![BlockHash(100), BlockHash(100)]),
        KvItem::Change(KvEvent {
            id: 9,
            data: KvEventData::Removed {
                blocks: vec![BlockHash(12345)],
            },
        }),
        // Another worker's blocks, with a wrong parent.
        stored(10, Some(100), real[3..].to_vec()),
        stored(12, None, vec![BlockHash(1)]),
    ];
    let router = site.router(KvConfig::default()).await;
    router.until_snapshots(1.0).await;
    router.ask(&prompt(1, 160)).await;
    router.until_blocks(10.0).await;
    let liar = site.worker(2, nonsense).await;
    for (reason, count) in [("other_parent", 2.0), ("not_held", 1.0), ("gap", 1.0)] {
        let reason = format!("reason=\"{reason}\"");
        router
            .until(ODD_EVENTS, &reason, |seen| seen >= count)
            .await;
    }
    // After the gap the worker starts over with valid events.
    router.until_snapshots(3.0).await;
    for _ in 0..5 {
        router.ask(&prompt(1, 160)).await;
    }
    assert_eq!((honest.asked(), liar.asked()), (6, 0));
    router.until_blocks(10.0).await;
}

#[tokio::test(start_paused = true)]
async fn endless_blocks_of_one_worker_take_no_room_from_others() {
    let site = Site::new(true);
    let honest = site.worker(1, vec![]).await;
    let kv = KvConfig {
        max_worker_blocks: NonZeroU32::new(1000).unwrap(),
        ..KvConfig::default()
    };
    let router = site.router(kv).await;
    router.until_snapshots(1.0).await;
    router.ask(&prompt(1, 320)).await;
    router.until_blocks(20.0).await;
    let snapshot = KvSnapshot {
        last_event_id: 0,
        blocks: Vec::new(),
    };
    let blocks = |event: u64| (1..=200).map(move |block| BlockHash(event << 32 | block));
    let stored = |event| {
        KvItem::Change(KvEvent {
            id: event,
            data: KvEventData::Stored {
                parent: None,
                blocks: blocks(event).collect(),
            },
        })
    };
    // A hundred thousand blocks; then the worker removes blocks that were never in the index, and falls silent.
    let removed = KvItem::Change(KvEvent {
        id: 501,
        data: KvEventData::Removed {
            blocks: blocks(500).collect(),
        },
    });
    let endless = [KvItem::Snapshot(snapshot)].into_iter();
    let endless = endless.chain((1..=500).map(stored)).chain([removed]);
    let _liar = site.worker(2, endless.collect()).await;
    let too_many = "reason=\"too_many\"";
    router
        .until(ODD_EVENTS, too_many, |count| count == 495.0)
        .await;
    assert_eq!(router.metric(BLOCKS, ""), 1020.0);
    assert_eq!(router.metric(ODD_EVENTS, "not_held"), 0.0);
    // The other worker's prompts are still indexed.
    for _ in 0..6 {
        router.ask(&prompt(1, 320)).await;
    }
    assert_eq!(honest.asked(), 7);
}

#[tokio::test(start_paused = true)]
async fn without_events_what_was_routed_is_assumed_to_be_cached() {
    for use_events in [true, false] {
        let site = Site::new(false);
        let workers = site.workers::<2>().await;
        for worker in &workers {
            worker.load(Load {
                kv_total_blocks: if use_events { 100 } else { 0 },
                ..Load::default()
            });
        }
        let kv = KvConfig {
            use_events,
            ..KvConfig::default()
        };
        let router = site.router(kv).await;
        // Before the loads are known, the choice goes by requests.
        let label = "reason=\"load\"";
        for seed in 1000..2000 {
            router.ask(&prompt(seed, 32)).await;
            if router.metric(CHOICES, label) > 0.0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Yield: the router discovers the workers.
        tokio::time::sleep(Duration::from_millis(5)).await;
        let before = workers.each_ref().map(Worker::asked);
        for _ in 0..6 {
            router.ask(&prompt(1, 320)).await;
        }
        let after = workers.each_ref().map(Worker::asked);
        let gained = [after[0] - before[0], after[1] - before[1]];
        assert!(gained == [6, 0] || gained == [0, 6], "{gained:?}");
        tokio::time::advance(Duration::from_secs(121)).await;
        router.ask(&prompt(2, 16)).await;
        assert_eq!(router.metric(BLOCKS, ""), 1.0);
    }
}
