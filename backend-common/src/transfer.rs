//! [`KvTransfers`]: moves KV blocks from a prefill engine to a decode engine. Only the engines know the format of the bytes; the
//! transport of requests to the Worker also carries them.
//!
//! A prefill engine [serves](KvTransfers::serve) the blocks it holds, and ends each sequence with [`KvTransfers::params`]. A
//! decode engine [fetches](KvTransfers::fetch) the blocks that a request's parameters name. Engines with their own transfer
//! mechanism need neither: the parameters contain its data.

mod holds;
mod receiving;

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use bytes::Bytes;
use futures_core::Stream;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use holds::{Held, KvHolds};
pub use receiving::receiving;

use crate::context::RequestContext;
use crate::engine::Role;
use crate::error::{EngineError, ErrorKind, RequestField};
use crate::request::GenerateRequest;

/// KV blocks in transit, in chunks. Dropping it ends the transfer.
pub type KvBytes = Pin<Box<dyn Stream<Item = Result<Bytes, EngineError>> + Send>>;

/// What a prefill instance passes to a decode instance; opaque to everything between.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TransferParams {
    /// The instance that holds the KV blocks; 0 for [none](Self::none).
    pub source_worker_id: u64,
    /// Where the blocks are fetched; `None` if the engines use their own mechanism.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Box<KvAddress>>,
    /// The engine's own data: a name, a layout, or a bootstrap room.
    pub data: Value,
}

impl TransferParams {
    /// Parameters without blocks: the decode instance computes the prompt itself, like an aggregated one. The router sets them
    /// explicitly, for a short prompt or without a prefill instance; a request without any parameters is an error.
    #[must_use]
    pub fn none() -> Self {
        Self {
            source_worker_id: 0,
            source: None,
            data: Value::Null,
        }
    }

    /// Returns whether there are no blocks to fetch.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.source_worker_id == 0
    }
}

impl GenerateRequest {
    /// Returns what an instance in `role` must fetch before it continues; `None` if it computes the prompt itself.
    ///
    /// # Errors
    /// `InvalidArgument` if a decode instance receives no parameters.
    pub fn blocks_to_fetch(&self, role: Role) -> Result<Option<&TransferParams>, EngineError> {
        match (role, &self.transfer) {
            (Role::Aggregated | Role::Prefill, _) => Ok(None),
            (Role::Decode, Some(transfer)) => Ok(Some(transfer).filter(|params| !params.is_none())),
            (Role::Decode, None) => Err(EngineError::invalid_argument(
                RequestField::Transfer,
                "a decode instance needs the transfer parameters of a prefill instance",
            )),
        }
    }
}

/// The address for fetching a worker's KV blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvAddress {
    /// The name of the request plane.
    pub plane: String,
    /// The worker's location on that plane.
    pub location: String,
    /// The full name of the endpoint.
    pub endpoint: String,
}

/// Holds a prefill engine's blocks for other workers to fetch.
#[async_trait]
pub trait KvSource: Send + Sync + 'static {
    /// Returns the blocks held under `data`, and ends the hold. They are freed when the stream ends or is dropped.
    ///
    /// # Errors
    /// `InvalidArgument` if `data` is not this engine's; `StreamIncomplete` if it is no longer held: it was fetched or released,
    /// or its lease expired.
    ///
    /// # Cancel safety
    /// Dropping the future frees what it took.
    async fn fetch(&self, data: Value, ctx: RequestContext) -> Result<KvBytes, EngineError>;

    /// Frees what is held under `data`, which nobody will fetch. Not an error if it is not held.
    fn release(&self, data: &Value);
}

/// Carries blocks from other workers to this worker.
#[async_trait]
pub trait KvCarrier: Send + Sync + 'static {
    /// Fetches what `transfer` names.
    ///
    /// # Errors
    /// As [`KvTransfers::fetch`].
    async fn fetch(
        &self,
        transfer: &TransferParams,
        ctx: RequestContext,
    ) -> Result<KvBytes, EngineError>;
}

/// An engine's access to the KV blocks of other workers, and theirs to its own. Clones share state.
#[derive(Clone)]
pub struct KvTransfers {
    shared: Arc<Shared>,
}

struct Shared {
    worker_id: u64,
    source: Mutex<Option<Arc<dyn KvSource>>>,
    way: Mutex<Way>,
}

#[derive(Default)]
struct Way {
    carrier: Option<Arc<dyn KvCarrier>>,
    address: Option<KvAddress>,
}

impl KvTransfers {
    /// Returns the handle of a worker that is not connected yet.
    #[must_use]
    pub fn new(worker_id: u64) -> Self {
        let shared = Shared {
            worker_id,
            source: Mutex::default(),
            way: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Serves what the engine holds; call it in `start`. Replaces an earlier source; [`close`](Self::close) ends it.
    pub fn serve(&self, source: Arc<dyn KvSource>) {
        *self.shared.source.lock() = Some(source);
    }

    /// Stops serving; call it in the engine's `cleanup`.
    pub fn close(&self) {
        let source = self.shared.source.lock().take();
        drop(source);
    }

    /// Returns what the engine serves.
    #[must_use]
    pub fn source(&self) -> Option<Arc<dyn KvSource>> {
        self.shared.source.lock().clone()
    }

    /// Returns parameters that name blocks of this worker.
    #[must_use]
    pub fn params(&self, data: Value) -> TransferParams {
        TransferParams {
            source_worker_id: self.shared.worker_id,
            source: self.shared.way.lock().address.clone().map(Box::new),
            data,
        }
    }

    /// Fetches the blocks that `transfer` names from their worker.
    ///
    /// # Errors
    /// `StreamIncomplete` if the blocks are not available: the worker is gone, or no longer holds them. The request may then
    /// restart elsewhere. `InvalidArgument` if that worker does not recognize the parameters; `Cancelled` and `DeadlineExceeded`
    /// according to `ctx`. The stream ends with the same errors.
    ///
    /// # Cancel safety
    /// Dropping the future, or the stream it returns, ends the transfer; the other worker then frees the blocks.
    pub async fn fetch(
        &self,
        transfer: &TransferParams,
        ctx: RequestContext,
    ) -> Result<KvBytes, EngineError> {
        let carrier = self.shared.way.lock().carrier.clone();
        match carrier {
            Some(carrier) => carrier.fetch(transfer, ctx).await,
            None => Err(Self::lost("this worker is not connected to others")),
        }
    }

    /// Connects the worker: sets what carries blocks to it, and the address of its own.
    pub fn connect(&self, carrier: Arc<dyn KvCarrier>, address: Option<KvAddress>) {
        *self.shared.way.lock() = Way {
            carrier: Some(carrier),
            address,
        };
    }

    /// Returns the error for unavailable blocks. The worker that asked for them is not the one that is lost.
    #[must_use]
    pub fn lost(why: impl fmt::Display) -> EngineError {
        let message = format!(
            "the KV blocks of the prefill instance cannot be fetched: {why}; send the request again"
        );
        EngineError::new(ErrorKind::StreamIncomplete, message)
    }
}

crate::debug_as!(|it| KvTransfers {
    worker_id: it.shared.worker_id,
    ..
});

/// Connects workers in one process without a network: for tests, and for engines used without a Worker.
#[derive(Clone, Default)]
pub struct LocalKvCarrier {
    workers: Arc<Mutex<HashMap<u64, Weak<Shared>>>>,
}

impl LocalKvCarrier {
    /// Adds a worker and returns its handle. It replaces an earlier worker with the same id.
    #[must_use]
    pub fn join(&self, worker_id: u64) -> KvTransfers {
        let transfers = KvTransfers::new(worker_id);
        transfers.connect(Arc::new(self.clone()), None);
        // The joined handles own the carrier.
        let weak = Arc::downgrade(&transfers.shared);
        self.workers.lock().insert(worker_id, weak);
        transfers
    }
}

#[async_trait]
impl KvCarrier for LocalKvCarrier {
    async fn fetch(
        &self,
        transfer: &TransferParams,
        ctx: RequestContext,
    ) -> Result<KvBytes, EngineError> {
        let worker = self.workers.lock().get(&transfer.source_worker_id).cloned();
        let shared = worker.and_then(|worker| worker.upgrade());
        let source = shared.and_then(|shared| shared.source.lock().clone());
        let source = source.ok_or_else(|| KvTransfers::lost("its worker is gone"))?;
        source.fetch(transfer.data.clone(), ctx).await
    }
}

crate::debug_as!(|_| LocalKvCarrier { .. });
