//! [`VitalRuntime`]: a thread with its own async runtime, for the process's signs of life.
//!
//! It dials, accepts and monitors links. It also runs lease keep-alives, discovery watches and the status server,
//! but nothing that a request can slow down: handlers, engines, tokenizers, encoders and the frames of links run on
//! the process's main runtime. So a request that keeps every main thread busy delays responses, but no peer considers the process
//! dead. [`NetworkArgs`](crate::NetworkArgs) creates it, or a plane that is given none.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind};
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::AbortOnDropHandle;

/// How long the thread waits for its file operations at shutdown.
const SHUTDOWN_TIME: Duration = Duration::from_millis(100);

/// The runtime. Clones share it; its thread and remaining tasks end when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct VitalRuntime {
    handle: Handle,
    _until: Arc<DropGuard>,
}

impl VitalRuntime {
    /// Starts the thread. Its log goes to the caller's subscriber.
    ///
    /// # Errors
    /// `Unavailable` if the system cannot create a thread.
    pub fn start() -> Result<Self, EngineError> {
        let cannot = |error: std::io::Error| {
            let message = "the runtime of links and health cannot be started";
            EngineError::new(ErrorKind::Unavailable, message).with_source(error)
        };
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(cannot)?;
        let handle = runtime.handle().clone();
        let until = CancellationToken::new();
        let stopped = until.clone();
        let log = tracing::dispatcher::get_default(Clone::clone);
        thread::Builder::new()
            .name("genset-vital".to_owned())
            .spawn(move || {
                tracing::dispatcher::with_default(&log, || {
                    runtime.block_on(stopped.cancelled());
                    runtime.shutdown_timeout(SHUTDOWN_TIME);
                });
            })
            .map_err(cannot)?;
        Ok(Self {
            handle,
            _until: Arc::new(until.drop_guard()),
        })
    }

    /// The current runtime in place of one with a thread: it shares the paused clock of a test.
    #[cfg(test)]
    pub(crate) fn of_current() -> Self {
        Self {
            handle: Handle::current(),
            _until: Arc::new(CancellationToken::new().drop_guard()),
        }
    }

    /// The handle for spawning tasks.
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs `work` there to completion.
    ///
    /// # Errors
    /// The error of `work`; `Internal` if it panicked.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, EngineError>> + Send + 'static,
    ) -> Result<T, EngineError> {
        let done = AbortOnDropHandle::new(self.handle.spawn(work)).await;
        done.unwrap_or_else(|error| {
            Err(
                EngineError::internal("a task of the runtime of links ended early")
                    .with_source(error),
            )
        })
    }
}
