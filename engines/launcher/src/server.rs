//! [`Server`]: a server that serves, as its requests see it.

use std::sync::OnceLock;

use genset_backend_common::EngineError;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::http::Client;

/// A running server: how to reach it, and why it is over once it is.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) client: Client,
    over: CancellationToken,
    failure: OnceLock<EngineError>,
}

impl Server {
    pub(crate) fn new(port: u16, tasks: TaskTracker) -> Self {
        let over = CancellationToken::new();
        Self {
            client: Client::new(port, tasks, over.clone()),
            over,
            failure: OnceLock::new(),
        }
    }

    /// Ends every request under way with `error`; the first one stays.
    pub(crate) fn fail(&self, error: EngineError) {
        self.failure.get_or_init(|| error);
        self.over.cancel();
    }

    /// Waits for the end; returns why it came.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub(crate) async fn ended(&self) -> EngineError {
        self.over.cancelled().await;
        let failure = self.failure.get().cloned();
        failure.unwrap_or_else(|| EngineError::engine_shutdown("the server has stopped"))
    }
}
