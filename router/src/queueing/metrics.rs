//! Metrics of requests that wait at the router.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::family::Family;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::prometheus::metrics::histogram::Histogram;
use genset_backend_common::{MetricsRegistry, handles::LATENCY_BUCKETS_S};
use parking_lot::Mutex;

use super::order::Refusal;

/// The metrics of all models. Clones share.
#[derive(Debug, Clone)]
pub(crate) struct QueueMetrics {
    waiting: Family<[(&'static str, String); 1], Gauge>,
    wait_s: Histogram,
    refusals: Family<[(&'static str, String); 2], Counter>,
    /// How many queues share each model's gauge: a model that reconnects may overlap with its old connection.
    queues: Arc<Mutex<HashMap<String, usize>>>,
}

impl QueueMetrics {
    /// Registers them if requests may wait, once per registry.
    pub(crate) fn register(registry: &MetricsRegistry, may_wait: bool) -> Self {
        // Requests cannot wait: hide these metrics.
        let hidden = MetricsRegistry::default();
        let registry = if may_wait { registry } else { &hidden };
        Self {
            waiting: registry.create("genset_router_waiting_requests", "Requests that wait at the router because every instance is full"),
            wait_s: registry.histogram("genset_router_wait_seconds", "How long requests waited at the router until an instance took them", LATENCY_BUCKETS_S),
            refusals: registry.create("genset_router_queue_refusals", "Requests that were refused at the router, because too many waited or their deadline would have passed"),
            queues: Arc::default(),
        }
    }

    pub(super) fn of(&self, model: &str) -> ModelMetrics {
        let mut queues = self.queues.lock();
        *queues.entry(model.to_owned()).or_default() += 1;
        let label = [("model", model.to_owned())];
        let waiting = self.waiting.get_or_create(&label).clone();
        ModelMetrics {
            waiting,
            counted: AtomicI64::new(0),
            all: self.clone(),
            model: model.to_owned(),
        }
    }
}

/// The metrics of one model's queue. The model's gauge disappears with its last queue.
#[derive(Debug)]
pub(super) struct ModelMetrics {
    all: QueueMetrics,
    model: String,
    waiting: Gauge,
    /// This queue's part of the gauge.
    counted: AtomicI64,
}

impl Drop for ModelMetrics {
    fn drop(&mut self) {
        self.waiting(0);
        let mut queues = self.all.queues.lock();
        let Some(count) = queues.get_mut(&self.model) else {
            return;
        };
        *count -= 1;
        if *count == 0 {
            queues.remove(&self.model);
            self.all.waiting.remove(&[("model", self.model.clone())]);
        }
    }
}

impl ModelMetrics {
    pub(super) fn waiting(&self, requests: usize) {
        let requests = i64::try_from(requests).unwrap_or(i64::MAX);
        let before = self.counted.swap(requests, Ordering::Relaxed);
        self.waiting.inc_by(requests - before);
    }

    pub(super) fn served(&self, wait: Duration) {
        self.all.wait_s.observe(wait.as_secs_f64());
    }

    pub(super) fn refused(&self, refusal: Refusal) {
        let reason = match refusal {
            Refusal::Full => "full",
            Refusal::Deadline => "deadline",
        };
        let labels = [("model", self.model.clone()), ("reason", reason.to_owned())];
        self.all.refusals.get_or_create(&labels).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_gauge_adds_its_queues_and_goes_with_the_last() {
        let registry = MetricsRegistry::default();
        let metrics = QueueMetrics::register(&registry, true);
        let shows = |requests: usize| {
            let sample = format!("genset_router_waiting_requests{{model=\"m\"}} {requests}\n");
            registry.encode().contains(&sample)
        };
        let before = metrics.of("m");
        before.waiting(2);
        // The model reconnects, and requests still wait at the old queue.
        let now = metrics.of("m");
        now.waiting(3);
        assert!(shows(5), "{}", registry.encode());
        before.waiting(1);
        assert!(shows(4), "{}", registry.encode());
        drop(before);
        assert!(shows(3), "{}", registry.encode());
        drop(now);
        assert!(!registry.encode().contains("model=\"m\""));
    }
}
