//! [`Transfers`]: the mocker's part in disaggregated prefill and decode. It moves no bytes of the KV cache. It waits for the
//! time that a transfer would take, and holds, fetches and frees blocks as an engine does.

use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use futures_util::{StreamExt, stream};
use genset_backend_common::{
    EngineError, GenerateRequest, RequestContext, RequestField, Role, async_trait,
    transfer::{Held, KvBytes, KvHolds, KvSource, KvTransfers, TransferParams},
};
use genset_scheduler::{HeldSequence, ReceivingPlace, SequenceId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use crate::args::MockerArgs;
use crate::rank::Command;
use crate::time::float;

/// Identifies held blocks.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Blocks {
    /// The hold's name, in hex digits.
    hold: String,
    /// The prompt's length in tokens.
    prompt_tokens: usize,
    /// Tokens that the fetching instance has already.
    #[serde(default)]
    cached_tokens: usize,
}

impl Blocks {
    fn read(data: &Value) -> Result<(Self, u64), EngineError> {
        let not_ours = || {
            let problem = "these are not the transfer parameters of a mocker";
            EngineError::invalid_argument(RequestField::Transfer, problem)
        };
        let blocks: Self = Deserialize::deserialize(data).map_err(|_| not_ours())?;
        let hold = u64::from_str_radix(&blocks.hold, 16).map_err(|_| not_ours())?;
        Ok((blocks, hold))
    }
}

/// The role of an instance, and how it sends and receives blocks. Clones share.
#[derive(Debug, Clone)]
pub(crate) struct Transfers {
    pub(crate) role: Role,
    door: KvTransfers,
    pub(crate) holds: KvHolds<HeldSequence>,
    /// Transfer time of one token's keys and values, in seconds.
    token_s: f64,
}

impl Transfers {
    pub(crate) fn new(role: Role, door: KvTransfers, args: &MockerArgs) -> Self {
        let bits = f64::from(args.kv_bytes_per_token) * 8.0;
        let transfers = Self {
            role,
            holds: KvHolds::new(args.kv_lease),
            token_s: bits / (args.kv_transfer_gbps * 1e9) / args.speedup_ratio,
            door,
        };
        if role == Role::Prefill {
            transfers.door.serve(std::sync::Arc::new(Source {
                holds: transfers.holds.clone(),
                token_s: transfers.token_s,
            }));
        }
        transfers
    }

    /// Withdraws all offers and releases all holds.
    pub(crate) fn close(&self) {
        self.door.close();
        self.holds.clear();
    }

    /// The source of a decode request's blocks; `None` if the instance computes the prompt itself.
    ///
    /// # Errors
    /// `InvalidArgument` if the request has no transfer parameters, or none of a mocker.
    pub(crate) fn source_of(
        &self,
        request: &GenerateRequest,
    ) -> Result<Option<TransferParams>, EngineError> {
        let Some(transfer) = request.blocks_to_fetch(self.role)? else {
            return Ok(None);
        };
        let (blocks, _) = Blocks::read(&transfer.data)?;
        if blocks.prompt_tokens != request.tokens()?.len() {
            let problem = "the blocks are those of another prompt";
            return Err(EngineError::invalid_argument(
                RequestField::Transfer,
                problem,
            ));
        }
        Ok(Some(transfer.clone()))
    }

    /// Holds the blocks of a prompt, and returns the parameters to fetch them.
    pub(crate) fn hold(&self, leg: &PrefillLeg, sequence: HeldSequence) -> TransferParams {
        let hold = self.holds.hold(&leg.request_id, sequence);
        let blocks = Blocks {
            hold: format!("{hold:016x}"),
            prompt_tokens: leg.prompt_tokens,
            cached_tokens: 0,
        };
        self.door
            .params(serde_json::to_value(blocks).unwrap_or_default())
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
        if let Value::Object(data) = &mut transfer.data {
            data.insert("cached_tokens".into(), cached_tokens.into());
        }
        let (blocks, _) = Blocks::read(&transfer.data)?;
        // All but the last token, which is computed for its logits.
        if cached_tokens.saturating_add(1) >= blocks.prompt_tokens {
            tell(&commands, id).await;
            // The prefill instance releases its hold, if it still runs.
            if let Ok(mut pieces) = self.door.fetch(&transfer, ctx).await {
                drop(pieces.next().await);
            }
            return Ok(());
        }
        let received = pin!(self.receive(&transfer, id, &commands, ctx));
        match select(lost, received).await {
            // The sequence has ended, or computes its prompt itself.
            Either::Left(_) => Ok(()),
            Either::Right((received, _)) => received,
        }
    }

    async fn receive(
        &self,
        transfer: &TransferParams,
        id: SequenceId,
        commands: &mpsc::WeakSender<Command>,
        ctx: RequestContext,
    ) -> Result<(), EngineError> {
        let mut pieces = self.door.fetch(transfer, ctx).await?;
        while let Some(piece) = pieces.next().await {
            piece?;
        }
        tell(commands, id).await;
        Ok(())
    }
}

/// Notifies the rank that a sequence's blocks have arrived.
async fn tell(commands: &mpsc::WeakSender<Command>, id: SequenceId) {
    if let Some(commands) = commands.upgrade() {
        // A rank that has stopped ends the answer.
        drop(commands.send(Command::Received(id)).await);
    }
}

/// What a request on a prefill instance needs at its end.
#[derive(Debug)]
pub(crate) struct PrefillLeg {
    pub(crate) transfers: Transfers,
    pub(crate) request_id: String,
    pub(crate) prompt_tokens: usize,
}

/// Sends held blocks, in the time that a transfer takes.
struct Source {
    holds: KvHolds<HeldSequence>,
    token_s: f64,
}

#[async_trait]
impl KvSource for Source {
    async fn fetch(&self, data: Value, _ctx: RequestContext) -> Result<KvBytes, EngineError> {
        let (blocks, hold) = Blocks::read(&data)?;
        let held: Held<HeldSequence> = self
            .holds
            .take(hold)
            .ok_or_else(|| KvTransfers::lost("they are no longer held"))?;
        let tokens = blocks.prompt_tokens.saturating_sub(blocks.cached_tokens);
        let takes = Duration::from_secs_f64(self.token_s * float(tokens));
        let on_its_way = async move {
            tokio::time::sleep(takes).await;
            drop(held);
            Ok(Bytes::from_static(b"blocks"))
        };
        Ok(Box::pin(stream::once(on_its_way)))
    }

    fn release(&self, data: &Value) {
        if let Ok((_, hold)) = Blocks::read(data) {
            self.holds.release(hold);
        }
    }
}
