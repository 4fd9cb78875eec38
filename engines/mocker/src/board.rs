//! [`Board`]: what the ranks of an instance publish together: load, metrics and KV events.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use genset_backend_common::kv::{KvEventData, KvEventPublisher};
use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::histogram::Histogram;
use genset_backend_common::{
    HealthReporter, StartContext,
    handles::{LATENCY_BUCKETS_S, LoadPublisher},
};
use genset_scheduler::{SchedulerMetrics, Stats};
use parking_lot::Mutex;

/// The publishers that all ranks share.
#[derive(Debug)]
pub(crate) struct Board {
    ranks: Mutex<Vec<Stats>>,
    produced_tokens: AtomicU64,
    load: LoadPublisher,
    pub(crate) health: HealthReporter,
    step_s: Histogram,
    generated_tokens: Counter,
    metrics: SchedulerMetrics,
    /// The publisher of each rank's prefix cache.
    caches: Vec<KvEventPublisher>,
}

impl Board {
    pub(crate) fn new(start: &StartContext, ranks: usize) -> Self {
        Self {
            ranks: Mutex::new(vec![Stats::default(); ranks]),
            produced_tokens: AtomicU64::new(0),
            load: start.load.clone(),
            health: start.health.clone(),
            step_s: start.metrics.histogram(
                "genset_mocker_step_seconds",
                "Time that a step takes by the model of it, in seconds",
                LATENCY_BUCKETS_S,
            ),
            generated_tokens: start
                .metrics
                .create("genset_mocker_generated_tokens", "Tokens generated"),
            metrics: SchedulerMetrics::register(&start.metrics, "mocker"),
            caches: caches(&start.kv_events, ranks),
        }
    }

    /// Records how busy a rank is.
    pub(crate) fn state(&self, rank: usize, now: Stats) {
        let mut ranks = self.ranks.lock();
        let Some(slot) = ranks.get_mut(rank) else {
            return;
        };
        let before = std::mem::replace(slot, now);
        let sum = sum(&ranks);
        self.metrics.state(before, now, sum);
        // Under the lock, so that an older sum does not overtake a newer one.
        self.load.publish(sum.load());
    }

    pub(crate) fn step(&self, took: Duration, generated_tokens: u64) {
        self.health.report_step();
        self.produced_tokens
            .fetch_add(generated_tokens, Ordering::Relaxed);
        self.step_s.observe(took.as_secs_f64());
        self.generated_tokens.inc_by(generated_tokens);
    }

    pub(crate) fn cache_changed(&self, rank: usize, events: Vec<KvEventData>) {
        let Some(cache) = self.caches.get(rank) else {
            return;
        };
        for event in events {
            cache.publish(event);
        }
    }

    /// Counts over all ranks, each as of its last step.
    pub(crate) fn stats(&self) -> Stats {
        sum(&self.ranks.lock())
    }

    pub(crate) fn produced_tokens(&self) -> u64 {
        self.produced_tokens.load(Ordering::Relaxed)
    }
}

/// Splits the publisher by rank; a single rank keeps it whole.
fn caches(publisher: &KvEventPublisher, ranks: usize) -> Vec<KvEventPublisher> {
    match ranks {
        1 => vec![publisher.clone()],
        _ => (0..)
            .take(ranks)
            .map(|rank| publisher.of_rank(rank))
            .collect(),
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
        preemptions: sum.preemptions + rank.preemptions,
        prompt_tokens: sum.prompt_tokens + rank.prompt_tokens,
        cached_tokens: sum.cached_tokens + rank.cached_tokens,
    })
}
