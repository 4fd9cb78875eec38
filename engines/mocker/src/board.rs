//! [`Board`]: what the ranks of an instance publish together: load, metrics, KV events.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use genset_backend_common::kv::{KvEventData, KvEventPublisher};
use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::prometheus::metrics::histogram::Histogram;
use genset_backend_common::{
    HealthReporter, MetricsRegistry, StartContext,
    handles::{LATENCY_BUCKETS_S, Load, LoadPublisher},
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
    /// Where each rank tells of its prefix cache.
    caches: Vec<KvEventPublisher>,
}

impl Board {
    pub(crate) fn new(start: &StartContext, ranks: usize) -> Self {
        Self {
            ranks: Mutex::new(vec![Stats::default(); ranks]),
            produced_tokens: AtomicU64::new(0),
            load: start.load.clone(),
            health: start.health.clone(),
            metrics: Metrics::register(&start.metrics),
            caches: caches(&start.kv_events, ranks),
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
        let Some(cache) = self.caches.get(rank) else {
            return;
        };
        for event in events {
            cache.publish(event);
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

/// One rank is the whole.
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
