//! [`Apart`]: disaggregated prefill and decode, where the server's own connector moves the KV blocks. The transfer parameters
//! in the server's answer to the prefill go unchanged to the decode instance, which puts them into the request to its server.
//!
//! The server holds the blocks and frees them by itself. In addition, the decode instance holds an empty claim on the blocks
//! from the prefill instance: it takes the claim before it calls its server, and keeps it until its first token. So it learns
//! at once, and not from a connector's time limit, that the prefill instance is gone. Blocks are not fetched twice, nor after
//! their lease, when they may be reused. And a draining prefill instance knows what it waits for.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use genset_backend_common::{
    EngineError, GenerateRequest, RequestContext, RequestField, Role, async_trait,
    transfer::{Held, KvBytes, KvHolds, KvSource, KvTransfers, TransferParams},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::timeout;

use crate::server::Server;

/// The maximum length of a server's transfer parameters, in bytes. vLLM lists each block by number; this is enough for a prompt
/// of more than a million tokens.
const MAX_PARAMS_BYTES: usize = 1 << 20;

/// How long a prefill instance may take to grant a claim.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(5);

/// The transfer parameters that a prefill instance passes to a decode instance.
#[derive(Debug, Serialize, Deserialize)]
struct Blocks {
    /// The hold's name, in hex digits.
    hold: String,
    /// The server's own transfer parameters.
    kv_transfer_params: Value,
}

impl Blocks {
    fn read(data: &Value) -> Result<(Self, u64), EngineError> {
        let not_ours = || bad("these are not the transfer parameters of a launched server");
        let blocks: Self = Deserialize::deserialize(data).map_err(|_| not_ours())?;
        let hold = u64::from_str_radix(&blocks.hold, 16).map_err(|_| not_ours())?;
        check(&blocks.kv_transfer_params).map_err(bad)?;
        Ok((blocks, hold))
    }
}

/// Refuses parameters that no connector could use.
fn check(params: &Value) -> Result<(), String> {
    if params.as_object().is_none_or(serde_json::Map::is_empty) {
        return Err("kv_transfer_params must be an object with at least one field".into());
    }
    let length = params.to_string().len();
    if length > MAX_PARAMS_BYTES {
        return Err(format!(
            "kv_transfer_params have {length} bytes, more than the limit of {MAX_PARAMS_BYTES}"
        ));
    }
    Ok(())
}

fn bad(problem: impl std::fmt::Display) -> EngineError {
    EngineError::invalid_argument(RequestField::Transfer, problem)
}

/// The part of a request that an instance computes.
#[derive(Debug)]
pub(crate) enum Leg {
    /// The whole request.
    Whole,
    /// The prompt and one token.
    Prefill,
    /// The whole request, with the KV blocks of a prefill instance.
    Decode(Fetch),
}

/// Blocks for a server to fetch.
#[derive(Debug)]
pub(crate) struct Fetch {
    /// The server's transfer parameters.
    pub(crate) params: Value,
    transfer: TransferParams,
    door: KvTransfers,
}

impl Fetch {
    /// Claims the blocks for this instance, for as long as the claim is kept.
    ///
    /// # Errors
    /// `StreamIncomplete` if they are not available.
    ///
    /// # Cancel safety
    /// Dropping the future releases the claim.
    pub(crate) async fn claim(&self, ctx: &RequestContext) -> Result<KvBytes, EngineError> {
        let claim = self.door.fetch(&self.transfer, ctx.clone());
        let answered = timeout(CLAIM_TIMEOUT, claim).await;
        answered.unwrap_or_else(|_| Err(KvTransfers::lost("its worker does not answer")))
    }
}

/// The role of an instance in disaggregated serving. Clones share their state.
#[derive(Debug, Clone)]
pub(crate) struct Apart {
    role: Role,
    door: KvTransfers,
    holds: KvHolds<Arc<Server>>,
}

impl Apart {
    /// Makes a prefill instance grant claims from now on, each for at most `lease` after its prefill.
    pub(crate) fn new(role: Role, door: KvTransfers, lease: Duration) -> Self {
        let holds = KvHolds::new(lease);
        if role == Role::Prefill {
            door.serve(Arc::new(Claims(holds.clone())));
        }
        Self { role, door, holds }
    }

    /// The part of a request that this instance computes.
    ///
    /// # Errors
    /// `InvalidArgument` if a decode instance receives no transfer parameters, or those of another engine.
    pub(crate) fn leg(
        &self,
        request: &GenerateRequest,
        max_tokens: Option<u32>,
    ) -> Result<Leg, EngineError> {
        match self.role {
            Role::Aggregated => Ok(Leg::Whole),
            // A request that ends with its first token transfers no blocks.
            Role::Prefill if max_tokens.is_some_and(|max_tokens| max_tokens <= 1) => Ok(Leg::Whole),
            Role::Prefill => Ok(Leg::Prefill),
            Role::Decode => match request.blocks_to_fetch(self.role)? {
                None => Ok(Leg::Whole),
                Some(transfer) => Ok(Leg::Decode(Fetch {
                    params: Blocks::read(&transfer.data)?.0.kv_transfer_params,
                    transfer: transfer.clone(),
                    door: self.door.clone(),
                })),
            },
        }
    }

    /// Makes the transfer parameters of a finished prefill from those of its server.
    ///
    /// # Errors
    /// Why no connector could use the server's parameters.
    pub(crate) fn held(
        &self,
        request_id: &str,
        server: &Arc<Server>,
        kv_transfer_params: Value,
    ) -> Result<TransferParams, String> {
        check(&kv_transfer_params)?;
        let hold = self.holds.hold(request_id, Arc::clone(server));
        let blocks = Blocks {
            hold: format!("{hold:016x}"),
            kv_transfer_params,
        };
        let data = serde_json::to_value(blocks).map_err(|error| error.to_string())?;
        Ok(self.door.params(data))
    }

    /// Ends expired claims. Never returns.
    pub(crate) async fn expire(&self) {
        self.holds.expire().await;
    }

    /// Releases what is held for a request.
    pub(crate) fn abort(&self, request_id: &str) {
        self.holds.abort(request_id);
    }

    /// Waits until everything held was fetched or has expired.
    pub(crate) async fn drained(&self) {
        self.holds.drained().await;
    }

    /// Stops granting claims.
    pub(crate) fn close(&self) {
        self.door.close();
        self.holds.clear();
    }
}

/// Grants claims.
struct Claims(KvHolds<Arc<Server>>);

#[async_trait]
impl KvSource for Claims {
    async fn fetch(&self, data: Value, _ctx: RequestContext) -> Result<KvBytes, EngineError> {
        let (_, hold) = Blocks::read(&data)?;
        let held = self.0.take(hold);
        let held = held.ok_or_else(|| KvTransfers::lost("they are no longer held"))?;
        if held.value().is_over() {
            return Err(KvTransfers::lost("the server that held them is gone"));
        }
        Ok(Box::pin(Granted {
            _held: held,
            is_told: false,
        }))
    }

    /// Nothing to do: the server frees the blocks when their lease expires, and has no way to free them earlier.
    fn release(&self, data: &Value) {
        if let Ok((_, hold)) = Blocks::read(data) {
            self.0.release(hold);
        }
    }
}

/// A granted claim: one item that confirms it, and then nothing until it is dropped.
struct Granted {
    _held: Held<Arc<Server>>,
    is_told: bool,
}

impl Stream for Granted {
    type Item = Result<Bytes, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if std::mem::replace(&mut self.is_told, true) {
            return Poll::Pending;
        }
        Poll::Ready(Some(Ok(Bytes::from_static(b"granted"))))
    }
}
