//! [`Metrics`]: the metrics of the engine thread.

use std::time::Duration;

use genset_backend_common::output::PredictionTokens;
use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::histogram::Histogram;
use genset_backend_common::{MetricsRegistry, handles::LATENCY_BUCKETS_S};
use genset_scheduler::{SchedulerMetrics, Stats};

/// Upper bounds of the number of sequences and tokens per step.
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
    scheduler: SchedulerMetrics,
    counted: Stats,
}

/// The figures of one computed step.
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
        Self {
            step_s: registry.histogram(
                "genset_candle_step_seconds",
                "Time of a step from its plan to its outputs, in seconds",
                LATENCY_BUCKETS_S,
            ),
            forward_s: registry.histogram(
                "genset_candle_forward_seconds",
                "Time a step spends in the model, in seconds",
                LATENCY_BUCKETS_S,
            ),
            sequences: registry.histogram(
                "genset_candle_step_sequences",
                "Sequences in a step",
                SIZE_BUCKETS,
            ),
            tokens: registry.histogram(
                "genset_candle_step_tokens",
                "Tokens that a step computes",
                SIZE_BUCKETS,
            ),
            generated_tokens: registry.create("genset_candle_generated_tokens", "Tokens generated"),
            draft_tokens: registry.create(
                "genset_candle_draft_tokens",
                "Tokens that speculation guessed",
            ),
            accepted_draft_tokens: registry.create(
                "genset_candle_accepted_draft_tokens",
                "Tokens that speculation guessed and the model chose",
            ),
            failed_steps: registry.create(
                "genset_candle_failed_steps",
                "Steps that the model failed to compute",
            ),
            scheduler: SchedulerMetrics::register(registry, "candle"),
            counted: Stats::default(),
        }
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

    /// Sets the gauges, and adds the counts since the last call.
    pub(crate) fn state(&mut self, now: Stats) {
        let before = std::mem::replace(&mut self.counted, now);
        self.scheduler.state(before, now, now);
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts for people")]
fn float(count: usize) -> f64 {
    count as f64
}
