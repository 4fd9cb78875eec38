//! Metrics of migrations.

use std::time::Duration;

use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::family::Family;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::prometheus::metrics::histogram::Histogram;
use genset_backend_common::{ErrorKind, MetricsRegistry, handles::LATENCY_BUCKETS_S};

use super::resume::Stuck;

type ByReason = Family<[(&'static str, String); 2], Counter>;

/// The metrics of all models. Clones share.
#[derive(Debug, Clone)]
pub(super) struct MigrationMetrics {
    moves: ByReason,
    failures: ByReason,
    pause: Histogram,
    kept_bytes: Gauge,
}

impl MigrationMetrics {
    pub(super) fn register(registry: &MetricsRegistry) -> Self {
        Self {
            moves: registry.create("genset_migrations", "Requests that moved to another instance after one had taken them, by the kind of error there"),
            failures: registry.create("genset_migration_failures", "Requests that were lost with their instance, by the reason that kept them"),
            pause: registry.histogram("genset_migration_pause_seconds", "From the loss of an instance until another one took the request", LATENCY_BUCKETS_S),
            kept_bytes: registry.create("genset_migration_kept_bytes", "Memory of prompts and tokens kept so that requests can move"),
        }
    }

    pub(super) fn kept_bytes(&self) -> Gauge {
        self.kept_bytes.clone()
    }
}

/// The metrics of one model.
#[derive(Debug)]
pub(super) struct ModelMetrics {
    all: MigrationMetrics,
    model: String,
}

impl ModelMetrics {
    pub(super) fn new(all: MigrationMetrics, model: &str) -> Self {
        Self {
            all,
            model: model.to_owned(),
        }
    }

    /// Counts a migration, and how long its client waited for it.
    pub(super) fn moved(&self, reason: ErrorKind, pause: Duration) {
        let labels = self.labels(reason.name());
        self.all.moves.get_or_create(&labels).inc();
        self.all.pause.observe(pause.as_secs_f64());
    }

    /// Counts a request that was lost.
    pub(super) fn failed(&self, why: Stuck) {
        let labels = self.labels(why.name());
        self.all.failures.get_or_create(&labels).inc();
    }

    fn labels(&self, reason: &str) -> [(&'static str, String); 2] {
        [("model", self.model.clone()), ("reason", reason.to_owned())]
    }
}
