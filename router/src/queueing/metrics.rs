//! Metrics of requests that wait at the router.

use std::time::Duration;

use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::family::Family;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::prometheus::metrics::histogram::Histogram;
use genset_backend_common::{MetricsRegistry, handles::LATENCY_BUCKETS_S};

use super::order::Refusal;

/// The metrics of all models. Clones share.
#[derive(Debug, Clone)]
pub(crate) struct QueueMetrics {
    waiting: Family<[(&'static str, String); 1], Gauge>,
    wait_s: Histogram,
    refusals: Family<[(&'static str, String); 2], Counter>,
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
        }
    }

    pub(super) fn of(&self, model: &str) -> ModelMetrics {
        ModelMetrics {
            waiting: self
                .waiting
                .get_or_create(&[("model", model.to_owned())])
                .clone(),
            all: self.clone(),
            model: model.to_owned(),
        }
    }
}

/// The metrics of one model.
#[derive(Debug)]
pub(super) struct ModelMetrics {
    all: QueueMetrics,
    model: String,
    waiting: Gauge,
}

impl ModelMetrics {
    pub(super) fn waiting(&self, requests: usize) {
        self.waiting
            .set(i64::try_from(requests).unwrap_or(i64::MAX));
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
