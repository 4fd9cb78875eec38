//! Blocks between a prefill and a decode engine: held, fetched, freed. Also the probe's counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use genset_backend_common::{
    EngineError, GenerateRequest, RequestContext, RequestField, Role, async_trait,
    transfer::{KvBytes, KvSource, KvTransfers, TransferParams},
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Flaw, Running};
use crate::subject::Probe;

/// How long a prefill engine keeps blocks that are not fetched.
const LEASE: Duration = Duration::from_secs(30);
/// The data of a fetch if the blocks belong to the request, and if they belong to another request by now.
const BLOCKS: &[u8] = b"blocks";
const OTHER_BLOCKS: &[u8] = b"others";

/// The counters for the probe, and what the engine holds.
pub(super) struct Counters {
    flaw: Flaw,
    pub(super) active: AtomicU64,
    pub(super) produced: AtomicU64,
    pub(super) blocks: AtomicU64,
    handles: AtomicU64,
    holds: Mutex<Holds>,
}

#[derive(Default)]
struct Holds {
    held: Vec<Hold>,
    /// Handles of freed blocks that a flaw still serves.
    stale: Vec<u64>,
}

/// Blocks that a decode engine has not fetched yet.
struct Hold {
    handle: u64,
    request_id: String,
    blocks: u64,
    expires: Option<Instant>,
}

impl Counters {
    pub(super) fn new(flaw: Flaw) -> Self {
        Self {
            flaw,
            active: AtomicU64::new(0),
            produced: AtomicU64::new(0),
            blocks: AtomicU64::new(0),
            handles: AtomicU64::new(0),
            holds: Mutex::default(),
        }
    }

    fn hold(&self, request_id: &str, blocks: u64) -> u64 {
        let handle = self.handles.fetch_add(1, Ordering::Relaxed);
        let hold = Hold {
            handle,
            request_id: request_id.to_owned(),
            blocks,
            expires: (self.flaw != Flaw::NoTtl).then(|| Instant::now() + LEASE),
        };
        self.holds.lock().held.push(hold);
        handle
    }

    /// The blocks that wait for their fetch, without expired ones.
    pub(super) fn held_blocks(&self) -> u64 {
        let mut holds = self.holds.lock();
        let Holds { held, stale } = &mut *holds;
        held.retain(|hold| {
            let is_held = hold.expires.is_none_or(|expires| Instant::now() < expires);
            if !is_held && self.flaw == Flaw::FetchedAfterLease {
                stale.push(hold.handle);
            }
            is_held
        });
        held.iter().map(|hold| hold.blocks).sum()
    }

    /// The data for a handle.
    fn take(&self, handle: u64) -> Option<&'static [u8]> {
        self.held_blocks();
        let mut holds = self.holds.lock();
        let Some(place) = holds.held.iter().position(|hold| hold.handle == handle) else {
            return holds.stale.contains(&handle).then_some(OTHER_BLOCKS);
        };
        if self.flaw == Flaw::FetchCopies {
            return Some(BLOCKS);
        }
        holds.held.swap_remove(place);
        if self.flaw == Flaw::FetchedAgain {
            holds.stale.push(handle);
        }
        let is_corrupt = self.flaw == Flaw::TransferCorrupts;
        Some(if is_corrupt { OTHER_BLOCKS } else { BLOCKS })
    }

    pub(super) fn release(&self, handle: Option<u64>) {
        if let Some(handle) = handle {
            let mut holds = self.holds.lock();
            holds.held.retain(|hold| hold.handle != handle);
        }
    }

    pub(super) fn abort(&self, request_id: &str) {
        let mut holds = self.holds.lock();
        holds.held.retain(|hold| hold.request_id != request_id);
    }

    pub(super) fn clear(&self) {
        self.holds.lock().held.clear();
    }
}

impl Probe for Counters {
    fn active_requests(&self) -> Option<u64> {
        Some(self.active.load(Ordering::Acquire))
    }

    fn produced_tokens(&self) -> Option<u64> {
        Some(self.produced.load(Ordering::Acquire))
    }

    fn kv_used_blocks(&self) -> Option<u64> {
        Some(self.blocks.load(Ordering::Acquire) + self.held_blocks())
    }
}

fn handle_of(data: &Value) -> Option<u64> {
    data.get("handle").and_then(Value::as_u64)
}

fn bad(problem: &str) -> EngineError {
    EngineError::invalid_argument(RequestField::Transfer, problem)
}

/// Serves the blocks that a prefill engine holds.
struct Source(Arc<Counters>);

#[async_trait]
impl KvSource for Source {
    async fn fetch(&self, data: Value, _ctx: RequestContext) -> Result<KvBytes, EngineError> {
        let handle = handle_of(&data).ok_or_else(|| bad("these are not blocks of this engine"))?;
        let blocks = self.0.take(handle).map(Bytes::from_static);
        let piece = blocks.ok_or_else(|| KvTransfers::lost("they are no longer held"));
        Ok(Box::pin(stream::once(async { piece })))
    }

    fn release(&self, data: &Value) {
        if self.0.flaw != Flaw::ReleaseIgnored {
            self.0.release(handle_of(data));
        }
    }
}

impl Running {
    /// Registers the source of the held blocks.
    pub(super) fn serve(&self) {
        if self.role == Role::Prefill {
            self.door
                .serve(Arc::new(Source(Arc::clone(&self.counters))));
        }
    }

    /// Holds `blocks` for a decode engine.
    pub(super) fn hold(&self, request_id: &str, blocks: u64) -> TransferParams {
        let handle = self.counters.hold(request_id, blocks);
        let mut params = self.door.params(json!({ "handle": handle }));
        params.source_worker_id += u64::from(self.flaw == Flaw::WrongSource);
        params
    }

    /// Holds blocks of a prompt before it is computed, for [`Flaw::CancelledPrefillHolds`].
    pub(super) fn hold_early(&self, request: &GenerateRequest) -> Option<u64> {
        let is_early = self.flaw == Flaw::CancelledPrefillHolds && self.role == Role::Prefill;
        let blocks = request.prompt_tokens().map_or(0, u64::from);
        is_early.then(|| self.counters.hold("", blocks))
    }

    /// Fetches the blocks that a prefill engine holds. Returns whether they belong to the request.
    pub(super) async fn fetch(
        &self,
        transfer: Option<&TransferParams>,
        ctx: &RequestContext,
    ) -> Result<bool, EngineError> {
        let Some(transfer) = transfer else {
            if self.flaw == Flaw::TransferOptional {
                return Ok(true);
            }
            return Err(bad(
                "a decode instance needs the transfer parameters of a prefill instance",
            ));
        };
        if transfer.is_none() {
            return Ok(true);
        }
        if handle_of(&transfer.data).is_none() {
            return Err(bad("these are not the transfer parameters of this engine"));
        }
        let mut pieces = match self.door.fetch(transfer, ctx.child()).await {
            Err(_) if self.flaw == Flaw::LostSourceIsInternal => {
                return Err(EngineError::internal("no such worker"));
            }
            fetched => fetched?,
        };
        let mut is_right = true;
        while let Some(piece) = pieces.next().await {
            is_right &= piece? == BLOCKS;
        }
        Ok(is_right)
    }
}
