//! [`VitalRuntime`]: a thread with an async runtime of its own, for what others take as this process's signs of life.
//!
//! Links are dialled, accepted and watched there. Keep-alives of leases, the following of discovery and the status server run
//! there, and nothing that a request can make long: handlers and engines, tokenizers and encoders, and the frames of links are on
//! the process's main runtime. So a request that keeps every main thread busy delays answers, and no peer takes the process for
//! dead. It is made by [`NetworkArgs`](crate::NetworkArgs), or by a plane that is given none.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind};
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::AbortOnDropHandle;

/// How long the thread waits for its file operations when it ends.
const SHUTDOWN_TIME: Duration = Duration::from_millis(100);

/// The runtime. Clones share; its thread ends with the last of them, and with it what still runs there.
#[derive(Debug, Clone)]
pub struct VitalRuntime {
    handle: Handle,
    _until: Arc<DropGuard>,
}

impl VitalRuntime {
    /// Starts the thread. What is logged there goes where the caller's log goes.
    ///
    /// # Errors
    /// `Unavailable` when the system gives no thread.
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

    /// Where tasks are spawned.
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs `work` there to its end.
    ///
    /// # Errors
    /// What `work` fails with; `Internal` when it panicked.
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
