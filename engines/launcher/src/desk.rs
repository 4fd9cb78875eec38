//! [`Desk`]: which server takes requests now, if any.

use std::sync::Arc;

use genset_backend_common::EngineError;
use parking_lot::Mutex;

use crate::server::Server;

/// Where requests ask for a server.
#[derive(Debug)]
pub(crate) struct Desk {
    now: Mutex<Now>,
}

#[derive(Debug)]
enum Now {
    Serving(Arc<Server>),
    /// Requests end with this.
    Closed(EngineError),
}

impl Desk {
    pub(crate) fn new(server: Arc<Server>) -> Self {
        Self {
            now: Mutex::new(Now::Serving(server)),
        }
    }

    pub(crate) fn server(&self) -> Result<Arc<Server>, EngineError> {
        match &*self.now.lock() {
            Now::Serving(server) => Ok(Arc::clone(server)),
            Now::Closed(error) => Err(error.clone()),
        }
    }

    /// From now on requests end with `error`; those under way do so too, with `reason`.
    pub(crate) fn close(&self, error: EngineError, reason: EngineError) {
        let before = std::mem::replace(&mut *self.now.lock(), Now::Closed(error));
        if let Now::Serving(server) = before {
            server.fail(reason);
        }
    }

    pub(crate) fn open(&self, server: Arc<Server>) {
        *self.now.lock() = Now::Serving(server);
    }
}
