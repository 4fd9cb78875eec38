//! [`Gate`]: whether requests may be sent to a server, and how many are active there. It is closed while the server sleeps, has
//! its weights replaced or writes a profile. [`Controls`](crate::controls::Controls) closes and opens it.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind};
use parking_lot::Mutex;
use tokio::sync::{RwLock, RwLockReadGuard, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// How long requests may take to end when the gate ends them. A request whose client reads nothing does not notice.
const LEAVING: Duration = Duration::from_secs(5);

/// The gate that requests pass on their way to a server.
#[derive(Debug)]
pub(crate) struct Gate {
    inside: watch::Sender<Inside>,
    /// Ends the active requests.
    leave: Mutex<CancellationToken>,
    /// Read-locked during a health check of the server.
    asking: RwLock<()>,
}

#[derive(Debug, Default)]
struct Inside {
    /// Why the gate is closed.
    closed: Option<&'static str>,
    requests: usize,
}

/// An admitted request, until this is dropped.
#[derive(Debug)]
pub(crate) struct Pass {
    gate: Arc<Gate>,
    leave: CancellationToken,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Self {
            inside: watch::channel(Inside::default()).0,
            leave: Mutex::default(),
            asking: RwLock::new(()),
        }
    }

    /// Admits a request.
    ///
    /// # Errors
    /// `Overloaded` while the gate is closed. The request may be sent to another instance or sent again later, and the
    /// Worker, which probes with requests, considers the engine alive.
    pub(crate) fn enter(self: &Arc<Self>) -> Result<Pass, EngineError> {
        let mut closed = None;
        self.inside.send_modify(|inside| {
            closed = inside.closed;
            inside.requests += usize::from(closed.is_none());
        });
        match closed {
            Some(why) => Err(EngineError::new(ErrorKind::Overloaded, why)),
            None => Ok(Pass {
                gate: Arc::clone(self),
                leave: self.leave.lock().clone(),
            }),
        }
    }

    /// Stops admitting requests. Active requests may continue.
    fn refuse(&self, why: &'static str) {
        self.inside.send_modify(|inside| inside.closed = Some(why));
    }

    /// Stops admitting requests and waits until the active ones have ended. Ends those that remain after `grace`.
    ///
    /// # Cancel safety
    /// If the future is dropped, the gate stays closed.
    pub(crate) async fn close(&self, why: &'static str, grace: Duration) {
        self.refuse(why);
        // A health check in progress may generate something, too.
        drop(self.asking.write().await);
        if timeout(grace, self.emptied()).await.is_err() {
            self.leave.lock().cancel();
            drop(timeout(LEAVING, self.emptied()).await);
        }
    }

    pub(crate) fn open(&self) {
        {
            let mut leave = self.leave.lock();
            if leave.is_cancelled() {
                *leave = CancellationToken::new();
            }
        }
        self.inside.send_modify(|inside| inside.closed = None);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.inside.borrow().closed.is_some()
    }

    /// Waits until the gate is closed, or until it is open.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future loses nothing.
    pub(crate) async fn becomes(&self, is_closed: bool) {
        let mut inside = self.inside.subscribe();
        let is_so = inside.wait_for(|inside| inside.closed.is_some() == is_closed);
        drop(is_so.await);
    }

    /// Returns a guard to hold during a health check: `close` waits for it.
    pub(crate) async fn asking(&self) -> RwLockReadGuard<'_, ()> {
        self.asking.read().await
    }

    async fn emptied(&self) {
        let mut inside = self.inside.subscribe();
        drop(inside.wait_for(|inside| inside.requests == 0).await);
    }
}

impl Pass {
    /// Waits until the request must end; returns the error.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future loses nothing.
    pub(crate) async fn ended(&self) -> EngineError {
        self.leave.cancelled().await;
        let message = "the operator had the server stop before the answer was whole";
        EngineError::new(ErrorKind::Unavailable, message)
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.gate
            .inside
            .send_modify(|inside| inside.requests = inside.requests.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_closed_gate_waits_for_those_inside_and_then_ends_them() {
        let gate = Arc::new(Gate::new());
        let (quick, slow) = (gate.enter().unwrap(), gate.enter().unwrap());
        let begun = tokio::time::Instant::now();
        let leaves = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert!(gate.is_closed());
            let refused = gate.enter().unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Overloaded);
            assert_eq!(refused.message(), "it sleeps");
            drop(quick);
            let ended = slow.ended().await;
            assert!(ended.policy().is_migratable);
            assert_eq!(begun.elapsed(), GRACE);
            drop(slow);
        };
        tokio::join!(gate.close("it sleeps", GRACE), leaves);
        assert_eq!(begun.elapsed(), GRACE);

        gate.open();
        let pass = gate.enter().unwrap();
        let ended = timeout(Duration::from_secs(1), pass.ended()).await;
        assert!(ended.is_err(), "who comes later is not ended");
    }

    #[tokio::test(start_paused = true)]
    async fn those_inside_go_on_where_others_are_refused_and_can_be_ended_later() {
        let gate = Arc::new(Gate::new());
        let pass = gate.enter().unwrap();
        gate.refuse("it writes");
        let refused = gate.enter().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Overloaded);
        let early = timeout(Duration::from_secs(1), pass.ended()).await;
        assert!(early.is_err());
        gate.open();
        drop(gate.enter().unwrap());
        let leaves = async {
            drop(pass.ended().await);
            drop(pass);
        };
        tokio::join!(gate.close("it sleeps", GRACE), leaves);
    }

    #[tokio::test(start_paused = true)]
    async fn an_empty_gate_closes_at_once_and_one_that_nobody_leaves_a_little_later() {
        let gate = Arc::new(Gate::new());
        let begun = tokio::time::Instant::now();
        gate.close("it sleeps", GRACE).await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
        gate.open();
        let _stays = gate.enter().unwrap();
        gate.close("it sleeps", GRACE).await;
        assert_eq!(begun.elapsed(), GRACE + LEAVING);
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_about_health_is_answered_before_the_gate_is_closed() {
        let gate = Gate::new();
        let asking = gate.asking().await;
        let close = gate.close("it sleeps", GRACE);
        tokio::pin!(close);
        let early = timeout(Duration::from_secs(1), &mut close).await;
        assert!(early.is_err());
        drop(asking);
        close.await;
    }
}
