//! The requests in flight: counts them, waits for them, and cancels them together.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::context::{CancelReason, RequestContext};
use crate::error::EngineError;
use crate::handles::HealthReporter;

/// All requests between entry and terminal. Clones share state.
#[derive(Debug, Clone)]
pub(super) struct InFlight {
    shared: Arc<Shared>,
    health: HealthReporter,
}

#[derive(Debug, Default)]
struct Shared {
    is_open: AtomicBool,
    next_key: AtomicU64,
    requests: Mutex<HashMap<u64, RequestContext>>,
    count: watch::Sender<usize>,
    /// The number of items from the engine; the canary reads it as a sign of life.
    heartbeats: AtomicU64,
    /// Those that belonged to canaries.
    of_canaries: AtomicU64,
}

impl InFlight {
    /// Starts empty and refuses requests. `health` receives the engine's steps.
    pub(super) fn new(health: HealthReporter) -> Self {
        Self {
            shared: Arc::default(),
            health,
        }
    }

    /// Starts to accept requests.
    pub(super) fn open_door(&self) {
        self.shared.is_open.store(true, Ordering::Release);
    }

    /// Stops accepting requests.
    pub(super) fn close_door(&self) {
        // Under the lock: every request is either counted already or refused.
        let _requests = self.shared.requests.lock();
        self.shared.is_open.store(false, Ordering::Release);
    }

    /// Counts a request until the ticket is dropped.
    ///
    /// # Errors
    /// `EngineShutdown`, retryable, while requests are not accepted.
    pub(super) fn enter(&self, ctx: &RequestContext) -> Result<Ticket, EngineError> {
        let key = self.shared.next_key.fetch_add(1, Ordering::Relaxed);
        let mut requests = self.shared.requests.lock();
        if !self.shared.is_open.load(Ordering::Acquire) {
            return Err(EngineError::engine_shutdown(
                "the worker is not serving; send the request again",
            )
            .with_retry_after(Duration::from_secs(1)));
        }
        requests.insert(key, ctx.clone());
        self.shared.count.send_replace(requests.len());
        Ok(Ticket {
            in_flight: self.clone(),
            key,
        })
    }

    /// Returns the number of requests in flight.
    pub(super) fn count(&self) -> usize {
        *self.shared.count.borrow()
    }

    /// Returns the number of requests so far.
    pub(super) fn came(&self) -> u64 {
        self.shared.next_key.load(Ordering::Relaxed)
    }

    /// Returns whether one of the first `came` requests is still in flight and before its deadline.
    pub(super) fn has_one_of_first(&self, came: u64) -> bool {
        let has_time = |ctx: &RequestContext| ctx.time_left() != Some(Duration::ZERO);
        let requests = self.shared.requests.lock();
        requests
            .iter()
            .any(|(key, ctx)| *key < came && has_time(ctx))
    }

    /// Waits until nothing is in flight.
    pub(super) async fn idle(&self) {
        let mut count = self.shared.count.subscribe();
        // `self` owns the sender, so the wait cannot fail.
        drop(count.wait_for(|count| *count == 0).await);
    }

    /// Cancels every request in flight.
    pub(super) fn cancel_all(&self, reason: CancelReason) -> usize {
        let requests: Vec<_> = self.shared.requests.lock().values().cloned().collect();
        for ctx in &requests {
            ctx.cancel(reason);
        }
        requests.len()
    }

    /// Counts an item from the engine that is not an error.
    pub(super) fn heartbeat(&self) {
        self.shared.heartbeats.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the item as a canary's.
    pub(super) fn canary_heartbeat(&self) {
        self.shared.of_canaries.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of items from the engine.
    pub(super) fn heartbeats(&self) -> u64 {
        self.shared.heartbeats.load(Ordering::Relaxed)
    }

    /// Returns the number of items for clients' requests.
    pub(super) fn answers(&self) -> u64 {
        let of_canaries = self.shared.of_canaries.load(Ordering::Relaxed);
        self.heartbeats().wrapping_sub(of_canaries)
    }

    /// Returns the number of steps that the engine reported.
    pub(super) fn steps(&self) -> u64 {
        self.health.steps()
    }
}

/// A request's entry among those in flight.
#[derive(Debug)]
pub(super) struct Ticket {
    in_flight: InFlight,
    key: u64,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut requests = self.in_flight.shared.requests.lock();
        requests.remove(&self.key);
        self.in_flight.shared.count.send_replace(requests.len());
    }
}
