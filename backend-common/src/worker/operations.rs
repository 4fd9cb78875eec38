//! The operations of a shell: calls of the engine's methods and of the ports, each with a deadline and with panics contained. The
//! shell runs one at a time. Dropping an operation cancels it.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::adapter::panic_text;
use super::lifecycle::Fault;
use crate::error::{EngineError, ErrorKind};

/// The time left once a second signal expired the deadlines: enough for calls that do not wait.
const EXPIRED_TIMEOUT: Duration = Duration::from_millis(100);

/// How long `cleanup` waits for an abandoned call; one that blocks its thread cannot be aborted.
const CALL_END_TIMEOUT: Duration = Duration::from_secs(5);

/// Deadlines, and the switch that expires all of them.
#[derive(Debug, Clone, Default)]
pub(super) struct Deadlines {
    expired: CancellationToken,
}

impl Deadlines {
    /// Expires every deadline, from now on.
    pub(super) fn expire(&self) {
        self.expired.cancel();
    }

    /// Runs `future` for at most `limit`; returns `None` when its deadline passed.
    pub(super) async fn bound<T>(
        &self,
        limit: Duration,
        future: impl Future<Output = T>,
    ) -> Option<T> {
        let expired = async {
            self.expired.cancelled().await;
            tokio::time::sleep(EXPIRED_TIMEOUT).await;
        };
        tokio::select! {
            biased;
            value = future => Some(value),
            () = tokio::time::sleep(limit) => None,
            () = expired => None,
        }
    }

    /// Which deadline of a call with `limit` passed, for its error.
    fn passed(&self, limit: Duration) -> String {
        if self.expired.is_cancelled() {
            "at once when a second signal asked for that".to_owned()
        } else {
            format!("within {} s", limit.as_secs_f64())
        }
    }
}

/// How an engine call failed, with its error.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) fault: Fault,
    pub(super) error: EngineError,
}

/// Calls of the engine's methods, each on its own task, so that a call that blocks its thread blocks nothing else. Clones share
/// state.
#[derive(Debug, Clone)]
pub(super) struct EngineCalls {
    pub(super) tasks: TaskTracker,
    pub(super) deadlines: Deadlines,
    /// Calls that have neither returned nor been dropped.
    alive: TaskTracker,
    /// Cancelled when administrative requests must end.
    settling: CancellationToken,
    has_called: Arc<AtomicBool>,
}

impl EngineCalls {
    pub(super) fn new(tasks: TaskTracker, deadlines: Deadlines) -> Self {
        Self {
            tasks,
            deadlines,
            alive: TaskTracker::new(),
            settling: CancellationToken::new(),
            has_called: Arc::default(),
        }
    }

    /// Returns whether any method was called. A task that was aborted before it ran does not count.
    pub(super) fn has_called(&self) -> bool {
        self.has_called.load(Ordering::Acquire)
    }

    /// Performs an administrative request concurrently with the calls, on its own task. Returns `None` if it was abandoned
    /// because of the engine's cleanup.
    pub(super) fn beside<T: Send + 'static>(
        &self,
        request: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<Option<T>> {
        let settling = self.settling.clone();
        let request = async move {
            tokio::select! {
                biased;
                () = settling.cancelled() => None,
                performed = request => Some(performed),
            }
        };
        self.tasks.spawn(self.alive.track_future(request))
    }

    /// Abandons administrative requests, and waits until every call has returned or was dropped. An abandoned call is dropped a
    /// moment later, by its task rather than the operation that awaited it.
    pub(super) async fn settled(&self) {
        self.settling.cancel();
        self.alive.close();
        let settled = self.deadlines.bound(CALL_END_TIMEOUT, self.alive.wait());
        if settled.await.is_none() {
            tracing::error!("a call of the engine's blocks its thread; cleanup goes on beside it");
        }
    }

    /// Calls one method, for at most `limit`.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        name: &'static str,
        limit: Duration,
        call: impl Future<Output = Result<T, EngineError>> + Send + 'static,
    ) -> Result<T, Failure> {
        let has_called = Arc::clone(&self.has_called);
        let call = async move {
            has_called.store(true, Ordering::Release);
            AssertUnwindSafe(call).catch_unwind().await
        };
        let task = self.tasks.spawn(self.alive.track_future(call));
        // Dropping the operation aborts the task.
        let called = self.deadlines.bound(limit, AbortOnDropHandle::new(task));
        let (fault, error) = match called.await {
            Some(Ok(Ok(Ok(value)))) => return Ok(value),
            Some(Ok(Ok(Err(error)))) => (Fault::Error, error),
            Some(Ok(Err(panic))) => {
                let message = format!("the engine panicked in {name}: {}", panic_text(&*panic));
                (Fault::Panic, EngineError::internal(message))
            }
            Some(Err(_)) => {
                let message = format!("the runtime ended during {name}");
                (Fault::Error, EngineError::internal(message))
            }
            None => {
                let passed = self.deadlines.passed(limit);
                let message = format!("the engine's {name} did not return {passed}");
                let error = EngineError::new(ErrorKind::DeadlineExceeded, message);
                (Fault::Timeout, error)
            }
        };
        Err(Failure { fault, error })
    }
}

/// Calls a port, for at most `limit`, with panics contained.
///
/// # Errors
/// The port's error; `Internal` when it panicked; `Unavailable` when it did not answer in time.
pub(super) async fn call_port<T>(
    name: &'static str,
    deadlines: &Deadlines,
    limit: Duration,
    call: impl Future<Output = Result<T, EngineError>>,
) -> Result<T, EngineError> {
    let call = AssertUnwindSafe(call).catch_unwind();
    match deadlines.bound(limit, call).await {
        Some(Ok(result)) => result,
        Some(Err(panic)) => Err(port_panic(name, &*panic)),
        None => {
            let message = format!("the {name} did not answer within {} s", limit.as_secs_f64());
            Err(EngineError::new(ErrorKind::Unavailable, message))
        }
    }
}

/// Converts a contained panic of a port into an error.
pub(super) fn port_panic(name: &str, panic: &(dyn std::any::Any + Send)) -> EngineError {
    EngineError::internal(format!("the {name} panicked: {}", panic_text(panic)))
}
