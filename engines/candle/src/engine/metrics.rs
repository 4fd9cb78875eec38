//! [`Metrics`]: what the engine thread counts and measures.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use genset_backend_common::output::PredictionTokens;
use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::prometheus::metrics::histogram::Histogram;
use genset_backend_common::{
    MetricsRegistry,
    handles::{LATENCY_BUCKETS_S, Load},
};
use genset_scheduler::Stats;

/// Upper bounds of sequences and tokens a step.
const SIZE_BUCKETS: [f64; 13] = [
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 8192.0,
];

/// The engine's metrics, registered.
#[derive(Debug)]
pub(crate) struct Metrics {
    step_s: Histogram,
    forward_s: Histogram,
    sequences: Histogram,
    tokens: Histogram,
    generated_tokens: Counter,
    draft_tokens: Counter,
    accepted_draft_tokens: Counter,
    failed_steps: Counter,
    preemptions: Counter,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    running: Gauge,
    waiting: Gauge,
    kv_used: Gauge<f64, AtomicU64>,
    counted: Stats,
}

/// One step that was computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepFigures {
    pub(crate) step: Duration,
    pub(crate) forward: Duration,
    pub(crate) sequences: usize,
    pub(crate) tokens: usize,
    pub(crate) generated_tokens: usize,
}

impl Metrics {
    pub(crate) fn register(registry: &MetricsRegistry) -> Self {
        let metrics = Self {
            step_s: Histogram::new(LATENCY_BUCKETS_S),
            forward_s: Histogram::new(LATENCY_BUCKETS_S),
            sequences: Histogram::new(SIZE_BUCKETS),
            tokens: Histogram::new(SIZE_BUCKETS),
            generated_tokens: Counter::default(),
            draft_tokens: Counter::default(),
            accepted_draft_tokens: Counter::default(),
            failed_steps: Counter::default(),
            preemptions: Counter::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            kv_used: Gauge::default(),
            counted: Stats::default(),
        };
        metrics.register_times(registry);
        metrics.register_counts(registry);
        metrics
    }

    fn register_times(&self, registry: &MetricsRegistry) {
        let step = "Time of a step from its plan to its outputs, in seconds";
        registry.register("genset_candle_step_seconds", step, self.step_s.clone());
        let forward = "Time a step spends in the model, in seconds";
        registry.register(
            "genset_candle_forward_seconds",
            forward,
            self.forward_s.clone(),
        );
        registry.register(
            "genset_candle_step_sequences",
            "Sequences in a step",
            self.sequences.clone(),
        );
        registry.register(
            "genset_candle_step_tokens",
            "Tokens that a step computes",
            self.tokens.clone(),
        );
    }

    fn register_counts(&self, registry: &MetricsRegistry) {
        registry.register(
            "genset_candle_generated_tokens",
            "Tokens generated",
            self.generated_tokens.clone(),
        );
        registry.register(
            "genset_candle_draft_tokens",
            "Tokens that speculation guessed",
            self.draft_tokens.clone(),
        );
        registry.register(
            "genset_candle_accepted_draft_tokens",
            "Tokens that speculation guessed and the model chose",
            self.accepted_draft_tokens.clone(),
        );
        registry.register(
            "genset_candle_failed_steps",
            "Steps that the model failed to compute",
            self.failed_steps.clone(),
        );
        let preemptions = "Sequences that lost their KV blocks and were computed again";
        registry.register(
            "genset_candle_preemptions",
            preemptions,
            self.preemptions.clone(),
        );
        let prompt = "Prompt tokens of sequences that began";
        registry.register(
            "genset_candle_prompt_tokens",
            prompt,
            self.prompt_tokens.clone(),
        );
        let cached = "Prompt tokens that were found in the prefix cache";
        registry.register(
            "genset_candle_prefix_hit_tokens",
            cached,
            self.cached_tokens.clone(),
        );
        registry.register(
            "genset_candle_running_sequences",
            "Sequences that run",
            self.running.clone(),
        );
        registry.register(
            "genset_candle_waiting_sequences",
            "Sequences that wait",
            self.waiting.clone(),
        );
        let kv_used = "Share of KV blocks that sequences hold, from 0 to 1";
        registry.register("genset_candle_kv_usage", kv_used, self.kv_used.clone());
    }

    pub(crate) fn step(&self, figures: StepFigures) {
        self.step_s.observe(figures.step.as_secs_f64());
        self.forward_s.observe(figures.forward.as_secs_f64());
        self.sequences.observe(float(figures.sequences));
        self.tokens.observe(float(figures.tokens));
        self.generated_tokens
            .inc_by(u64::try_from(figures.generated_tokens).unwrap_or(0));
    }

    pub(crate) fn predictions(&self, predictions: PredictionTokens) {
        let PredictionTokens { accepted, rejected } = predictions;
        self.draft_tokens
            .inc_by(u64::from(accepted) + u64::from(rejected));
        self.accepted_draft_tokens.inc_by(accepted.into());
    }

    pub(crate) fn failed_step(&self) {
        self.failed_steps.inc();
    }

    /// Sets the gauges, and counts what came since the last call.
    pub(crate) fn state(&mut self, now: Stats) {
        let before = std::mem::replace(&mut self.counted, now);
        self.preemptions
            .inc_by(now.preemptions - before.preemptions);
        self.prompt_tokens
            .inc_by(now.prompt_tokens - before.prompt_tokens);
        self.cached_tokens
            .inc_by(now.cached_tokens - before.cached_tokens);
        self.running
            .set(i64::try_from(now.running).unwrap_or(i64::MAX));
        self.waiting
            .set(i64::try_from(now.waiting).unwrap_or(i64::MAX));
        self.kv_used
            .set(float(now.used_blocks) / float(now.total_blocks.max(1)));
    }
}

/// The load to publish.
pub(crate) fn load(stats: Stats) -> Load {
    Load {
        running_requests: u32::try_from(stats.running).unwrap_or(u32::MAX),
        waiting_requests: u32::try_from(stats.waiting).unwrap_or(u32::MAX),
        kv_used_blocks: u64::try_from(stats.used_blocks).unwrap_or(u64::MAX),
        kv_total_blocks: u64::try_from(stats.total_blocks).unwrap_or(u64::MAX),
        ..Load::default()
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts for people")]
fn float(count: usize) -> f64 {
    count as f64
}
