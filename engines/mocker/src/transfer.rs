//! [`Transfers`]: the mocker's part in prefill and decode apart. No byte of a KV block is moved; the time it would take passes,
//! and blocks are held, fetched and freed as an engine's are.

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

/// What names held blocks.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Blocks {
    /// The hold's name, in hex digits.
    hold: String,
    /// Tokens of the prompt they are of.
    prompt_tokens: usize,
    /// Tokens that whoever fetches them has already.
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

/// The part an instance plays, and how blocks get to and from it. Clones share.
#[derive(Debug, Clone)]
pub(crate) struct Transfers {
    pub(crate) role: Role,
    door: KvTransfers,
    pub(crate) holds: KvHolds<HeldSequence>,
    /// Time of a token's blocks on their way.
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

    /// Nothing is offered any more, and nothing held.
    pub(crate) fn close(&self) {
        self.door.close();
        self.holds.clear();
    }

    /// Where a decode instance has its blocks from; `None` where it computes the prompt itself.
    ///
    /// # Errors
    /// `InvalidArgument` where the request does not say, or says what no mocker says.
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

    /// Holds the blocks of a prompt; the parameters they are fetched with.
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

    /// Fetches the blocks of a sequence once it has a place for them, and for as long.
    pub(crate) async fn fetch(
        self,
        mut transfer: TransferParams,
        place: oneshot::Receiver<ReceivingPlace>,
        commands: mpsc::WeakSender<Command>,
        ctx: RequestContext,
    ) -> Result<(), EngineError> {
        // Without one the sequence has ended, and its answer says how.
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
        // All but the last token, which is computed for what comes next.
        if cached_tokens.saturating_add(1) >= blocks.prompt_tokens {
            tell(&commands, id).await;
            // The other side lets go of what it holds, where it is still there.
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

/// Tells the rank that a sequence's blocks have come.
async fn tell(commands: &mpsc::WeakSender<Command>, id: SequenceId) {
    if let Some(commands) = commands.upgrade() {
        // A rank that has stopped ends the answer.
        drop(commands.send(Command::Received(id)).await);
    }
}

/// What a request of a prefill instance needs for its end.
#[derive(Debug)]
pub(crate) struct PrefillLeg {
    pub(crate) transfers: Transfers,
    pub(crate) request_id: String,
    pub(crate) prompt_tokens: usize,
}

/// Gives what is held, in the time that takes.
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
            .ok_or_else(|| KvTransfers::lost("they are held no more"))?;
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
