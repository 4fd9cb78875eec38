//! How long prompts take to make.

use genset_backend_common::MetricsRegistry;
use prometheus_client::metrics::histogram::Histogram;
use tokio::time::Instant;

/// Bounds of the histograms, in seconds: a short prompt takes microseconds, a book tens of milliseconds.
const BUCKETS_S: [f64; 12] = [
    10e-6, 30e-6, 100e-6, 300e-6, 1e-3, 3e-3, 10e-3, 30e-3, 100e-3, 300e-3, 1.0, 10.0,
];

/// Histograms of the time that templates and tokenizers take. Clones share.
#[derive(Debug, Clone)]
pub struct PromptTimings {
    template: Histogram,
    tokenize: Histogram,
}

impl PromptTimings {
    /// Registers them.
    #[must_use]
    pub fn register(registry: &MetricsRegistry) -> Self {
        let this = Self {
            template: Histogram::new(BUCKETS_S),
            tokenize: Histogram::new(BUCKETS_S),
        };
        registry.register(
            "genset_frontend_template_seconds",
            "From a chat's messages to its prompt",
            this.template.clone(),
        );
        registry.register(
            "genset_frontend_tokenize_seconds",
            "From a prompt to its token ids",
            this.tokenize.clone(),
        );
        this
    }

    /// Times a template.
    pub(super) fn template<T>(&self, render: impl FnOnce() -> T) -> T {
        time(&self.template, render)
    }

    /// Times a tokenizer.
    pub(super) fn tokenize<T>(&self, encode: impl FnOnce() -> T) -> T {
        time(&self.tokenize, encode)
    }
}

fn time<T>(histogram: &Histogram, work: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let done = work();
    histogram.observe(started.elapsed().as_secs_f64());
    done
}
