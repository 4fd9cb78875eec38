//! The metrics of KV-aware selection.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use genset_backend_common::MetricsRegistry;
use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::family::Family;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::prometheus::metrics::histogram::Histogram;
use parking_lot::Mutex;

use crate::config::RouterMode;

type Label = [(&'static str, String); 1];
type Labels = [(&'static str, String); 2];

/// Histogram buckets for the time of a decision, in seconds.
const DECISION_BUCKETS_S: [f64; 10] = [2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2];

/// The router's metrics, for all models. Clones share state.
#[derive(Debug, Clone)]
pub struct RouterMetrics {
    decision_s: Histogram,
    choices: Family<Labels, Counter>,
    predicted_tokens: Family<Label, Counter>,
    actual_tokens: Family<Label, Counter>,
    index_blocks: Family<Label, Gauge>,
    lag_events: Family<Label, Gauge>,
    lag_s: Family<Label, Gauge<f64, AtomicU64>>,
    snapshots: Family<Label, Counter>,
    odd_events: Family<Labels, Counter>,
    /// How many holders show each model's gauges: a model that reconnects may overlap with its old connection.
    shown: Arc<Mutex<HashMap<String, usize>>>,
}

impl RouterMetrics {
    /// Registers the metrics that `mode` uses, once per registry.
    #[must_use]
    pub fn register(registry: &MetricsRegistry, mode: RouterMode) -> Self {
        // Other modes do not choose by KV blocks: hide these metrics.
        let hidden = MetricsRegistry::default();
        let registry = match mode {
            RouterMode::Kv => registry,
            RouterMode::Plain(_) => &hidden,
        };
        Self {
            decision_s: registry.histogram("genset_router_decision_seconds", "Time to choose an instance, hashing of the prompt included", DECISION_BUCKETS_S),
            choices: registry.create("genset_router_choices", "Choices of an instance, by what decided: overlap, load, affinity or fallback"),
            predicted_tokens: registry.create("genset_router_predicted_cached_tokens", "Prompt tokens that were expected to be cached at the chosen instances, for requests that ended well"),
            actual_tokens: registry.create("genset_router_actual_cached_tokens", "Prompt tokens that were cached at the chosen instances, as their workers report"),
            index_blocks: registry.create("genset_router_index_blocks", "KV blocks in the index, counted for each instance that holds them"),
            lag_events: registry.create("genset_router_lag_events", "KV events that workers have published and the index has not applied yet"),
            lag_s: registry.create("genset_router_lag_seconds", "How long the most delayed worker has been late"),
            snapshots: registry.create("genset_router_snapshots", "Snapshots of workers' prefix caches that the index has applied"),
            odd_events: registry.create("genset_router_odd_events", "KV events that were lost or made no sense, by reason"),
            shown: Arc::default(),
        }
    }

    pub(super) fn of(&self, model: &str) -> ModelMetrics {
        *self.shown.lock().entry(model.to_owned()).or_default() += 1;
        ModelMetrics {
            shown: Arc::new(Shown {
                all: self.clone(),
                model: model.to_owned(),
            }),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// The chosen worker has part of the prompt cached.
    Overlap,
    /// No worker has part of it cached, or those are too busy.
    Load,
    /// The worker last served the request's affinity key, and costs little more than another.
    Affinity,
    /// There was nothing to look up: the prompt is not token ids here, or the workers have no KV blocks.
    Fallback,
}

impl Reason {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Overlap => "overlap",
            Self::Load => "load",
            Self::Affinity => "affinity",
            Self::Fallback => "fallback",
        }
    }
}

/// The metrics of one model. Clones share state; its gauges disappear with the last clone.
#[derive(Debug, Clone)]
pub(super) struct ModelMetrics {
    shown: Arc<Shown>,
}

/// Shows a model's gauges while it lives.
#[derive(Debug)]
struct Shown {
    all: RouterMetrics,
    model: String,
}

impl Drop for Shown {
    fn drop(&mut self) {
        let mut shown = self.all.shown.lock();
        let Some(count) = shown.get_mut(&self.model) else {
            return;
        };
        *count -= 1;
        if *count > 0 {
            return;
        }
        shown.remove(&self.model);
        let label = [("model", self.model.clone())];
        self.all.index_blocks.remove(&label);
        self.all.lag_events.remove(&label);
        self.all.lag_s.remove(&label);
    }
}

impl ModelMetrics {
    fn all(&self) -> &RouterMetrics {
        &self.shown.all
    }

    fn label(&self) -> Label {
        [("model", self.shown.model.clone())]
    }

    /// Returns the pool's name.
    pub(super) fn pool(&self) -> &str {
        &self.shown.model
    }

    pub(super) fn decided_in(&self, seconds: f64) {
        self.all().decision_s.observe(seconds);
    }

    pub(super) fn chosen(&self, reason: Reason) {
        let reason = reason.name().to_owned();
        let labels = [("model", self.shown.model.clone()), ("reason", reason)];
        self.all().choices.get_or_create(&labels).inc();
    }

    pub(super) fn ended(&self, predicted: u64, actual: u64) {
        let label = self.label();
        self.all()
            .predicted_tokens
            .get_or_create(&label)
            .inc_by(predicted);
        self.all()
            .actual_tokens
            .get_or_create(&label)
            .inc_by(actual);
    }

    pub(super) fn index_holds(&self, blocks: u64) {
        let blocks = i64::try_from(blocks).unwrap_or(i64::MAX);
        self.all()
            .index_blocks
            .get_or_create(&self.label())
            .set(blocks);
    }

    pub(super) fn lag(&self, events: u64, age: Duration) {
        let label = self.label();
        let events = i64::try_from(events).unwrap_or(i64::MAX);
        self.all().lag_events.get_or_create(&label).set(events);
        self.all()
            .lag_s
            .get_or_create(&label)
            .set(age.as_secs_f64());
    }

    pub(super) fn snapshot(&self) {
        self.all().snapshots.get_or_create(&self.label()).inc();
    }

    pub(super) fn odd(&self, reason: &str) {
        let labels = [
            ("model", self.shown.model.clone()),
            ("reason", reason.to_owned()),
        ];
        self.all().odd_events.get_or_create(&labels).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gauges_of_a_model_go_with_the_last_that_shows_them() {
        let registry = MetricsRegistry::default();
        let metrics = RouterMetrics::register(&registry, RouterMode::Kv);
        let shows = |gauge: &str| {
            let sample = format!("genset_router_{gauge}{{model=\"m\"}}");
            registry.encode().contains(&sample)
        };
        let all = ["index_blocks", "lag_events", "lag_seconds"];
        let before = metrics.of("m");
        before.index_holds(3);
        before.lag(1, Duration::ZERO);
        before.snapshot();
        // The model reconnects.
        let now = metrics.of("m");
        let clone = now.clone();
        drop(before);
        drop(now);
        assert!(all.iter().all(|gauge| shows(gauge)));
        drop(clone);
        assert!(!all.iter().any(|gauge| shows(gauge)));
        // Counters stay.
        assert!(shows("snapshots_total"));
    }
}
