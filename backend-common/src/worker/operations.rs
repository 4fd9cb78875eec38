//! The operations a shell runs, one at a time: calls of the engine's methods and of the ports, each under its deadline,
//! with panics contained. Dropping an operation ends it.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::adapter::panic_text;
use super::lifecycle::Fault;
use crate::error::{EngineError, ErrorKind};

/// What is left of a deadline once a second signal said "now": enough for calls that wait for nothing.
const EXPIRED_TIMEOUT: Duration = Duration::from_millis(100);

/// Deadlines, and the switch that makes every one of them now.
#[derive(Debug, Clone, Default)]
pub(super) struct Deadlines {
    expired: CancellationToken,
}

impl Deadlines {
    /// From now on every deadline is now.
    pub(super) fn expire(&self) {
        self.expired.cancel();
    }

    /// Runs `future` for at most `limit`; `None` when its deadline passed.
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
}

/// How an engine call failed, and with what.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) fault: Fault,
    pub(super) error: EngineError,
}

/// Ends the task when the operation is dropped.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Calls a method of the engine's on a task of its own, so that one that blocks its thread blocks nothing else.
pub(super) async fn call_engine<T: Send + 'static>(
    name: &'static str,
    tasks: &TaskTracker,
    deadlines: &Deadlines,
    limit: Duration,
    call: impl Future<Output = Result<T, EngineError>> + Send + 'static,
) -> Result<T, Failure> {
    let mut task = AbortOnDrop(tasks.spawn(AssertUnwindSafe(call).catch_unwind()));
    match deadlines.bound(limit, &mut task.0).await {
        Some(Ok(Ok(Ok(value)))) => Ok(value),
        Some(Ok(Ok(Err(error)))) => Err(Failure {
            fault: Fault::Error,
            error,
        }),
        Some(Ok(Err(panic))) => {
            let error = EngineError::internal(format!(
                "the engine panicked in {name}: {}",
                panic_text(&*panic)
            ));
            Err(Failure {
                fault: Fault::Panic,
                error,
            })
        }
        Some(Err(_)) => {
            let error = EngineError::internal(format!("the runtime ended during {name}"));
            Err(Failure {
                fault: Fault::Error,
                error,
            })
        }
        None => {
            let message = format!(
                "the engine's {name} did not return within {} s",
                limit.as_secs_f64()
            );
            let error = EngineError::new(ErrorKind::DeadlineExceeded, message);
            Err(Failure {
                fault: Fault::Timeout,
                error,
            })
        }
    }
}
