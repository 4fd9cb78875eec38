//! The external events of a worker: stops, the engine's health, a lost listing and failed canaries.
//!
//! [`Signals::next`] merges them into one stream for the shell. A source that has ended stays pending.

use std::convert::Infallible;
use std::future::pending;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::FutureExt;
use tokio::sync::watch;

use super::lifecycle::Event;
use super::operations::{Deadlines, port_panic};
use crate::error::{EngineError, ErrorKind};
use crate::handles::HealthReporter;
use crate::ports::Registration;

type Watch<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// An event with the error that it reports.
pub(super) type Signal = (Event, Option<EngineError>);

/// The sources of external events.
pub(super) struct Signals {
    stops: Stops,
    health: HealthReporter,
    /// Whether the engine is down, and why.
    downs: watch::Receiver<Option<String>>,
    /// Whether the engine's death was reported; it is reported once.
    is_dead: bool,
    /// Completes when discovery loses the listed instance; pending while nothing is listed.
    lost: Watch<()>,
    /// Completes when a serving engine no longer answers canaries; pending while none are sent.
    canary: Watch<EngineError>,
    sends_canaries: bool,
}

impl Signals {
    pub(super) fn new(stops: watch::Receiver<u32>, health: HealthReporter) -> Self {
        Self {
            stops: Stops {
                asked: stops,
                taken: 0,
            },
            downs: health.downs(),
            health,
            is_dead: false,
            lost: Box::pin(pending()),
            canary: Box::pin(pending()),
            sends_canaries: false,
        }
    }

    pub(super) fn stops(&self) -> &Stops {
        &self.stops
    }

    /// Watches a listed instance: `registration` reports that discovery has lost it.
    pub(super) fn watch_listing(&mut self, registration: Arc<dyn Registration>) {
        self.lost = Box::pin(until_lost(registration));
    }

    /// Stops watching the listing.
    pub(super) fn forget_listing(&mut self) {
        self.lost = Box::pin(pending());
    }

    /// Treats the completion of `watch` as the engine's death. Does nothing if canaries are already sent.
    pub(super) fn watch_canaries<F>(&mut self, watch: impl FnOnce() -> F)
    where
        F: Future<Output = EngineError> + Send + 'static,
    {
        if !self.sends_canaries {
            self.canary = Box::pin(watch());
            self.sends_canaries = true;
        }
    }

    /// Stops watching canaries.
    pub(super) fn forget_canaries(&mut self) {
        self.canary = Box::pin(pending());
        self.sends_canaries = false;
    }

    /// Returns the next event.
    ///
    /// # Cancel safety
    /// If the future is dropped, no event is lost.
    pub(super) async fn next(&mut self) -> Signal {
        tokio::select! {
            biased;
            () = self.stops.next() => (Event::Stop, None),
            reason = self.health.died(), if !self.is_dead => {
                let message = format!("the engine reported itself dead: {reason}");
                self.died(EngineError::new(ErrorKind::Disconnected, message))
            }
            down = next_down(&mut self.downs) => match down {
                Some(reason) => {
                    tracing::warn!(reason, "the engine is down and recovers by itself");
                    (Event::EngineDown, None)
                }
                None => {
                    tracing::info!("the engine is up again");
                    (Event::EngineUp, None)
                }
            },
            error = &mut self.canary => self.died(error),
            () = &mut self.lost => {
                self.forget_listing();
                tracing::warn!("discovery lost this instance; it is listed again under the same id");
                (Event::LeaseLost, None)
            }
        }
    }

    fn died(&mut self, error: EngineError) -> Signal {
        self.is_dead = true;
        self.canary = Box::pin(pending());
        (Event::EngineDied, Some(error))
    }
}

pub(super) struct Stops {
    asked: watch::Receiver<u32>,
    taken: u32,
}

impl Stops {
    /// Takes the next stop. When all handles are gone, nothing can stop the worker any more: this returns one stop if there was
    /// none before, and then stays pending.
    async fn next(&mut self) {
        loop {
            if self.taken < *self.asked.borrow_and_update() {
                self.taken += 1;
                return;
            }
            if self.asked.changed().await.is_err() {
                if self.taken > 0 {
                    return pending().await;
                }
                self.taken = 1;
                return;
            }
        }
    }

    /// Expires the deadlines on one more stop, while events are not taken. The event itself is taken later.
    pub(super) async fn expire(&self, deadlines: &Deadlines) -> Infallible {
        let mut asked = self.asked.clone();
        if asked.wait_for(|asked| *asked > self.taken).await.is_ok() {
            deadlines.expire();
        }
        pending().await
    }
}

/// Returns the next change of whether the engine is down.
async fn next_down(downs: &mut watch::Receiver<Option<String>>) -> Option<String> {
    match downs.changed().await {
        Ok(()) => downs.borrow_and_update().clone(),
        Err(_) => pending().await,
    }
}

/// Completes when discovery has lost the instance; never if the port cannot tell.
async fn until_lost(registration: Arc<dyn Registration>) {
    let lost = AssertUnwindSafe(async { registration.lost().await });
    if let Err(panic) = lost.catch_unwind().await {
        let error = port_panic("discovery", &*panic);
        tracing::error!(%error, "a lost lease will not be noticed");
        pending().await
    }
}
