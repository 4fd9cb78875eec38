//! The pace of an answer, measured when its tokens arrive, not when bytes are sent.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use genset_backend_common::{MetricsRegistry, handles::LATENCY_BUCKETS_S};
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::time::Instant;

/// Histograms of the pace of all answers. Clones share them.
#[derive(Debug, Clone)]
pub struct StepMetrics {
    queued: Gauge,
    time_to_first_token: Histogram,
    inter_token_latency: Gaps,
}

impl StepMetrics {
    /// Registers the histograms; their names begin with `genset_http_`.
    #[must_use]
    pub fn register(registry: &MetricsRegistry) -> Self {
        Self {
            queued: registry.create(
                "genset_http_answers_queued",
                "Answers that wait for their first token",
            ),
            time_to_first_token: registry.histogram(
                "genset_http_time_to_first_token_seconds",
                "From the request's last byte to an answer's first token",
                LATENCY_BUCKETS_S,
            ),
            inter_token_latency: registry.create(
                "genset_http_inter_token_latency_seconds",
                "From one step that brought tokens to the next",
            ),
        }
    }
}

/// The histogram of gaps between steps. All threads update it per token, so it is lock-free.
#[derive(Debug, Clone, Default)]
struct Gaps(Arc<GapCounts>);

#[derive(Debug, Default)]
struct GapCounts {
    /// How many gaps are at most as long as each bound.
    within: [AtomicU64; LATENCY_BUCKETS_S.len()],
    /// How many are longer than all bounds.
    beyond: AtomicU64,
    sum_ns: AtomicU64,
}

impl Gaps {
    /// Adds `count` gaps of the same length.
    fn add(&self, gap: Duration, count: u32) {
        let seconds = gap.as_secs_f64();
        let bounds = LATENCY_BUCKETS_S.iter().zip(&self.0.within);
        let bucket = bounds.into_iter().find(|(bound, _)| seconds <= **bound);
        let bucket = bucket.map_or(&self.0.beyond, |(_, count)| count);
        bucket.fetch_add(count.into(), Ordering::Relaxed);
        if !gap.is_zero() {
            let ns = u64::try_from(gap.as_nanos()).unwrap_or(u64::MAX);
            let sum = ns.saturating_mul(count.into());
            self.0.sum_ns.fetch_add(sum, Ordering::Relaxed);
        }
    }
}

impl EncodeMetric for Gaps {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let within = LATENCY_BUCKETS_S.iter().zip(&self.0.within);
        let buckets: Vec<(f64, u64)> = within
            .chain([(&f64::INFINITY, &self.0.beyond)])
            .map(|(bound, count)| (*bound, count.load(Ordering::Relaxed)))
            .collect();
        let sum = Duration::from_nanos(self.0.sum_ns.load(Ordering::Relaxed));
        let count = buckets.iter().map(|(_, count)| count).sum();
        encoder.encode_histogram::<NoLabelSet>(sum.as_secs_f64(), count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// One answer's pace. Steps that are read in one turn arrived together, so the clock is read once per turn.
#[derive(Debug)]
pub(super) struct StepClock {
    metrics: StepMetrics,
    progress: Progress,
    /// Whether this turn has brought a step.
    has_step: bool,
    /// Further steps in this turn.
    at_once: u32,
}

#[derive(Debug, Clone, Copy)]
enum Progress {
    /// No token has come since the request arrived at this time.
    Queued(Instant),
    /// The latest turn with tokens was at this time.
    Running(Instant),
}

impl StepClock {
    /// The pace of an answer to a request that arrived at `arrived`.
    pub(super) fn new(metrics: StepMetrics, arrived: Instant) -> Self {
        metrics.queued.inc();
        Self {
            metrics,
            progress: Progress::Queued(arrived),
            has_step: false,
            at_once: 0,
        }
    }

    /// Notes a step with tokens.
    pub(super) fn step(&mut self) {
        if std::mem::replace(&mut self.has_step, true) {
            self.at_once += 1;
            return;
        }
        let now = Instant::now();
        match std::mem::replace(&mut self.progress, Progress::Running(now)) {
            Progress::Queued(arrived) => {
                self.metrics.queued.dec();
                let waited = now.saturating_duration_since(arrived);
                self.metrics
                    .time_to_first_token
                    .observe(waited.as_secs_f64());
            }
            Progress::Running(last) => {
                let gap = now.saturating_duration_since(last);
                self.metrics.inter_token_latency.add(gap, 1);
            }
        }
    }

    /// Ends the turn: no more steps are ready.
    pub(super) fn end_turn(&mut self) {
        self.has_step = false;
        let at_once = std::mem::take(&mut self.at_once);
        if at_once > 0 {
            self.metrics
                .inter_token_latency
                .add(Duration::ZERO, at_once);
        }
    }
}

impl Drop for StepClock {
    fn drop(&mut self) {
        self.end_turn();
        if let Progress::Queued(_) = self.progress {
            self.metrics.queued.dec();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn steps_of_one_turn_are_counted_with_one_look_at_the_clock() {
        let registry = MetricsRegistry::default();
        let metrics = StepMetrics::register(&registry);
        let mut clock = StepClock::new(metrics, Instant::now());
        clock.step();
        clock.step();
        clock.end_turn();
        tokio::time::advance(Duration::from_millis(3)).await;
        clock.step();
        clock.step();
        clock.end_turn();
        tokio::time::advance(Duration::from_secs(1000)).await;
        clock.step();
        drop(clock);
        let text = registry.encode();
        for line in [
            "bucket{le=\"0.001\"} 2",
            "bucket{le=\"0.002\"} 2",
            "bucket{le=\"0.004\"} 3",
            "bucket{le=\"600.0\"} 3",
            "bucket{le=\"+Inf\"} 4",
            "count 4",
            "sum 1000.003",
        ] {
            let line = format!("genset_http_inter_token_latency_seconds_{line}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
        assert!(text.contains("genset_http_answers_queued 0\n"));
    }
}
