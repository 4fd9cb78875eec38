//! A second clean engine. It declares what the sample engine cannot: every sampling option, log probabilities, guided decoding,
//! a prefix cache with KV events, prefill and decode roles. A `Flaw` makes it a broken one.
//!
//! It serves only the kit's own tests.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "a flaw matters in one place; everywhere else the engine is the clean one"
)]

mod cache;
mod guide;
mod model;
mod sequence;
mod transfer;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use genset_backend_common::output::{self, OutputStream};
use genset_backend_common::{
    Capabilities, DrainContext, EngineConfig, EngineControls, EngineError, EngineState,
    GenerateRequest, LLMEngine, RequestContext, Role, StartContext, TokenId, async_trait,
    config::{Deviation, GuidedKind, SamplingOption},
    transfer::KvTransfers,
};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::subject::{Scenario, Subject};
use cache::{PrefixCache, SharedCache};
use guide::Guide;
use sequence::Decoder;
use transfer::Counters;

/// Tokens per KV block.
const BLOCK_SIZE: u32 = 4;
/// The number of KV blocks in the prefix cache.
const TOTAL_BLOCKS: u32 = 128;
/// The context length in tokens, unless a test sets a smaller one.
const CONTEXT_LENGTH: u32 = 8192;
/// The maximum number of candidates that a request may ask for.
const MAX_LOGPROBS: u32 = 8;
/// The time per token.
const STEP: Duration = Duration::from_millis(1);

/// The fault of a broken engine. Its mutant says what it stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flaw {
    /// No fault.
    None,
    // Ends.
    BanListPadded,
    // Sampling.
    GreedyDraws,
    ZeroTemperatureDivides,
    SeedIgnored,
    SeedConstant,
    TopKAfterDraw,
    BiasIgnored,
    LogprobsUnsorted,
    PenaltiesIgnored,
    TopPIgnored,
    MinPIgnored,
    UnseededConstant,
    LogprobsFromTheBest,
    LogprobsOfCandidates,
    FrequencyCountsOnce,
    PresenceCountsEach,
    SeedsShareAGenerator,
    HottestForAll,
    BiasesForAll,
    LogprobsForAll,
    LogprobsAfterBias,
    RepetitionOverflows,
    OneCandidateTooMany,
    NucleusTooLarge,
    NucleusOfOne,
    /// Narrows the choice if a request does not set the option.
    NarrowsUnasked,
    /// Narrows the choice even if a request sets the neutral value.
    NarrowsAlways,
    MinPLostBesideTopK,
    MinPInAnotherBase,
    TemperatureIsOne,
    DrawsUneven,
    // Guided decoding.
    SchemaIgnored,
    EndsEarly,
    BadGrammarIgnored,
    TruncatedIsStop,
    GuideShared,
    GuideEndIgnored,
    HotUnguided,
    GuideForgottenOnResume,
    GrammarIgnored,
    // Continuing after another instance's tokens.
    ChoiceForgottenOnResume,
    SchemaForgottenOnResume,
    SeedRestartsOnResume,
    GuidedSeedRestartsOnResume,
    PenaltiesForgottenOnResume,
    PenaltiesForgottenByDraws,
    MinTokensTakenTwice,
    LogprobsShiftedOnResume,
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
    SaltIgnored,
    UnsaltedForAll,
    StoredTogether,
    // Prefill and decode.
    WrongSource,
    PrefillGoesOn,
    TransferOptional,
    TransferCorrupts,
    NoTtl,
    DrainLeavesTransfers,
    AbortIgnored,
    LostSourceIsInternal,
    FetchCopies,
    FetchedAgain,
    FetchedAfterLease,
    RefusedHolds,
    ReleaseIgnored,
    CancelledPrefillHolds,
    DroppedDecodeHolds,
    HoldsWhatHasEnded,
    DecodeDrawsAnew,
    // Cached tokens.
    OwnBlocksCached,
    // Rules of every stream.
    PaddingRanked,
    SampledWithoutLogprobs,
    StoresAfterClear,
    RushesAfterStall,
    // Declared deviations, and deviations that are not allowed.
    RoundsInCompany,
    DrawsRoundOnResume,
    GreedyRoundsOnResume,
    DecodeRounds,
    NoiseInCompany,
    PenaltiesCountPrompt,
}

/// The clean engine, for a factory.
#[must_use]
pub fn capable(_scenario: &Scenario) -> Subject {
    with_flaw(Flaw::None)
}

/// The clean engine with a context of `context_length_tokens`, which may be small.
#[must_use]
pub fn with_context(context_length_tokens: u32) -> Subject {
    built(Flaw::None, context_length_tokens, &[])
}

/// The engine with a flaw.
pub(super) fn with_flaw(flaw: Flaw) -> Subject {
    built(flaw, CONTEXT_LENGTH, &[])
}

/// The engine with a flaw and with declared deviations.
pub(super) fn deviating(flaw: Flaw, deviations: &'static [Deviation]) -> Subject {
    built(flaw, CONTEXT_LENGTH, deviations)
}

fn built(flaw: Flaw, context_length_tokens: u32, deviations: &'static [Deviation]) -> Subject {
    let counters = Arc::new(Counters::new(flaw));
    let engine = CapableEngine {
        flaw,
        context_length_tokens,
        deviations,
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

struct CapableEngine {
    flaw: Flaw,
    context_length_tokens: u32,
    deviations: &'static [Deviation],
    counters: Arc<Counters>,
    running: EngineState<Running>,
}

/// The state that `start` builds.
struct Running {
    flaw: Flaw,
    context_length_tokens: u32,
    role: Role,
    counters: Arc<Counters>,
    door: KvTransfers,
    cache: SharedCache,
    /// The number of requests so far, which seeds requests without a seed.
    requests: AtomicU64,
    /// The bits of the highest temperature so far, for [`Flaw::HottestForAll`].
    hottest: AtomicU32,
    /// The biases of the last request that had any, for [`Flaw::BiasesForAll`].
    biases: Mutex<BTreeMap<TokenId, f32>>,
    /// The log probabilities of the last request that asked for them, for [`Flaw::LogprobsForAll`].
    logprobs: Mutex<Option<u32>>,
    /// The guide that all requests share, for [`Flaw::GuideShared`].
    shared_guide: Arc<Mutex<Guide>>,
}

impl Running {
    /// Whether several requests run.
    fn has_company(&self) -> bool {
        self.counters.active.load(Ordering::Acquire) > 1
    }

    /// Temperatures are not negative, so their bits have the same order.
    fn note_heat(&self, temperature: Option<f32>) {
        let bits = temperature.unwrap_or(0.0).to_bits();
        self.hottest.fetch_max(bits, Ordering::AcqRel);
    }

    fn hottest(&self) -> Option<f32> {
        Some(f32::from_bits(self.hottest.load(Ordering::Acquire)))
    }
}

#[async_trait]
impl LLMEngine for CapableEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let running = Running {
            flaw: self.flaw,
            context_length_tokens: self.context_length_tokens,
            role: ctx.role,
            counters: Arc::clone(&self.counters),
            door: ctx.kv_transfers,
            cache: PrefixCache::shared(
                usize::try_from(TOTAL_BLOCKS).unwrap_or_default(),
                ctx.kv_events,
                self.flaw,
            ),
            requests: AtomicU64::new(0),
            hottest: AtomicU32::new(0),
            biases: Mutex::default(),
            logprobs: Mutex::default(),
            shared_guide: Arc::new(Mutex::new(Guide::End)),
        };
        let started = async {
            running.serve();
            Ok((running, ()))
        };
        self.running.start(started).await?;
        let mut config = EngineConfig::new("capable", self.context_length_tokens)
            .with_vocab_size(model::VOCAB_SIZE)
            .with_capabilities(capabilities().with_deviations(self.deviations.iter().copied()));
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
            decoder.receive(&running, &ctx).await?;
        }
        let id = ctx.id().to_owned();
        let early = running.hold_early(&request);
        Ok(output::stream(ctx, move |out| async move {
            let mut is_rushing = false;
            loop {
                if !is_rushing {
                    tokio::time::sleep(STEP).await;
                }
                if running.role == Role::Prefill {
                    running.counters.release(early);
                    return Ok(decoder.prefill(&running, &id));
                }
                match decoder.step(&running) {
                    Ok(chunk) => {
                        let given = Instant::now();
                        out.tokens(chunk).await?;
                        let has_stalled = given.elapsed() > STEP * 20;
                        is_rushing |= has_stalled && running.flaw == Flaw::RushesAfterStall;
                    }
                    Err(finish) => return Ok(*finish),
                }
            }
        }))
    }

    async fn abort(&self, ctx: &RequestContext) {
        if self.flaw != Flaw::AbortIgnored {
            self.counters.abort(ctx.id());
        }
    }

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        let fetched = async {
            while self.counters.held_blocks() > 0 {
                tokio::time::sleep(STEP).await;
            }
        };
        if self.flaw != Flaw::DrainLeavesTransfers {
            // Blocks not fetched by then are lost; their requests are sent again.
            let _ = tokio::time::timeout(ctx.deadline, fetched).await;
        }
        Ok(())
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        if let Some(running) = self.running.take() {
            running.door.close();
        }
        self.counters.clear();
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
    can.guided.extend([
        GuidedKind::JsonObject,
        GuidedKind::JsonSchema,
        GuidedKind::Regex,
        GuidedKind::Choice,
        GuidedKind::Grammar,
    ]);
    can
}
