//! The pace of an answer, measured where its tokens arrive and not where bytes leave.

use genset_backend_common::{MetricsRegistry, handles::LATENCY_BUCKETS_S};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::time::Instant;

/// Histograms of every answer's pace. Clones share.
#[derive(Debug, Clone)]
pub struct StepMetrics {
    queued: Gauge,
    time_to_first_token: Histogram,
    inter_token_latency: Histogram,
}

impl StepMetrics {
    /// Registers them, with names that begin with `genset_http_`.
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
            inter_token_latency: registry.histogram(
                "genset_http_inter_token_latency_seconds",
                "From one step that brought tokens to the next",
                LATENCY_BUCKETS_S,
            ),
        }
    }
}

/// One answer's pace.
#[derive(Debug)]
pub(super) struct StepClock {
    metrics: StepMetrics,
    progress: Progress,
}

#[derive(Debug, Clone, Copy)]
enum Progress {
    /// No token yet, since the request arrived.
    Queued(Instant),
    /// The latest token came then.
    Running(Instant),
}

impl StepClock {
    /// Of an answer to a request that arrived then.
    pub(super) fn new(metrics: StepMetrics, arrived: Instant) -> Self {
        metrics.queued.inc();
        Self {
            metrics,
            progress: Progress::Queued(arrived),
        }
    }

    /// A step brought tokens.
    pub(super) fn step(&mut self) {
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
                self.metrics.inter_token_latency.observe(gap.as_secs_f64());
            }
        }
    }
}

impl Drop for StepClock {
    fn drop(&mut self) {
        if let Progress::Queued(_) = self.progress {
            self.metrics.queued.dec();
        }
    }
}
