//! [`ModelAdmission`] limits how many requests of one model run, and how many more wait; the rest are refused.
//!
//! A worker has such a gate of its own, unaware of other workers: the more workers, the more requests they hold. This gate
//! bounds what one model takes of this server, so that an overloaded model leaves room for the others.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind, MetricsRegistry};
use parking_lot::Mutex;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::work::{Place, acquire};

/// The limits on requests of one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ModelLimits {
    /// Running at once.
    pub(super) running: NonZeroUsize,
    /// Waiting for one of those to end.
    pub(super) waiting: usize,
}

/// Requests by model.
type ByModel = Family<[(&'static str, String); 1], Gauge>;

/// The gates of all models, kept as long as their models are served.
#[derive(Debug)]
pub(super) struct Admissions {
    by_model: Mutex<BTreeMap<String, Arc<ModelAdmission>>>,
    limits: ModelLimits,
    running: ByModel,
    waiting: ByModel,
}

impl Admissions {
    /// Registers the metrics of gates. There are no gates yet.
    pub(super) fn register(registry: &MetricsRegistry, limits: ModelLimits) -> Self {
        Self {
            by_model: Mutex::default(),
            limits,
            running: registry.create(
                "genset_frontend_model_running_requests",
                "Requests of a model that this server answers",
            ),
            waiting: registry.create(
                "genset_frontend_model_waiting_requests",
                "Requests of a model that wait for one of those to end",
            ),
        }
    }

    /// The gate of a model; it stays the same while the model is served, even if its card changes.
    pub(super) fn of(&self, model: &str) -> Arc<ModelAdmission> {
        let mut by_model = self.by_model.lock();
        let gate = by_model.entry(model.to_owned()).or_insert_with(|| {
            let label = [("model", model.to_owned())];
            let places = |count: usize| Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS)));
            Arc::new(ModelAdmission {
                running: places(self.limits.running.get()),
                waiting: places(self.limits.waiting),
                limits: self.limits,
                running_gauge: self.running.get_or_create(&label).clone(),
                waiting_gauge: self.waiting.get_or_create(&label).clone(),
            })
        });
        Arc::clone(gate)
    }

    /// Removes the gates of models that are gone, and their metrics.
    pub(super) fn retain(&self, is_there: impl Fn(&str) -> bool) {
        self.by_model.lock().retain(|model, _| {
            let is_there = is_there(model);
            if !is_there {
                let label = [("model", model.clone())];
                self.running.remove(&label);
                self.waiting.remove(&label);
            }
            is_there
        });
    }
}

/// The gate of one model. Waiting requests are admitted in FIFO order.
#[derive(Debug)]
pub(crate) struct ModelAdmission {
    running: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    limits: ModelLimits,
    running_gauge: Gauge,
    waiting_gauge: Gauge,
}

impl ModelAdmission {
    /// Waits for a slot.
    ///
    /// # Errors
    /// `Overloaded` if too many requests wait already; `DeadlineExceeded` if the deadline passes.
    ///
    /// # Cancel safety
    /// If the future is dropped, the request no longer waits.
    pub(crate) async fn admit(&self, deadline: Option<Instant>) -> Result<Place, EngineError> {
        let permit = match Arc::clone(&self.running).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                let _waiting = self.queue()?;
                acquire(&self.running, deadline).await?
            }
        };
        Ok(Place::new(permit, self.running_gauge.clone()))
    }

    fn queue(&self) -> Result<Place, EngineError> {
        let permit = Arc::clone(&self.waiting).try_acquire_owned();
        let permit = permit.map_err(|_full| {
            let message = format!(
                "{} requests of this model are being answered and {} wait, which is this server's limit; try again later",
                self.limits.running, self.limits.waiting
            );
            EngineError::new(ErrorKind::Overloaded, message)
                .with_retry_after(Duration::from_secs(1))
        })?;
        Ok(Place::new(permit, self.waiting_gauge.clone()))
    }
}
