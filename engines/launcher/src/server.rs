//! [`Server`]: a serving server, from the requests' side.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::adapters::Served;
use crate::controls::Operated;
use crate::dialect::Dialect;
use crate::gate::Gate;
use crate::health::is_healthy;
use crate::http::Client;
use crate::key::ApiKey;

/// The time limit of a health check after a server fault.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(3);

/// A running server: its client, and the reason for its end once it has ended.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) client: Client,
    /// Admits requests.
    pub(crate) gate: Arc<Gate>,
    /// The operators' state; locked during an operation.
    pub(crate) operated: Mutex<Operated>,
    /// Locked during an operation that may take minutes, in which the server may not answer.
    pub(crate) busy: Mutex<()>,
    /// The adapters that requests may name.
    pub(crate) adapters: Served,
    dialect: Dialect,
    /// When the last part of an answer arrived; at first, when this was made.
    heard_at: parking_lot::Mutex<Instant>,
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
            adapters: Served::default(),
            dialect,
            heard_at: parking_lot::Mutex::new(Instant::now()),
            over,
            failure: OnceLock::new(),
        }
    }

    pub(crate) fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Ends every active request with `error`; the first error stays.
    pub(crate) fn fail(&self, error: EngineError) {
        self.failure.get_or_init(|| error);
        self.over.cancel();
    }

    /// Whether it has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.over.is_cancelled()
    }

    /// Whether it may be unable to answer now.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.try_lock().is_err()
    }

    /// Records that a part of an answer arrived.
    pub(crate) fn hear(&self) {
        *self.heard_at.lock() = Instant::now();
    }

    /// When the last part of an answer arrived.
    pub(crate) fn heard_at(&self) -> Instant {
        *self.heard_at.lock()
    }

    /// Whether it reports that it is healthy. A server that can sleep is asked at a path that generates nothing.
    pub(crate) async fn is_healthy(&self) -> bool {
        let _asking = self.gate.asking().await;
        let path = if self.gate.is_closed() {
            self.dialect.resting_health_path()
        } else {
            self.dialect.health_path()
        };
        is_healthy(&self.client, path).await
    }

    /// Judges a server error that a request received: it is the request's own, or if the server is no longer healthy, the
    /// server's end. A server whose inner process died reports that before it exits.
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

    /// Waits for the end; returns the reason.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future loses nothing.
    pub(crate) async fn ended(&self) -> EngineError {
        self.over.cancelled().await;
        let failure = self.failure.get().cloned();
        failure.unwrap_or_else(|| EngineError::engine_shutdown("the server has stopped"))
    }
}
