//! [`KvTransfers`]: how KV blocks get from a prefill engine to a decode engine. The engines know what the bytes mean, and
//! whatever carries requests to the Worker carries the bytes too.
//!
//! A prefill engine [serves](KvTransfers::serve) what it holds, and ends each sequence with [`KvTransfers::params`]. A decode
//! engine [fetches](KvTransfers::fetch) what the parameters of a request name. Engines that move blocks by means of their own
//! need neither: their parameters hold what their means need.

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

/// KV blocks on their way, in pieces. Dropping it ends the transfer.
pub type KvBytes = Pin<Box<dyn Stream<Item = Result<Bytes, EngineError>> + Send>>;

/// What a prefill instance hands to a decode instance, opaque to everyone between.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TransferParams {
    /// The instance that holds the KV blocks; 0 for [none](Self::none).
    pub source_worker_id: u64,
    /// Where its blocks are fetched; `None` where the engines move them by means of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Box<KvAddress>>,
    /// The engine's own data: a name, a layout, a bootstrap room.
    pub data: Value,
}

impl TransferParams {
    /// Nobody holds blocks: the decode instance computes the prompt itself, as an aggregated one would. What routes requests
    /// says so on purpose, for a short prompt or where no prefill instance is left; a request without any parameters is an
    /// error.
    #[must_use]
    pub fn none() -> Self {
        Self {
            source_worker_id: 0,
            source: None,
            data: Value::Null,
        }
    }

    /// Whether nobody holds blocks.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.source_worker_id == 0
    }
}

impl GenerateRequest {
    /// What an instance in this role fetches before it goes on; `None` where it computes the prompt itself.
    ///
    /// # Errors
    /// `InvalidArgument` where a decode instance is told nothing.
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

/// Where a worker's KV blocks are fetched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvAddress {
    /// The request plane, by name.
    pub plane: String,
    /// What that plane needs to find the worker.
    pub location: String,
    /// The endpoint there, by its full name.
    pub endpoint: String,
}

/// What a prefill engine holds for others to fetch.
#[async_trait]
pub trait KvSource: Send + Sync + 'static {
    /// Gives what is held under `data`, which is held under that name no more. Its blocks are free when the stream ends or is
    /// dropped.
    ///
    /// # Errors
    /// `InvalidArgument` where `data` is none of this engine's; `StreamIncomplete` where it is held no more: it was fetched or
    /// released, or its time is over.
    ///
    /// # Cancel safety
    /// Dropping the future frees what it had taken.
    async fn fetch(&self, data: Value, ctx: RequestContext) -> Result<KvBytes, EngineError>;

    /// Frees what is held under `data`, which nobody will fetch. What is not held is no error.
    fn release(&self, data: &Value);
}

/// Carries blocks from other workers to this one.
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

/// An engine's door to the KV blocks of other workers, and theirs to its own. Clones share.
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
    /// The door of a worker that nobody carries anything to or from yet.
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

    /// Offers what the engine holds; to be called in its `start`. It stays until another is served, or
    /// [`close`](Self::close).
    pub fn serve(&self, source: Arc<dyn KvSource>) {
        *self.shared.source.lock() = Some(source);
    }

    /// Offers nothing any more; to be called in the engine's `cleanup`.
    pub fn close(&self) {
        let source = self.shared.source.lock().take();
        drop(source);
    }

    /// What the engine offers.
    #[must_use]
    pub fn source(&self) -> Option<Arc<dyn KvSource>> {
        self.shared.source.lock().clone()
    }

    /// Parameters that name blocks of this worker.
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
    /// `StreamIncomplete` where they cannot be had: the worker is gone, or holds them no more. The request may then begin anew
    /// elsewhere. `InvalidArgument` where that worker does not know what is meant; `Cancelled` and `DeadlineExceeded` as `ctx`
    /// says. The stream ends with the same errors.
    ///
    /// # Cancel safety
    /// Dropping the future, or the stream it returns, ends the transfer, and the other worker frees the blocks.
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

    /// Connects the worker with others: what carries blocks to it, and where its own are fetched.
    pub fn connect(&self, carrier: Arc<dyn KvCarrier>, address: Option<KvAddress>) {
        *self.shared.way.lock() = Way {
            carrier: Some(carrier),
            address,
        };
    }

    /// The error of blocks that cannot be had. It is not the worker that asked for them that is lost.
    #[must_use]
    pub fn lost(why: impl fmt::Display) -> EngineError {
        let message = format!(
            "the KV blocks of the prefill instance cannot be fetched: {why}; send the request again"
        );
        EngineError::new(ErrorKind::StreamIncomplete, message)
    }
}

impl fmt::Debug for KvTransfers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvTransfers")
            .field("worker_id", &self.shared.worker_id)
            .finish_non_exhaustive()
    }
}

/// Workers of one process that fetch from each other without a network: for tests, and for engines used without a Worker.
#[derive(Clone, Default)]
pub struct LocalKvCarrier {
    workers: Arc<Mutex<HashMap<u64, Weak<Shared>>>>,
}

impl LocalKvCarrier {
    /// The door of one more worker. One with the same id takes the place of the one before.
    #[must_use]
    pub fn join(&self, worker_id: u64) -> KvTransfers {
        let transfers = KvTransfers::new(worker_id);
        transfers.connect(Arc::new(self.clone()), None);
        // Those who join hold the carrier.
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

impl fmt::Debug for LocalKvCarrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalKvCarrier").finish_non_exhaustive()
    }
}
