//! [`SchedulerMetrics`]: the metrics that an engine exports of its schedulers.

use std::sync::atomic::AtomicU64;

use genset_backend_common::MetricsRegistry;
use genset_backend_common::handles::Load;
use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::gauge::Gauge;

use crate::scheduler::Stats;

/// The metrics of an engine's schedulers, registered.
#[derive(Debug)]
pub struct SchedulerMetrics {
    preemptions: Counter,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    running: Gauge,
    waiting: Gauge,
    kv_used: Gauge<f64, AtomicU64>,
}

impl SchedulerMetrics {
    /// Registers the metrics under names that contain `engine`.
    #[must_use]
    pub fn register(registry: &MetricsRegistry, engine: &str) -> Self {
        let name = |metric: &str| format!("genset_{engine}_{metric}");
        Self {
            preemptions: registry.create(
                &name("preemptions"),
                "Sequences that lost their KV blocks and were computed again",
            ),
            prompt_tokens: registry.create(
                &name("prompt_tokens"),
                "Prompt tokens of sequences that began",
            ),
            cached_tokens: registry.create(
                &name("prefix_hit_tokens"),
                "Prompt tokens that were found in the prefix cache",
            ),
            running: registry.create(&name("running_sequences"), "Sequences that run"),
            waiting: registry.create(&name("waiting_sequences"), "Sequences that wait"),
            kv_used: registry.create(
                &name("kv_usage"),
                "Share of KV blocks that sequences hold, from 0 to 1",
            ),
        }
    }

    /// Adds the difference of one scheduler's counts, `before` to `now`, and sets the gauges to the `sum` over the engine.
    pub fn state(&self, before: Stats, now: Stats, sum: Stats) {
        self.preemptions
            .inc_by(now.preemptions - before.preemptions);
        self.prompt_tokens
            .inc_by(now.prompt_tokens - before.prompt_tokens);
        self.cached_tokens
            .inc_by(now.cached_tokens - before.cached_tokens);
        self.running
            .set(i64::try_from(sum.running).unwrap_or(i64::MAX));
        self.waiting
            .set(i64::try_from(sum.waiting).unwrap_or(i64::MAX));
        self.kv_used
            .set(float(sum.used_blocks) / float(sum.total_blocks.max(1)));
    }
}

impl Stats {
    /// The load to publish.
    #[must_use]
    pub fn load(self) -> Load {
        Load {
            running_requests: u32::try_from(self.running).unwrap_or(u32::MAX),
            waiting_requests: u32::try_from(self.waiting).unwrap_or(u32::MAX),
            kv_used_blocks: u64::try_from(self.used_blocks).unwrap_or(u64::MAX),
            kv_total_blocks: u64::try_from(self.total_blocks).unwrap_or(u64::MAX),
            ..Load::default()
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts for people")]
fn float(count: usize) -> f64 {
    count as f64
}
