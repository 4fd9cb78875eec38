//! [`Board`]: what the ranks of an instance publish together: load, metrics, KV events.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use genset_backend_common::kv::{BlockHash, KvEventData, KvEventPublisher};
use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::prometheus::metrics::histogram::Histogram;
use genset_backend_common::{
    HealthReporter, LATENCY_BUCKETS_S, Load, LoadPublisher, MetricsRegistry, StartContext,
};
use genset_scheduler::Stats;
use parking_lot::Mutex;

use crate::time::float;

/// Where all ranks publish.
#[derive(Debug)]
pub(crate) struct Board {
    ranks: Mutex<Vec<Stats>>,
    produced_tokens: AtomicU64,
    load: LoadPublisher,
    pub(crate) health: HealthReporter,
    metrics: Metrics,
    cache: SharedCache,
}

impl Board {
    pub(crate) fn new(start: &StartContext, ranks: usize) -> Self {
        Self {
            ranks: Mutex::new(vec![Stats::default(); ranks]),
            produced_tokens: AtomicU64::new(0),
            load: start.load.clone(),
            health: start.health.clone(),
            metrics: Metrics::register(&start.metrics),
            cache: SharedCache::new(start.kv_events.clone(), ranks),
        }
    }

    /// Takes note of how busy a rank is.
    pub(crate) fn state(&self, rank: usize, now: Stats) {
        let mut ranks = self.ranks.lock();
        let Some(slot) = ranks.get_mut(rank) else {
            return;
        };
        let before = std::mem::replace(slot, now);
        let sum = sum(&ranks);
        self.metrics.state(before, now, sum);
        // Under the lock, so that an older sum does not overtake a newer one.
        self.load.publish(load(sum));
    }

    pub(crate) fn step(&self, took: Duration, generated_tokens: u64) {
        self.produced_tokens
            .fetch_add(generated_tokens, Ordering::Relaxed);
        self.metrics.step_s.observe(took.as_secs_f64());
        self.metrics.generated_tokens.inc_by(generated_tokens);
    }

    pub(crate) fn cache_changed(&self, rank: usize, events: Vec<KvEventData>) {
        for event in events {
            self.cache.apply(rank, event);
        }
    }

    /// Counts of all ranks together, as of their last steps.
    pub(crate) fn stats(&self) -> Stats {
        sum(&self.ranks.lock())
    }

    pub(crate) fn produced_tokens(&self) -> u64 {
        self.produced_tokens.load(Ordering::Relaxed)
    }
}

fn sum(ranks: &[Stats]) -> Stats {
    ranks.iter().fold(Stats::default(), |sum, rank| Stats {
        waiting: sum.waiting + rank.waiting,
        running: sum.running + rank.running,
        total_blocks: sum.total_blocks + rank.total_blocks,
        used_blocks: sum.used_blocks + rank.used_blocks,
        held_blocks: sum.held_blocks + rank.held_blocks,
        free_blocks: sum.free_blocks + rank.free_blocks,
        paused: sum.paused + rank.paused,
        preemptions: sum.preemptions + rank.preemptions,
        prompt_tokens: sum.prompt_tokens + rank.prompt_tokens,
        cached_tokens: sum.cached_tokens + rank.cached_tokens,
    })
}

fn load(stats: Stats) -> Load {
    Load {
        running_requests: u32::try_from(stats.running).unwrap_or(u32::MAX),
        waiting_requests: u32::try_from(stats.waiting).unwrap_or(u32::MAX),
        kv_used_blocks: u64::try_from(stats.used_blocks).unwrap_or(u64::MAX),
        kv_total_blocks: u64::try_from(stats.total_blocks).unwrap_or(u64::MAX),
        ..Load::default()
    }
}

/// The prefix caches of all ranks as one: a block is there as long as one rank has it. Each rank's blocks have their parents, so
/// those of all together have theirs.
#[derive(Debug)]
struct SharedCache {
    publisher: KvEventPublisher,
    /// Each rank's own; none where there is one rank.
    ranks: Vec<KvEventPublisher>,
    /// Which ranks hold a block, a bit each; `None` where there is one rank, whose events are those of all.
    holders: Option<Mutex<HashMap<BlockHash, u64>>>,
}

impl SharedCache {
    fn new(publisher: KvEventPublisher, ranks: usize) -> Self {
        let holders = (ranks > 1).then(Mutex::default);
        let ranks = (0_u32..).take(if ranks > 1 { ranks } else { 0 });
        Self {
            ranks: ranks.map(|rank| publisher.of_rank(rank)).collect(),
            publisher,
            holders,
        }
    }

    fn apply(&self, rank: usize, event: KvEventData) {
        if let Some(publisher) = self.ranks.get(rank) {
            publisher.publish(event.clone());
        }
        let Some(holders) = &self.holders else {
            self.publisher.publish(event);
            return;
        };
        let bit = 1 << rank;
        let mut holders = holders.lock();
        match event {
            KvEventData::Stored { parent, blocks } => {
                self.store(&mut holders, bit, parent, blocks);
            }
            KvEventData::Removed { blocks } => self.remove(&mut holders, bit, blocks),
            KvEventData::Cleared => {
                let held = holders.iter().filter(|(_, ranks)| **ranks & bit != 0);
                let held = held.map(|(block, _)| *block).collect();
                self.remove(&mut holders, bit, held);
            }
        }
    }

    /// What a rank stores behind blocks that others have is new from some block on: one event each run of new ones.
    fn store(
        &self,
        holders: &mut HashMap<BlockHash, u64>,
        bit: u64,
        mut parent: Option<BlockHash>,
        blocks: Vec<BlockHash>,
    ) {
        let mut new = Vec::new();
        let mut before_new = parent;
        for block in blocks {
            let ranks = holders.entry(block).or_default();
            let is_new = std::mem::replace(ranks, *ranks | bit) == 0;
            if is_new {
                if new.is_empty() {
                    before_new = parent;
                }
                new.push(block);
            } else {
                self.publish_stored(before_new, std::mem::take(&mut new));
            }
            parent = Some(block);
        }
        self.publish_stored(before_new, new);
    }

    fn publish_stored(&self, parent: Option<BlockHash>, blocks: Vec<BlockHash>) {
        if !blocks.is_empty() {
            self.publisher
                .publish(KvEventData::Stored { parent, blocks });
        }
    }

    fn remove(&self, holders: &mut HashMap<BlockHash, u64>, bit: u64, mut blocks: Vec<BlockHash>) {
        blocks.retain(|block| {
            let Some(ranks) = holders.get_mut(block) else {
                return false;
            };
            *ranks &= !bit;
            let is_gone = *ranks == 0;
            if is_gone {
                holders.remove(block);
            }
            is_gone
        });
        if !blocks.is_empty() {
            self.publisher.publish(KvEventData::Removed { blocks });
        }
    }
}

/// The engine's metrics, registered.
#[derive(Debug)]
struct Metrics {
    step_s: Histogram,
    generated_tokens: Counter,
    preemptions: Counter,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    running: Gauge,
    waiting: Gauge,
    kv_used: Gauge<f64, AtomicU64>,
}

impl Metrics {
    fn register(registry: &MetricsRegistry) -> Self {
        let metrics = Self {
            step_s: Histogram::new(LATENCY_BUCKETS_S),
            generated_tokens: Counter::default(),
            preemptions: Counter::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            kv_used: Gauge::default(),
        };
        let step = "Time that a step takes by the model of it, in seconds";
        registry.register("genset_mocker_step_seconds", step, metrics.step_s.clone());
        let generated = "Tokens generated";
        let counter = metrics.generated_tokens.clone();
        registry.register("genset_mocker_generated_tokens", generated, counter);
        let preemptions = "Sequences that lost their KV blocks and were computed again";
        let counter = metrics.preemptions.clone();
        registry.register("genset_mocker_preemptions", preemptions, counter);
        let prompt = "Prompt tokens of sequences that began";
        let counter = metrics.prompt_tokens.clone();
        registry.register("genset_mocker_prompt_tokens", prompt, counter);
        let cached = "Prompt tokens that were found in the prefix cache";
        let counter = metrics.cached_tokens.clone();
        registry.register("genset_mocker_prefix_hit_tokens", cached, counter);
        let running = "Sequences that run";
        let gauge = metrics.running.clone();
        registry.register("genset_mocker_running_sequences", running, gauge);
        let waiting = "Sequences that wait";
        let gauge = metrics.waiting.clone();
        registry.register("genset_mocker_waiting_sequences", waiting, gauge);
        let kv_used = "Share of KV blocks that sequences hold, from 0 to 1";
        let gauge = metrics.kv_used.clone();
        registry.register("genset_mocker_kv_usage", kv_used, gauge);
        metrics
    }

    /// Counts what came since a rank's last call, and sets the gauges of all.
    fn state(&self, before: Stats, now: Stats, sum: Stats) {
        let came = [
            (&self.preemptions, now.preemptions - before.preemptions),
            (
                &self.prompt_tokens,
                now.prompt_tokens - before.prompt_tokens,
            ),
            (
                &self.cached_tokens,
                now.cached_tokens - before.cached_tokens,
            ),
        ];
        for (counter, count) in came {
            counter.inc_by(count);
        }
        self.running
            .set(i64::try_from(sum.running).unwrap_or(i64::MAX));
        self.waiting
            .set(i64::try_from(sum.waiting).unwrap_or(i64::MAX));
        self.kv_used
            .set(float(sum.used_blocks) / float(sum.total_blocks.max(1)));
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn blocks(numbers: &[u64]) -> Vec<BlockHash> {
        numbers.iter().copied().map(BlockHash).collect()
    }

    fn stored(parent: Option<u64>, numbers: &[u64]) -> KvEventData {
        KvEventData::Stored {
            parent: parent.map(BlockHash),
            blocks: blocks(numbers),
        }
    }

    fn removed(numbers: &[u64]) -> KvEventData {
        KvEventData::Removed {
            blocks: blocks(numbers),
        }
    }

    /// What comes of events of two ranks.
    fn shared(events: &[(usize, KvEventData)]) -> Vec<KvEventData> {
        let publisher = KvEventPublisher::new();
        let mut subscription = publisher.subscribe();
        let cache = SharedCache::new(publisher, 2);
        for (rank, event) in events {
            cache.apply(*rank, event.clone());
        }
        let mut seen = Vec::new();
        while let Some(Ok(event)) = subscription.next().now_or_never() {
            seen.push(event.data);
        }
        seen
    }

    #[test]
    fn a_block_is_there_as_long_as_one_rank_has_it() {
        let seen = shared(&[
            (0, stored(None, &[1, 2])),
            (1, stored(None, &[1, 2, 3])),
            (0, removed(&[2])),
            (1, removed(&[3])),
            (1, removed(&[2])),
        ]);
        let expected = [
            stored(None, &[1, 2]),
            stored(Some(2), &[3]),
            removed(&[3]),
            removed(&[2]),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn each_rank_has_events_of_its_own() {
        let publisher = KvEventPublisher::new();
        let cache = SharedCache::new(publisher.clone(), 2);
        cache.apply(0, stored(None, &[1, 2]));
        cache.apply(1, stored(None, &[1]));
        cache.apply(0, removed(&[1, 2]));
        let blocks = |rank| publisher.of_rank(rank).subscribe().snapshot.blocks.len();
        assert_eq!([0, 1].map(blocks), [0, 1]);
        SharedCache::new(KvEventPublisher::new(), 1).apply(0, stored(None, &[1]));
    }

    #[test]
    fn a_rank_that_is_cleared_leaves_what_others_have() {
        let seen = shared(&[
            (0, stored(None, &[1, 2])),
            (1, stored(None, &[1])),
            (0, KvEventData::Cleared),
            (1, KvEventData::Cleared),
        ]);
        let expected = [stored(None, &[1, 2]), removed(&[2]), removed(&[1])];
        assert_eq!(seen, expected);
    }

    #[test]
    fn new_blocks_between_known_ones_name_their_parents() {
        let seen = shared(&[
            (0, stored(None, &[1])),
            (0, stored(None, &[3])),
            (1, stored(None, &[1, 2, 3, 4, 5])),
        ]);
        assert_eq!(seen[2..], [stored(Some(1), &[2]), stored(Some(3), &[4, 5])]);
    }
}
