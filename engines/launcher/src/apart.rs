//! [`Apart`]: prefill and decode apart, where the server moves the KV blocks by a connector of its own. What its answer to the
//! prefill says about them goes to the decode instance unchanged, and into the request that its server gets.
//!
//! The server holds the blocks, and frees them by itself. Beside it goes a claim on them between the two workers, without a
//! byte in it: a decode instance asks for it before its server does anything, and keeps it until its first token. So it learns
//! at once, and not from the time limit of a connector, that the prefill instance is gone; no blocks are fetched twice, or when
//! their time is over and others may have their place; and a prefill instance that drains knows what it waits for.

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

/// The longest of what a server says about its blocks, in bytes. vLLM names each block by a number: these are a prompt of more
/// than a million tokens.
const MAX_PARAMS_BYTES: usize = 1 << 20;

/// How long a prefill instance may take to grant a claim.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(5);

/// What goes from a prefill instance to a decode instance.
#[derive(Debug, Serialize, Deserialize)]
struct Blocks {
    /// The hold's name, in hex digits.
    hold: String,
    /// What the server said of its blocks.
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

/// Refuses what no connector can be told.
fn check(params: &Value) -> Result<(), String> {
    if params.as_object().is_none_or(serde_json::Map::is_empty) {
        return Err("kv_transfer_params must be an object that says something".into());
    }
    let length = params.to_string().len();
    if length > MAX_PARAMS_BYTES {
        return Err(format!(
            "kv_transfer_params have {length} bytes, and {MAX_PARAMS_BYTES} are allowed"
        ));
    }
    Ok(())
}

fn bad(problem: impl std::fmt::Display) -> EngineError {
    EngineError::invalid_argument(RequestField::Transfer, problem)
}

/// The part of an instance in a request.
#[derive(Debug)]
pub(crate) enum Leg {
    /// All of it.
    Whole,
    /// The prompt and one token.
    Prefill,
    /// All of it, with the blocks of a prefill instance.
    Decode(Fetch),
}

/// Blocks that a server is to fetch.
#[derive(Debug)]
pub(crate) struct Fetch {
    /// What the server is told.
    pub(crate) params: Value,
    transfer: TransferParams,
    door: KvTransfers,
}

impl Fetch {
    /// Claims the blocks: they are this instance's for as long as the claim is kept.
    ///
    /// # Errors
    /// `StreamIncomplete` where they cannot be had.
    ///
    /// # Cancel safety
    /// Dropping the future gives the claim back.
    pub(crate) async fn claim(&self, ctx: &RequestContext) -> Result<KvBytes, EngineError> {
        let claim = self.door.fetch(&self.transfer, ctx.clone());
        let answered = timeout(CLAIM_TIMEOUT, claim).await;
        answered.unwrap_or_else(|_| Err(KvTransfers::lost("its worker does not answer")))
    }
}

/// The part an instance plays. Clones share.
#[derive(Debug, Clone)]
pub(crate) struct Apart {
    role: Role,
    door: KvTransfers,
    holds: KvHolds<Arc<Server>>,
}

impl Apart {
    /// A prefill instance grants claims from now on, each for at most `lease` from the end of its prefill.
    pub(crate) fn new(role: Role, door: KvTransfers, lease: Duration) -> Self {
        let holds = KvHolds::new(lease);
        if role == Role::Prefill {
            door.serve(Arc::new(Claims(holds.clone())));
        }
        Self { role, door, holds }
    }

    /// The instance's part in a request.
    ///
    /// # Errors
    /// `InvalidArgument` where a decode instance is not told where blocks are, or in another engine's words.
    pub(crate) fn leg(
        &self,
        request: &GenerateRequest,
        max_tokens: Option<u32>,
    ) -> Result<Leg, EngineError> {
        match self.role {
            Role::Aggregated => Ok(Leg::Whole),
            // What ends with its first token needs no blocks.
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

    /// The parameters of a prefill that has ended, out of what its server said of the blocks that it holds.
    ///
    /// # Errors
    /// Why no connector could fetch them.
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

    /// Ends claims whose time is over. Ends never.
    pub(crate) async fn expire(&self) {
        self.holds.expire().await;
    }

    /// Forgets what is held for a request.
    pub(crate) fn abort(&self, request_id: &str) {
        self.holds.abort(request_id);
    }

    /// Waits until others have fetched what is held, or its time is over.
    pub(crate) async fn drained(&self) {
        self.holds.drained().await;
    }

    /// Grants nothing any more.
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
        let held = held.ok_or_else(|| KvTransfers::lost("they are held no more"))?;
        if held.value().is_over() {
            return Err(KvTransfers::lost("the server that held them is gone"));
        }
        Ok(Box::pin(Granted {
            _held: held,
            is_told: false,
        }))
    }

    /// The server itself frees the blocks when their time is over; nobody can tell it to do so earlier.
    fn release(&self, data: &Value) {
        if let Ok((_, hold)) = Blocks::read(data) {
            self.0.release(hold);
        }
    }
}

/// A claim that was granted: one item that says so, and then nothing until it is dropped.
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
