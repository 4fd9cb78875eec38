//! [`Transfers`]: disaggregated prefill and decode. KV blocks leave a prefill instance as bytes, and enter the cache of a
//! decode instance as the same bytes, so it continues as if it had computed them.
//!
//! The bytes of a sequence are those of its blocks, concatenated. The engine thread reads and writes them between its steps,
//! in [pieces](PIECE_BYTES). The sending side requests [several](PIECES_AHEAD) pieces ahead, so that a slow step does not
//! stall it, and the receiving side has [some](PIECES_WRITTEN) writes pending. This bounds the bytes in memory.

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use futures_util::{StreamExt, stream};
use genset_backend_common::{
    EngineError, GenerateRequest, RequestContext, RequestField, Role, async_trait,
    log_limit::OncePerMinute,
    transfer::{Held, KvBytes, KvHolds, KvSource, KvTransfers, TransferParams},
};
use genset_scheduler::{HeldSequence, ReceivingPlace, SequenceId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use super::core::Command;
use crate::model::KvLayout;

/// Bytes that one command reads from the cache or writes to it.
const PIECE_BYTES: usize = 1 << 20;

/// Pieces that a transfer requests ahead of those sent; fewer if many transfers are active.
pub(super) const PIECES_AHEAD: usize = 16;

/// Pieces that a transfer may always request ahead, however many transfers are active.
const LEAST_AHEAD: usize = 2;

/// Pieces that all transfers together may request beyond the least.
const ALL_AHEAD: usize = 64;

/// The most pending writes of a transfer.
const PIECES_WRITTEN: usize = 4;

/// Identifies held blocks.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Blocks {
    /// The hold's name, in hex digits.
    hold: String,
    /// The prompt's length in tokens.
    prompt_tokens: usize,
    /// The layout of their bytes.
    layout: KvLayout,
    /// Blocks that the fetching instance has already.
    #[serde(default)]
    cached_blocks: usize,
    /// The digest of the model's weights, in hex digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weights: Option<String>,
    /// The digest of the adapter's weights, in hex digits; `None` without an adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    adapter: Option<String>,
}

impl Blocks {
    fn read(data: &Value) -> Result<(Self, u64), EngineError> {
        let not_ours = || bad("these are not the transfer parameters of a candle engine");
        let blocks: Self = Deserialize::deserialize(data).map_err(|_| not_ours())?;
        let hold = u64::from_str_radix(&blocks.hold, 16).map_err(|_| not_ours())?;
        Ok((blocks, hold))
    }
}

/// The range of a prompt's bytes to fetch: those of all tokens but the last, which is computed for its logits, without the
/// blocks that are cached already.
fn bytes_of(layout: &KvLayout, prompt_tokens: usize, cached_blocks: usize) -> Range<usize> {
    let block = layout.block_bytes();
    let end = prompt_tokens.saturating_sub(1).div_ceil(layout.block_size);
    cached_blocks.min(end) * block..end * block
}

/// A number as instances exchange it and the log shows it.
pub(super) fn hex(number: u64) -> String {
    format!("{number:016x}")
}

fn bad(problem: impl std::fmt::Display) -> EngineError {
    EngineError::invalid_argument(RequestField::Transfer, problem)
}

/// The role of an instance, and how it sends and receives blocks. Clones share.
#[derive(Debug, Clone)]
pub(crate) struct Transfers {
    pub(crate) role: Role,
    door: KvTransfers,
    pub(crate) holds: KvHolds<HeldPrompt>,
    layout: Option<KvLayout>,
    /// The digest of the model's weights.
    weights: Option<u64>,
    /// Limits the log about blocks of other weights.
    logged: OncePerMinute,
}

/// A prompt whose blocks are held.
#[derive(Debug)]
pub(crate) struct HeldPrompt {
    sequence: HeldSequence,
    prompt_tokens: usize,
}

impl Transfers {
    /// # Errors
    /// `Unsupported` if the role transfers blocks but the cache does not expose their bytes.
    pub(crate) fn try_new(
        role: Role,
        door: KvTransfers,
        lease: Duration,
        layout: Option<KvLayout>,
        weights: Option<u64>,
    ) -> Result<Self, EngineError> {
        if role != Role::Aggregated && layout.is_none() {
            let problem = "prefill and decode can be done apart on the CPU only: the KV cache of a GPU gives out no blocks yet";
            return Err(EngineError::unsupported("role", problem));
        }
        Ok(Self {
            role,
            door,
            holds: KvHolds::new(lease),
            layout,
            weights,
            logged: OncePerMinute::default(),
        })
    }

    /// Offers the held blocks. `commands` go to the engine thread.
    pub(crate) fn serve(&self, commands: mpsc::WeakSender<Command>) {
        let Some(layout) = self.layout.clone().filter(|_| self.role == Role::Prefill) else {
            return;
        };
        let holds = self.holds.clone();
        self.door.serve(Arc::new(Source {
            holds,
            layout,
            commands,
            ahead: Arc::new(Semaphore::new(ALL_AHEAD)),
        }));
    }

    /// Withdraws all offers and releases all holds.
    pub(crate) fn close(&self) {
        self.door.close();
        self.holds.clear();
    }

    /// The source of a decode request's blocks; `None` if the instance computes the prompt itself. `adapter` is the digest of its
    /// adapter's weights.
    ///
    /// # Errors
    /// `InvalidArgument` if the request has no transfer parameters, or the blocks are of another layout, prompt or adapter, or of
    /// other weights.
    pub(crate) fn source_of(
        &self,
        request: &GenerateRequest,
        adapter: Option<u64>,
    ) -> Result<Option<TransferParams>, EngineError> {
        let Some(transfer) = request.blocks_to_fetch(self.role)? else {
            return Ok(None);
        };
        let (blocks, _) = Blocks::read(&transfer.data)?;
        if Some(&blocks.layout) != self.layout.as_ref() {
            let ours = self.layout.as_ref().map(ToString::to_string);
            return Err(bad(format!(
                "the prefill instance's KV blocks are {}, and those here {}",
                blocks.layout,
                ours.unwrap_or_default()
            )));
        }
        // Under one name, instances may have other weights while operators exchange a model's files.
        if blocks.weights != self.weights.map(hex) {
            return Err(self.other_weights(blocks.weights));
        }
        if blocks.prompt_tokens != request.tokens()?.len() {
            return Err(bad("the blocks are those of another prompt"));
        }
        // Under one name, instances may have different adapters while operators exchange them.
        if blocks.adapter != adapter.map(hex) {
            return Err(bad("the blocks are those of another adapter"));
        }
        Ok(Some(transfer.clone()))
    }

    /// The error for blocks that were computed with other weights. It is logged at most once a minute.
    fn other_weights(&self, theirs: Option<String>) -> EngineError {
        let theirs = theirs.unwrap_or_else(|| "unknown".into());
        let ours = self.weights.map(hex).unwrap_or_default();
        if let Some(unlogged) = self.logged.unlogged("weights") {
            tracing::warn!(
                theirs,
                ours,
                unlogged,
                "a prefill instance's KV blocks are of other weights and are not taken: its model files or its --quantize differ; further ones are only counted for a minute"
            );
        }
        bad(format!(
            "the prefill instance's KV blocks are of the weights {theirs}, and those here of {ours}"
        ))
    }

    /// Holds the blocks of a prompt, and returns the parameters to fetch them.
    pub(crate) fn hold(&self, leg: &PrefillLeg, sequence: HeldSequence) -> Option<TransferParams> {
        let layout = self.layout.clone()?;
        let held = HeldPrompt {
            sequence,
            prompt_tokens: leg.prompt_tokens,
        };
        let hold = self.holds.hold(&leg.request_id, held);
        let blocks = Blocks {
            hold: hex(hold),
            prompt_tokens: leg.prompt_tokens,
            layout,
            cached_blocks: 0,
            weights: self.weights.map(hex),
            adapter: leg.adapter.map(hex),
        };
        let data = serde_json::to_value(blocks).ok()?;
        Some(self.door.params(data))
    }

    /// Fetches the blocks of a sequence once it has a place for them. Stops if the sequence loses that place.
    pub(crate) async fn fetch(
        self,
        mut transfer: TransferParams,
        place: oneshot::Receiver<ReceivingPlace>,
        commands: mpsc::WeakSender<Command>,
        ctx: RequestContext,
    ) -> Result<(), EngineError> {
        // Without a place the sequence has ended, and its answer says how.
        let Ok(place) = place.await else {
            return Ok(());
        };
        let ReceivingPlace {
            id,
            cached_tokens,
            lost,
        } = place;
        let (blocks, _) = Blocks::read(&transfer.data)?;
        let cached_blocks = cached_tokens / blocks.layout.block_size;
        if let Value::Object(data) = &mut transfer.data {
            data.insert("cached_blocks".into(), cached_blocks.into());
        }
        let wanted = bytes_of(&blocks.layout, blocks.prompt_tokens, cached_blocks);
        if wanted.is_empty() {
            tell(&commands, Command::Received(id)).await;
            // The prefill instance releases its hold, if it still runs.
            if let Ok(mut pieces) = self.door.fetch(&transfer, ctx).await {
                drop(pieces.next().await);
            }
            return Ok(());
        }
        let received = pin!(self.receive(&transfer, id, wanted, &commands, ctx));
        match select(lost, received).await {
            // The sequence has ended, or computes its prompt itself.
            Either::Left(_) => Ok(()),
            Either::Right((received, _)) => received,
        }
    }

    /// Writes the bytes at `wanted` into the blocks of a sequence.
    async fn receive(
        &self,
        transfer: &TransferParams,
        id: SequenceId,
        wanted: Range<usize>,
        commands: &mpsc::WeakSender<Command>,
        ctx: RequestContext,
    ) -> Result<(), EngineError> {
        let mut pieces = self.door.fetch(transfer, ctx).await?;
        let mut next = wanted.start;
        let mut under_way = VecDeque::new();
        while let Some(piece) = pieces.next().await {
            let bytes = piece?;
            if bytes.is_empty() || bytes.len() > wanted.end - next {
                return Err(KvTransfers::lost("they have another length than announced"));
            }
            let (done, is_done) = oneshot::channel();
            let write = Command::Write {
                id,
                start: next,
                done,
                bytes: bytes.clone(),
            };
            next += bytes.len();
            if !tell(commands, write).await {
                return Ok(());
            }
            under_way.push_back((next, is_done));
            while let Some((end, before)) = under_way.front_mut()
                && next - *end >= PIECES_WRITTEN * PIECE_BYTES
            {
                // If the thread no longer takes the blocks, it also ends the answer.
                let _ = before.await;
                under_way.pop_front();
            }
        }
        if next != wanted.end {
            return Err(KvTransfers::lost("some are missing"));
        }
        tell(commands, Command::Received(id)).await;
        Ok(())
    }
}

/// Sends a command. Returns `false` if the thread is gone, in which case it has ended all answers.
async fn tell(commands: &mpsc::WeakSender<Command>, command: Command) -> bool {
    match commands.upgrade() {
        Some(commands) => commands.send(command).await.is_ok(),
        None => false,
    }
}

/// What a request on a prefill instance needs at its end.
#[derive(Debug)]
pub(crate) struct PrefillLeg {
    pub(crate) transfers: Transfers,
    pub(crate) request_id: String,
    pub(crate) prompt_tokens: usize,
    /// The digest of the adapter's weights; `None` without an adapter.
    pub(crate) adapter: Option<u64>,
}

/// Sends held blocks.
struct Source {
    holds: KvHolds<HeldPrompt>,
    layout: KvLayout,
    commands: mpsc::WeakSender<Command>,
    /// The permits for pieces of all transfers.
    ahead: Arc<Semaphore>,
}

/// An active transfer.
struct Sending {
    /// Dropping it frees the blocks.
    held: Held<HeldPrompt>,
    commands: mpsc::WeakSender<Command>,
    /// The offset of the next piece to request.
    next: usize,
    end: usize,
    /// The requested pieces, in order.
    asked: VecDeque<Asked>,
    ahead: Arc<Semaphore>,
}

/// A requested piece.
struct Asked {
    bytes: oneshot::Receiver<Bytes>,
    /// Its permit, if it is beyond the least.
    _room: Option<OwnedSemaphorePermit>,
}

impl Sending {
    /// Requests as many pieces as there is room for.
    async fn ask_ahead(&mut self) -> Result<(), EngineError> {
        while self.next < self.end && self.asked.len() < PIECES_AHEAD {
            let room = if self.asked.len() < LEAST_AHEAD {
                None
            } else {
                match Arc::clone(&self.ahead).try_acquire_owned() {
                    Ok(room) => Some(room),
                    Err(_) => break,
                }
            };
            let commands = self.commands.upgrade().ok_or_else(gone)?;
            let place = if self.asked.is_empty() {
                commands.reserve().await.map_err(|_| gone())?
            } else {
                // Pieces that were requested already must not wait for the rest.
                match commands.try_reserve() {
                    Ok(place) => place,
                    Err(TrySendError::Full(())) => break,
                    Err(TrySendError::Closed(())) => return Err(gone()),
                }
            };
            let end = self.end.min(self.next + PIECE_BYTES);
            let (reply, bytes) = oneshot::channel();
            place.send(Command::Read {
                id: self.held.value().sequence.id(),
                bytes: self.next..end,
                reply,
            });
            self.next = end;
            self.asked.push_back(Asked { bytes, _room: room });
        }
        Ok(())
    }

    async fn piece(mut self) -> Option<(Result<Bytes, EngineError>, Option<Self>)> {
        let piece = async {
            self.ask_ahead().await?;
            match self.asked.pop_front() {
                Some(asked) => asked.bytes.await.map(Some).map_err(|_| gone()),
                None => Ok(None),
            }
        };
        match piece.await {
            Ok(Some(piece)) => Some((Ok(piece), Some(self))),
            Ok(None) => None,
            Err(error) => Some((Err(error), None)),
        }
    }
}

fn gone() -> EngineError {
    KvTransfers::lost("their engine has stopped")
}

#[async_trait]
impl KvSource for Source {
    async fn fetch(&self, data: Value, _ctx: RequestContext) -> Result<KvBytes, EngineError> {
        let (blocks, hold) = Blocks::read(&data)?;
        let held = self
            .holds
            .take(hold)
            .ok_or_else(|| KvTransfers::lost("they are no longer held"))?;
        // The requester knows what it has cached, but nothing else about held blocks.
        let prompt_tokens = held.value().prompt_tokens;
        let Range { start, end } = bytes_of(&self.layout, prompt_tokens, blocks.cached_blocks);
        let sending = Sending {
            held,
            commands: self.commands.clone(),
            next: start,
            end,
            asked: VecDeque::new(),
            ahead: Arc::clone(&self.ahead),
        };
        let pieces = stream::unfold(Some(sending), |sending| async { sending?.piece().await });
        Ok(Box::pin(pieces))
    }

    fn release(&self, data: &Value) {
        if let Ok((_, hold)) = Blocks::read(data) {
            self.holds.release(hold);
        }
    }
}

#[cfg(test)]
mod tests;
