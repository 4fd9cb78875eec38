//! [`Server`]: a server that serves, as its requests see it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::controls::Operated;
use crate::dialect::Dialect;
use crate::gate::Gate;
use crate::health::is_healthy;
use crate::http::Client;
use crate::key::ApiKey;

/// How long a server with a fault may take to say that it is healthy.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(3);

/// A running server: how to reach it, and why it is over once it is.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) client: Client,
    /// What requests pass.
    pub(crate) gate: Arc<Gate>,
    /// What operators asked of it; held while it is asked for more.
    pub(crate) operated: Mutex<Operated>,
    /// Held while it does what may take minutes, in which it may say nothing.
    pub(crate) busy: Mutex<()>,
    dialect: Dialect,
    over: CancellationToken,
    failure: OnceLock<EngineError>,
}

impl Server {
    pub(crate) fn new(dialect: Dialect, port: u16, key: &ApiKey, tasks: TaskTracker) -> Self {
        let over = CancellationToken::new();
        Self {
            client: Client::new(port, key, tasks, over.clone()),
            gate: Arc::new(Gate::new()),
            operated: Mutex::default(),
            busy: Mutex::default(),
            dialect,
            over,
            failure: OnceLock::new(),
        }
    }

    /// Ends every request under way with `error`; the first one stays.
    pub(crate) fn fail(&self, error: EngineError) {
        self.failure.get_or_init(|| error);
        self.over.cancel();
    }

    /// Whether it has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.over.is_cancelled()
    }

    /// Whether it may say nothing for now.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.try_lock().is_err()
    }

    /// Whether it says that it is healthy. One that may sleep is asked where that makes it generate nothing.
    pub(crate) async fn is_healthy(&self) -> bool {
        let _asking = self.gate.asking().await;
        let path = if self.gate.is_closed() {
            self.dialect.resting_health_path()
        } else {
            self.dialect.health_path()
        };
        is_healthy(&self.client, path).await
    }

    /// What a fault of the server's is to the request that met it: its own, or, where the server is no longer healthy, the end
    /// of the server. One whose inside died says so before it ends.
    pub(crate) async fn judged(&self, error: EngineError) -> EngineError {
        if error.kind() != ErrorKind::Internal {
            return error;
        }
        let healthy = timeout(HEALTH_TIMEOUT, self.is_healthy());
        tokio::select! {
            biased;
            failure = self.ended() => failure,
            asked = healthy => match asked {
                Ok(true) => error,
                Ok(false) | Err(_) => {
                    let message = format!("the server is no longer healthy: {}", error.message());
                    EngineError::new(ErrorKind::Disconnected, message).with_source(error)
                }
            },
        }
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
