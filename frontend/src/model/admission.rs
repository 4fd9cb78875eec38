//! [`ModelAdmission`] limits how many requests of one model run, and how many more wait; the rest are refused.
//!
//! A worker has such a gate of its own, unaware of other workers: the more workers, the more requests they hold. This gate
//! bounds what one model takes of this server, so that an overloaded model leaves room for the others.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use genset_backend_common::{CancelReason, EngineError, ErrorKind, MetricsRegistry};
use parking_lot::Mutex;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

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
            Arc::new(ModelAdmission {
                permits: Arc::new(Semaphore::new(
                    self.limits.running.get().min(Semaphore::MAX_PERMITS),
                )),
                waiting: AtomicUsize::new(0),
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
    permits: Arc<Semaphore>,
    waiting: AtomicUsize,
    limits: ModelLimits,
    running_gauge: Gauge,
    waiting_gauge: Gauge,
}

/// A running request's slot; dropping it admits the next.
#[derive(Debug)]
pub(crate) struct Place {
    _permit: OwnedSemaphorePermit,
    gauge: Gauge,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}

struct Waiting<'a>(&'a ModelAdmission);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
        self.0.waiting_gauge.dec();
    }
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
        if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
            return Ok(self.place(permit));
        }
        let waiting = self.queue()?;
        let acquired = Arc::clone(&self.permits).acquire_owned();
        let permit = match deadline {
            None => acquired.await,
            Some(deadline) => tokio::time::timeout_at(deadline, acquired)
                .await
                .map_err(|_elapsed| CancelReason::Deadline.to_error())?,
        };
        drop(waiting);
        // Nobody closes the gate.
        permit
            .map(|permit| self.place(permit))
            .map_err(|_closed| CancelReason::Shutdown.to_error())
    }

    fn place(&self, permit: OwnedSemaphorePermit) -> Place {
        self.running_gauge.inc();
        Place {
            _permit: permit,
            gauge: self.running_gauge.clone(),
        }
    }

    fn queue(&self) -> Result<Waiting<'_>, EngineError> {
        if self.waiting.fetch_add(1, Ordering::AcqRel) >= self.limits.waiting {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            let message = format!(
                "{} requests of this model are being answered and {} wait, which is this server's limit; try again later",
                self.limits.running, self.limits.waiting
            );
            return Err(EngineError::new(ErrorKind::Overloaded, message)
                .with_retry_after(Duration::from_secs(1)));
        }
        self.waiting_gauge.inc();
        Ok(Waiting(self))
    }
}
