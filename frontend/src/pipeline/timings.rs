//! How long prompts take to prepare, and how many tokens came from the cache.

use genset_backend_common::{MetricsRegistry, TokenId};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;
use tokio::time::Instant;

use crate::text::EncodedPrompt;

/// The buckets of the histograms, in seconds: a short prompt takes microseconds, a book tens of milliseconds.
const BUCKETS_S: [f64; 12] = [
    10e-6, 30e-6, 100e-6, 300e-6, 1e-3, 3e-3, 10e-3, 30e-3, 100e-3, 300e-3, 1.0, 10.0,
];

/// Histograms of the time that templates and tokenizers take, and a counter of cached tokens. Clones share them.
#[derive(Debug, Clone)]
pub struct PromptTimings {
    template: Histogram,
    tokenize: Histogram,
    cached_tokens: Counter,
}

impl PromptTimings {
    /// Registers the metrics.
    #[must_use]
    pub fn register(registry: &MetricsRegistry) -> Self {
        Self {
            template: registry.histogram(
                "genset_frontend_template_seconds",
                "From a chat's messages to its prompt",
                BUCKETS_S,
            ),
            tokenize: registry.histogram(
                "genset_frontend_tokenize_seconds",
                "From a prompt to its token ids",
                BUCKETS_S,
            ),
            cached_tokens: registry.create(
                "genset_frontend_tokenizer_cached_tokens",
                "Prompt tokens that were known from other prompts",
            ),
        }
    }

    /// Times a template.
    pub(super) fn template<T>(&self, render: impl FnOnce() -> T) -> T {
        time(&self.template, render)
    }

    /// Times a template with little fuel. Records nothing if it fails, because it is then rendered again.
    pub(super) fn quick_template<T, E>(
        &self,
        render: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let started = Instant::now();
        let rendered = render()?;
        self.template.observe(started.elapsed().as_secs_f64());
        Ok(rendered)
    }

    /// Times a tokenizer, and counts the cached tokens.
    pub(super) fn tokenize<E>(
        &self,
        encode: impl FnOnce() -> Result<EncodedPrompt, E>,
    ) -> Result<Vec<TokenId>, E> {
        let prompt = time(&self.tokenize, encode)?;
        let cached = u64::try_from(prompt.cached_tokens).unwrap_or(u64::MAX);
        self.cached_tokens.inc_by(cached);
        Ok(prompt.ids)
    }
}

fn time<T>(histogram: &Histogram, work: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let done = work();
    histogram.observe(started.elapsed().as_secs_f64());
    done
}
