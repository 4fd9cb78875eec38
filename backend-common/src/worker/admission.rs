//! Admission: a bounded number of requests run, a bounded number wait, and further ones are refused at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::config::RequestLimits;
use super::telemetry::Telemetry;
use crate::context::{CancelReason, RequestContext};
use crate::error::{EngineError, ErrorKind};
use crate::handles::Admitted;

/// The gate before the engine. Waiting requests are admitted in order of arrival.
#[derive(Debug, Clone)]
pub(super) struct Admission {
    permits: Arc<Semaphore>,
    waiting: Arc<AtomicUsize>,
    limits: RequestLimits,
    running_gauge: Gauge,
    waiting_gauge: Gauge,
    counts: Arc<watch::Sender<Admitted>>,
}

/// A slot in the engine; dropping it admits the next request.
#[derive(Debug)]
pub(super) struct Permit {
    _permit: OwnedSemaphorePermit,
    running_gauge: Gauge,
    counts: Arc<watch::Sender<Admitted>>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.running_gauge.dec();
        self.counts.send_modify(|counts| {
            counts.running_requests = counts.running_requests.saturating_sub(1)
        });
    }
}

struct Waiting<'a>(&'a Admission);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
        self.0.waiting_gauge.dec();
        self.0.counts.send_modify(|counts| {
            counts.waiting_requests = counts.waiting_requests.saturating_sub(1)
        });
    }
}

impl Admission {
    pub(super) fn new(limits: RequestLimits, telemetry: &Telemetry) -> Self {
        let permits = limits.max_running.min(Semaphore::MAX_PERMITS);
        let max_requests = permits.saturating_add(limits.max_waiting);
        let counts = Admitted {
            max_requests: u64::try_from(max_requests).unwrap_or(u64::MAX),
            ..Admitted::default()
        };
        Self {
            permits: Arc::new(Semaphore::new(permits)),
            waiting: Arc::default(),
            limits,
            running_gauge: telemetry.running.clone(),
            waiting_gauge: telemetry.waiting.clone(),
            counts: Arc::new(watch::Sender::new(counts)),
        }
    }

    /// Subscribes to the number of admitted and waiting requests.
    pub(super) fn subscribe(&self) -> watch::Receiver<Admitted> {
        self.counts.subscribe()
    }

    /// Waits for a slot in the engine.
    ///
    /// # Errors
    /// `Overloaded` if too many requests wait; the cancellation's error if the request is cancelled or its deadline passes.
    pub(super) async fn admit(&self, ctx: &RequestContext) -> Result<Permit, EngineError> {
        if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
            return Ok(self.permit(permit));
        }
        let waiting = self.queue()?;
        let permit = tokio::select! {
            biased;
            error = ctx.over() => return Err(error),
            permit = Arc::clone(&self.permits).acquire_owned() => permit,
        };
        drop(waiting);
        permit
            .map(|permit| self.permit(permit))
            .map_err(|_| CancelReason::Shutdown.to_error())
    }

    fn permit(&self, permit: OwnedSemaphorePermit) -> Permit {
        self.running_gauge.inc();
        self.counts.send_modify(|counts| {
            counts.running_requests = counts.running_requests.saturating_add(1)
        });
        Permit {
            _permit: permit,
            running_gauge: self.running_gauge.clone(),
            counts: Arc::clone(&self.counts),
        }
    }

    fn queue(&self) -> Result<Waiting<'_>, EngineError> {
        if self.waiting.fetch_add(1, Ordering::AcqRel) >= self.limits.max_waiting {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            let message = format!(
                "{} requests run and {} wait, which is this worker's limit; try again later",
                self.limits.max_running, self.limits.max_waiting
            );
            return Err(EngineError::new(ErrorKind::Overloaded, message)
                .with_retry_after(Duration::from_secs(1)));
        }
        self.waiting_gauge.inc();
        self.counts.send_modify(|counts| {
            counts.waiting_requests = counts.waiting_requests.saturating_add(1)
        });
        Ok(Waiting(self))
    }
}
