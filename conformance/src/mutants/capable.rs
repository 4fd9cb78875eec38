//! A second clean engine, which declares what the sample engine cannot: every sampling option, log probabilities, guided
//! decoding, a prefix cache with KV events, prefill and decode roles. Its one `Flaw` makes it a broken one.
//!
//! It is a subject for the kit's own tests, not an engine for people.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "a flaw matters in one place; everywhere else the engine is the clean one"
)]

mod cache;
mod guide;
mod model;
mod sequence;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use genset_backend_common::output::{self, OutputStream};
use genset_backend_common::{
    Capabilities, DrainContext, EngineConfig, EngineControls, EngineError, EngineState, ErrorKind,
    GenerateRequest, GuidedKind, LLMEngine, RequestContext, Role, SamplingOption, StartContext,
    TokenId, TransferParams, async_trait,
};
use parking_lot::Mutex;
use serde_json::json;
use tokio::time::Instant;

use crate::subject::{Probe, Scenario, Subject};
use cache::{PrefixCache, SharedCache};
use guide::Guide;
use sequence::Decoder;

/// Tokens per KV block.
const BLOCK_SIZE: u32 = 4;
/// KV blocks that the prefix cache holds.
const TOTAL_BLOCKS: u32 = 128;
/// The most tokens of prompt and answer together.
const CONTEXT_LENGTH: u32 = 8192;
/// The most candidates a request may ask to see.
const MAX_LOGPROBS: u32 = 8;
/// How long a token takes.
const STEP: Duration = Duration::from_millis(1);
/// How long a prefill engine keeps the blocks that nobody fetches.
const TRANSFER_TTL: Duration = Duration::from_secs(30);

/// What a broken engine does wrong. Its mutant says what it stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flaw {
    /// Nothing.
    None,
    // Sampling.
    GreedyDraws,
    ZeroTemperatureDivides,
    SeedIgnored,
    SeedConstant,
    TopKAfterDraw,
    BiasIgnored,
    LogprobsUnsorted,
    PenaltiesIgnored,
    // Guided decoding.
    SchemaIgnored,
    EndsEarly,
    BadGrammarIgnored,
    TruncatedIsStop,
    GuideShared,
    GuideEndIgnored,
    GuideForgottenOnResume,
    // KV events.
    StopsPublishing,
    UnknownParent,
    RemovedBeforeStored,
    PartialBlocks,
    EventStorm,
    SilentClear,
    OtherBlockSize,
    CachedNotCounted,
    SilentEviction,
    AbandonedFreedSilently,
    LateEvents,
    // Prefill and decode.
    WrongSource,
    TransferOptional,
    TransferCorrupts,
    NoTtl,
    DrainLeavesTransfers,
    AbortIgnored,
    LostSourceIsInternal,
}

/// The clean engine, for a factory.
#[must_use]
pub fn capable(_scenario: &Scenario) -> Subject {
    with_flaw(Flaw::None)
}

/// The engine with a flaw.
pub(super) fn with_flaw(flaw: Flaw) -> Subject {
    let counters = Arc::new(Counters::default());
    let engine = CapableEngine {
        flaw,
        counters: Arc::clone(&counters),
        running: EngineState::new(),
    };
    Subject::new(engine)
        .with_probe(counters)
        .with_text(Arc::new(text))
}

fn text(tokens: &[TokenId]) -> String {
    let bytes: Vec<u8> = tokens
        .iter()
        .filter_map(|t| u8::try_from(*t).ok())
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What the engine counts for its probe.
#[derive(Default)]
struct Counters {
    active: AtomicU64,
    produced: AtomicU64,
    blocks: AtomicU64,
    holds: Mutex<BTreeMap<u64, Hold>>,
}

/// Blocks that a decode engine has not fetched yet.
struct Hold {
    request_id: String,
    blocks: u64,
    expires: Option<Instant>,
}

impl Counters {
    /// The blocks that wait to be fetched, less those that waited too long.
    fn held_blocks(&self) -> u64 {
        let mut holds = self.holds.lock();
        holds.retain(|_, hold| hold.expires.is_none_or(|expires| Instant::now() < expires));
        holds.values().map(|hold| hold.blocks).sum()
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

/// Where decode engines find prefill engines: the network of this process.
static NETWORK: LazyLock<Mutex<BTreeMap<u64, Weak<Counters>>>> = LazyLock::new(Mutex::default);
static HANDLES: AtomicU64 = AtomicU64::new(0);

struct CapableEngine {
    flaw: Flaw,
    counters: Arc<Counters>,
    running: EngineState<Running>,
}

/// What `start` makes.
struct Running {
    flaw: Flaw,
    role: Role,
    worker_id: u64,
    counters: Arc<Counters>,
    cache: SharedCache,
    /// Requests so far, from which those without a seed draw.
    requests: AtomicU64,
    /// The one guide of all requests, for [`Flaw::GuideShared`].
    shared_guide: Arc<Mutex<Guide>>,
}

impl Running {
    /// Keeps `blocks` for a decode engine.
    fn hold(&self, request_id: &str, blocks: u64) -> TransferParams {
        let handle = HANDLES.fetch_add(1, Ordering::Relaxed);
        let expires = (self.flaw != Flaw::NoTtl).then(|| Instant::now() + TRANSFER_TTL);
        let hold = Hold {
            request_id: request_id.to_owned(),
            blocks,
            expires,
        };
        self.counters.holds.lock().insert(handle, hold);
        NETWORK
            .lock()
            .insert(handle, Arc::downgrade(&self.counters));
        let wrong = u64::from(self.flaw == Flaw::WrongSource);
        TransferParams {
            source_worker_id: self.worker_id + wrong,
            data: json!({ "handle": handle }),
        }
    }

    /// Fetches the blocks that a prefill engine keeps.
    fn fetch(&self, transfer: Option<&TransferParams>) -> Result<(), EngineError> {
        let Some(transfer) = transfer else {
            if self.flaw == Flaw::TransferOptional {
                return Ok(());
            }
            let problem = "a decode instance needs the transfer parameters of a prefill instance";
            return Err(EngineError::invalid_argument("transfer", problem));
        };
        let handle = transfer
            .data
            .get("handle")
            .and_then(serde_json::Value::as_u64);
        let Some(handle) = handle else {
            let problem = "these are not the transfer parameters of this engine";
            return Err(EngineError::invalid_argument("transfer", problem));
        };
        let source = NETWORK
            .lock()
            .remove(&handle)
            .and_then(|source| source.upgrade());
        let fetched = source.and_then(|source| {
            source.held_blocks();
            source.holds.lock().remove(&handle)
        });
        match fetched {
            Some(_) => Ok(()),
            None if self.flaw == Flaw::LostSourceIsInternal => {
                Err(EngineError::internal("no such handle"))
            }
            None => Err(EngineError::new(
                ErrorKind::Disconnected,
                "the prefill instance does not have the blocks any more; send the request again",
            )),
        }
    }
}

#[async_trait]
impl LLMEngine for CapableEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let running = Running {
            flaw: self.flaw,
            role: ctx.role,
            worker_id: ctx.worker_id,
            counters: Arc::clone(&self.counters),
            cache: PrefixCache::shared(
                usize::try_from(TOTAL_BLOCKS).unwrap_or_default(),
                ctx.kv_events,
                self.flaw,
            ),
            requests: AtomicU64::new(0),
            shared_guide: Arc::new(Mutex::new(Guide::End)),
        };
        self.running.start(async { Ok(running) }).await?;
        let mut config = EngineConfig::new("capable", CONTEXT_LENGTH)
            .with_vocab_size(model::VOCAB_SIZE)
            .with_capabilities(capabilities());
        let scale = if self.flaw == Flaw::OtherBlockSize {
            2
        } else {
            1
        };
        config.kv_block_size = NonZeroU32::new(BLOCK_SIZE * scale);
        config.kv_total_blocks = Some(u64::from(TOTAL_BLOCKS));
        Ok(config)
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let running = self.running.get()?;
        let mut decoder = Decoder::new(&running, &request)?;
        if running.role == Role::Decode {
            running.fetch(request.transfer.as_ref())?;
        }
        let id = ctx.id().to_owned();
        Ok(output::stream(ctx, move |out| async move {
            loop {
                tokio::time::sleep(STEP).await;
                if running.role == Role::Prefill {
                    return Ok(decoder.prefill(&running, &id));
                }
                match decoder.step(&running) {
                    Ok(chunk) => out.tokens(chunk).await?,
                    Err(finish) => return Ok(*finish),
                }
            }
        }))
    }

    async fn abort(&self, ctx: &RequestContext) {
        if self.flaw != Flaw::AbortIgnored {
            let mut holds = self.counters.holds.lock();
            holds.retain(|_, hold| hold.request_id != ctx.id());
        }
    }

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        let fetched = async {
            while self.counters.held_blocks() > 0 {
                tokio::time::sleep(STEP).await;
            }
        };
        if self.flaw != Flaw::DrainLeavesTransfers {
            // What is not fetched by then is lost; its requests are sent again.
            let _ = tokio::time::timeout(ctx.deadline, fetched).await;
        }
        Ok(())
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        drop(self.running.take());
        self.counters.holds.lock().clear();
        Ok(())
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        Some(self)
    }
}

#[async_trait]
impl EngineControls for CapableEngine {
    async fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        self.running.get()?.cache.lock().clear();
        Ok(())
    }
}

fn capabilities() -> Capabilities {
    use SamplingOption::{FrequencyPenalty, LogitBias, PresencePenalty, RepetitionPenalty};
    let mut can = Capabilities::tokens()
        .with_point_mass_sampling()
        .with_sampling([
            PresencePenalty,
            FrequencyPenalty,
            RepetitionPenalty,
            LogitBias,
        ])
        .with_roles([Role::Aggregated, Role::Prefill, Role::Decode])
        .with_resume()
        .with_virtual_time();
    can.max_logprobs = Some(MAX_LOGPROBS);
    can.kv_events = true;
    can.guided = [
        GuidedKind::JsonObject,
        GuidedKind::JsonSchema,
        GuidedKind::Regex,
        GuidedKind::Choice,
    ]
    .into();
    can
}
