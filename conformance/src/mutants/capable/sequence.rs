//! One running request: chooses tokens, follows its grammar, counts its KV blocks.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use genset_backend_common::kv::{BlockHash, hash_block, hash_blocks, salt_root};
use genset_backend_common::output::{Finish, TokenChunk, TokenLogprob};
use genset_backend_common::{
    EngineError, GenerateRequest, GuidedDecoding, RequestContext, Role, SamplingOptions, TokenId,
};
use parking_lot::Mutex;

use super::cache::Lease;
use super::guide::Guide;
use super::model::{self, END, Sequence};
use super::transfer::Counters;
use super::{BLOCK_SIZE, Flaw, Running};

/// How much a logit changes by another order of summation, by the same with sums rounded to 8 bits, and by a matrix read at a
/// wrong offset.
const ROUNDING: f32 = 0.002;
const COARSE_ROUNDING: f32 = 0.008;
const NOISE: f32 = 8.0;

/// A seat among the running requests, with its KV blocks. Dropping it frees both.
struct Seat {
    counters: Arc<Counters>,
    blocks: u64,
}

impl Seat {
    fn new(counters: &Arc<Counters>) -> Self {
        counters.active.fetch_add(1, Ordering::AcqRel);
        Self {
            counters: Arc::clone(counters),
            blocks: 0,
        }
    }

    /// Leaves the blocks counted forever.
    fn forget_blocks(&mut self) {
        self.blocks = 0;
    }

    fn hold_tokens(&mut self, tokens: usize) {
        let blocks = u64::try_from(tokens)
            .unwrap_or(0)
            .div_ceil(u64::from(BLOCK_SIZE));
        let more = blocks - std::mem::replace(&mut self.blocks, blocks);
        self.counters.blocks.fetch_add(more, Ordering::AcqRel);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.counters
            .blocks
            .fetch_sub(self.blocks, Ordering::AcqRel);
        self.counters.active.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The state of one request.
pub(super) struct Decoder {
    request: GenerateRequest,
    tokens: Vec<TokenId>,
    prompt_len: usize,
    sequence: Sequence,
    guide: Option<Arc<Mutex<Guide>>>,
    lease: Lease,
    seat: Seat,
    last_block: Option<BlockHash>,
    cached_tokens: u32,
    seed: u64,
    /// Whether its blocks belong to another request.
    is_corrupt: bool,
    /// Whether its blocks stay when it is dropped, as with [`Flaw::DroppedDecodeHolds`] before the first token.
    is_unread: bool,
}

impl Drop for Decoder {
    fn drop(&mut self) {
        if self.is_unread {
            self.seat.forget_blocks();
        }
    }
}

impl Decoder {
    /// # Errors
    /// Fails for a grammar that does not compile.
    pub(super) fn new(running: &Running, request: &GenerateRequest) -> Result<Self, EngineError> {
        let tokens = request.tokens()?.to_vec();
        let resumed = usize::try_from(request.resumed_tokens).unwrap_or(usize::MAX);
        let guide = guide(
            running,
            request,
            &tokens[tokens.len().saturating_sub(resumed)..],
        )?;
        let counted = match running.flaw {
            Flaw::PenaltiesForgottenOnResume => 0,
            Flaw::PenaltiesCountPrompt => tokens.len(),
            Flaw::PenaltiesForgottenByDraws if request.sampling.temperature > Some(0.0) => 0,
            _ => resumed,
        };
        running.note_heat(request.sampling.temperature);
        if !request.sampling.logit_bias.is_empty() {
            *running.biases.lock() = (*request.sampling.logit_bias).clone();
        }
        if request.output.logprobs.is_some() {
            *running.logprobs.lock() = request.output.logprobs;
        }
        let mut seat = Seat::new(&running.counters);
        seat.hold_tokens(tokens.len());
        let salt = request.cache_salt.as_deref();
        let salt = salt.filter(|_| running.flaw != Flaw::SaltIgnored);
        let root = salt.map(salt_root);
        let mut chain = hash_blocks(root, &tokens, block_size());
        let last_block = chain.last().copied().or(root);
        let full = chain.len() * block_len();
        if running.flaw == Flaw::PartialBlocks && full < tokens.len() {
            chain.push(hash_block(last_block, &tokens[full..]));
        }
        let mut cached_blocks = running
            .cache
            .lock()
            .matching(&chain[..tokens.len() / block_len()]);
        if running.flaw == Flaw::UnsaltedForAll {
            let unsalted = hash_blocks(None, &tokens, block_size());
            cached_blocks = cached_blocks.max(running.cache.lock().matching(&unsalted));
        }
        let cached_tokens = match running.flaw {
            Flaw::CachedNotCounted => 0,
            Flaw::OwnBlocksCached => {
                u32::try_from(tokens.len() / block_len()).unwrap_or(0) * BLOCK_SIZE
            }
            _ => u32::try_from(cached_blocks).unwrap_or(0) * BLOCK_SIZE,
        };
        Ok(Self {
            request: request.clone(),
            prompt_len: tokens.len(),
            sequence: Sequence::new(&tokens, counted),
            guide,
            lease: Lease::new(&running.cache, &chain),
            seat,
            last_block,
            cached_tokens,
            seed: seed(running, &request.sampling),
            tokens,
            is_corrupt: false,
            is_unread: false,
        })
    }

    /// Fetches the blocks of the prompt from the request's source.
    ///
    /// # Errors
    /// The error of the fetch.
    pub(super) async fn receive(
        &mut self,
        running: &Running,
        ctx: &RequestContext,
    ) -> Result<(), EngineError> {
        let fetched = running.fetch(self.request.transfer.as_ref(), ctx).await;
        if fetched.is_err() && running.flaw == Flaw::RefusedHolds {
            self.seat.forget_blocks();
        }
        self.is_corrupt = !fetched?;
        self.is_unread = running.flaw == Flaw::DroppedDecodeHolds;
        Ok(())
    }

    /// The next token, or how the sequence ended.
    pub(super) fn step(&mut self, running: &Running) -> Result<TokenChunk, Box<Finish>> {
        self.is_unread = false;
        let generated = self.tokens.len() - self.prompt_len;
        let count = u32::try_from(generated).unwrap_or(u32::MAX);
        let room = usize::try_from(running.context_length_tokens).unwrap_or_default();
        let is_full = self.request.stop.max_tokens.is_some_and(|max| count >= max);
        if is_full || self.tokens.len() >= room {
            let is_wrong = running.flaw == Flaw::TruncatedIsStop && self.guide.is_some();
            return Err(self.end(if is_wrong {
                Finish::stop()
            } else {
                Finish::length()
            }));
        }
        let (token, chunk) = self.choose(running, count);
        if self.guide.is_some() && token == END {
            return Err(self.end(Finish::stop_token(END)));
        }
        let resumed = match running.flaw {
            Flaw::MinTokensTakenTwice => self.request.resumed_tokens,
            _ => 0,
        };
        if self.request.stop.is_stop(token, count + resumed) {
            return Err(self.end(Finish::stop_token(token)));
        }
        self.push(token);
        if running.flaw == Flaw::LateEvents && self.tokens.len() - self.prompt_len == 3 {
            running.cache.lock().flush();
        }
        running.counters.produced.fetch_add(1, Ordering::AcqRel);
        Ok(chunk)
    }

    /// Returns one token, and the transfer parameters with which a decode engine continues.
    pub(super) fn prefill(&mut self, running: &Running, id: &str) -> Finish {
        match self.step(running) {
            Ok(mut chunk) => {
                self.lease.finished();
                let has_ended = self.request.stop.max_tokens == Some(1);
                if has_ended && running.flaw != Flaw::HoldsWhatHasEnded {
                    return Finish::length()
                        .with_last(chunk)
                        .with_cached_tokens(self.cached_tokens);
                }
                if running.flaw == Flaw::PrefillGoesOn
                    && let Ok(more) = self.step(running)
                {
                    chunk.token_ids.extend(more.token_ids);
                }
                let blocks = self.seat.blocks;
                Finish::length()
                    .with_last(chunk)
                    .with_cached_tokens(self.cached_tokens)
                    .with_transfer(running.hold(id, blocks))
            }
            Err(finish) => *finish,
        }
    }

    fn end(&mut self, finish: Finish) -> Box<Finish> {
        self.lease.finished();
        Box::new(finish.with_cached_tokens(self.cached_tokens))
    }

    /// The model's logits, which a batch may change.
    fn logits(&self, running: &Running, sampling: &SamplingOptions) -> Vec<f32> {
        let mut logits = self.sequence.logits(sampling);
        let is_resumed = self.request.resumed_tokens > 0;
        let is_drawn = self.request.sampling.temperature > Some(0.0);
        let noise = match running.flaw {
            Flaw::RoundsInCompany if running.has_company() => ROUNDING,
            Flaw::DrawsRoundOnResume if is_resumed && is_drawn => COARSE_ROUNDING,
            // This model's best tokens are closer to each other than a trained model's.
            Flaw::GreedyRoundsOnResume if is_resumed && !is_drawn => ROUNDING,
            Flaw::DecodeRounds if running.role == Role::Decode => COARSE_ROUNDING,
            Flaw::NoiseInCompany if running.has_company() => NOISE,
            _ => return logits,
        };
        self.sequence.add_noise(&mut logits, noise);
        logits
    }

    fn choose(&mut self, running: &Running, generated: u32) -> (TokenId, TokenChunk) {
        let sampling = effective(running, &self.request.sampling);
        let mut logits = self.logits(running, &sampling);
        let is_banning = generated < self.request.stop.min_tokens
            && !self.request.stop.stop_token_ids.len().is_multiple_of(4);
        if running.flaw == Flaw::BanListPadded && is_banning {
            logits[0] = f32::NEG_INFINITY;
        }
        if let Some(guide) = &self.guide {
            let ignores_end = running.flaw == Flaw::GuideEndIgnored && self.request.stop.ignore_eos;
            let is_one_of_several = matches!(self.request.guided.as_deref(), Some(GuidedDecoding::Choice(texts)) if texts.len() > 1);
            let ends_early = running.flaw == Flaw::EndsEarly && is_one_of_several;
            let is_hot = sampling.temperature > Some(0.0);
            if running.flaw != Flaw::HotUnguided || !is_hot || generated == 0 {
                mask(&mut logits, &guide.lock(), ends_early, ignores_end);
            }
        }
        let place = u64::from(generated) + u64::from(self.resumed_draws(running.flaw));
        let mut draw = model::unit(model::mix(self.seed, place));
        if running.flaw == Flaw::SeedsShareAGenerator && running.has_company() {
            draw = model::unit(model::mix(
                0,
                running.requests.fetch_add(1, Ordering::Relaxed),
            ));
        }
        if running.flaw == Flaw::DrawsUneven {
            draw *= draw;
        }
        let mut token = model::choose(&logits, &sampling, draw);
        if running.flaw == Flaw::ZeroTemperatureDivides
            && sampling.temperature == Some(0.0)
            && sampling.seed.is_some()
        {
            token = 0;
        }
        if self.is_corrupt && generated == 2 {
            token = (token + 1) % model::VOCAB_SIZE;
        }
        if running.flaw != Flaw::LogprobsAfterBias {
            logits = self.logits(running, &SamplingOptions::default());
        }
        let mut logprobs = self.request.output.logprobs;
        if running.flaw == Flaw::LogprobsForAll && running.has_company() {
            logprobs = *running.logprobs.lock();
        }
        let mut chunk = model::chunk(token, &logits, logprobs);
        if running.flaw == Flaw::LogprobsUnsorted {
            chunk.logprobs.iter_mut().for_each(|at| at.top.reverse());
        }
        let is_first = self.request.resumed_tokens > 0 && generated == 0;
        if running.flaw == Flaw::LogprobsShiftedOnResume && is_first {
            chunk.logprobs.iter_mut().for_each(|at| at.logprob -= 1.0);
        }
        chunk.logprobs.iter_mut().for_each(|at| match running.flaw {
            Flaw::LogprobsFromTheBest => shift(at, at.top.first().map_or(0.0, |top| top.logprob)),
            Flaw::LogprobsOfCandidates if !at.top.is_empty() => {
                shift(
                    at,
                    at.top.iter().map(|top| top.logprob.exp()).sum::<f32>().ln(),
                );
            }
            _ => {}
        });
        if running.flaw == Flaw::SampledWithoutLogprobs && sampling.temperature > Some(0.0) {
            chunk.logprobs.clear();
        }
        if running.flaw == Flaw::PaddingRanked {
            let worst = chunk.logprobs.iter_mut().filter_map(|at| at.top.get_mut(3));
            worst.for_each(|candidate| candidate.token_id = model::VOCAB_SIZE);
        }
        (token, chunk)
    }

    /// The number of draws before those of this engine.
    fn resumed_draws(&self, flaw: Flaw) -> u32 {
        match flaw {
            Flaw::SeedRestartsOnResume if self.guide.is_none() => 0,
            Flaw::GuidedSeedRestartsOnResume if self.guide.is_some() => 0,
            _ => self.request.resumed_tokens,
        }
    }

    fn push(&mut self, token: TokenId) {
        self.tokens.push(token);
        self.sequence.push(token, true);
        self.seat.hold_tokens(self.tokens.len());
        if let (Some(guide), Ok(byte)) = (&self.guide, u8::try_from(token)) {
            let mut guide = guide.lock();
            *guide = guide.after(byte);
        }
        if self.tokens.len().is_multiple_of(block_len()) {
            let block = &self.tokens[self.tokens.len() - block_len()..];
            let hash = hash_block(self.last_block, block);
            self.last_block = Some(hash);
            self.lease.extend(hash);
        }
    }
}

fn block_size() -> NonZeroU32 {
    NonZeroU32::new(BLOCK_SIZE).unwrap_or(NonZeroU32::MIN)
}

fn block_len() -> usize {
    usize::try_from(BLOCK_SIZE).unwrap_or(1)
}

fn guide(
    running: &Running,
    request: &GenerateRequest,
    resumed: &[TokenId],
) -> Result<Option<Arc<Mutex<Guide>>>, EngineError> {
    let Some(guided) = &request.guided else {
        return Ok(None);
    };
    let is_schema = matches!(**guided, GuidedDecoding::JsonSchema(_));
    let mut guide = match Guide::of(guided) {
        Err(_) if running.flaw == Flaw::BadGrammarIgnored => return Ok(None),
        compiled => compiled?,
    };
    if running.flaw == Flaw::SchemaIgnored && is_schema {
        guide = Guide::of(&GuidedDecoding::JsonObject)?;
    }
    let is_forgotten = match running.flaw {
        Flaw::GuideForgottenOnResume => true,
        Flaw::ChoiceForgottenOnResume => matches!(**guided, GuidedDecoding::Choice(_)),
        Flaw::SchemaForgottenOnResume => is_schema,
        Flaw::GrammarIgnored if matches!(**guided, GuidedDecoding::Grammar(_)) => return Ok(None),
        _ => false,
    };
    if !is_forgotten {
        for byte in resumed.iter().filter_map(|token| u8::try_from(*token).ok()) {
            guide = guide.after(byte);
        }
    }
    if running.flaw == Flaw::GuideShared {
        *running.shared_guide.lock() = guide;
        return Ok(Some(Arc::clone(&running.shared_guide)));
    }
    Ok(Some(Arc::new(Mutex::new(guide))))
}

/// Masks all tokens that the grammar does not allow; keeps the end where the text may end.
fn mask(logits: &mut [f32], guide: &Guide, ends_early: bool, ignores_end: bool) {
    let mut is_allowed = vec![false; logits.len()];
    let bytes = guide.next_bytes();
    if guide.may_end() || bytes.is_empty() || (ends_early && bytes.len() == 1) {
        if ignores_end && bytes.is_empty() {
            is_allowed[usize::from(b' ')] = true;
        } else {
            is_allowed[usize::try_from(END).unwrap_or_default()] = true;
        }
    }
    for byte in bytes {
        is_allowed[usize::from(byte)] = true;
    }
    for (logit, is_allowed) in logits.iter_mut().zip(is_allowed) {
        if !is_allowed {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// Subtracts `by` from the log probabilities of a position.
fn shift(at: &mut TokenLogprob, by: f32) {
    at.logprob = (at.logprob - by).min(0.0);
    for top in &mut at.top {
        top.logprob = (top.logprob - by).min(0.0);
    }
}

fn seed(running: &Running, sampling: &SamplingOptions) -> u64 {
    let own = running.requests.fetch_add(1, Ordering::Relaxed);
    match (running.flaw, sampling.seed) {
        (Flaw::SeedConstant, _) | (Flaw::UnseededConstant, None) => 0,
        (Flaw::SeedIgnored, _) | (_, None) => model::mix(0x5EED, own),
        (Flaw::DecodeDrawsAnew, Some(seed)) if running.role == Role::Decode => model::mix(2, seed),
        (_, Some(seed)) => model::mix(1, seed),
    }
}

/// A repetition penalty from which on [`Flaw::RepetitionOverflows`] computes NaN.
const OVERFLOWS: f32 = 100.0;

fn sum(one: Option<f32>, other: Option<f32>) -> Option<f32> {
    Some(one.unwrap_or(0.0) + other.unwrap_or(0.0))
}

/// The options after the flaw is applied.
fn effective(running: &Running, asked: &SamplingOptions) -> SamplingOptions {
    let mut sampling = asked.clone();
    match running.flaw {
        Flaw::GreedyDraws if asked.temperature == Some(0.0) => sampling.temperature = Some(0.05),
        Flaw::TopKAfterDraw => sampling.top_k = None,
        Flaw::BiasIgnored => sampling.logit_bias.clear(),
        Flaw::TopPIgnored => sampling.top_p = None,
        Flaw::MinPIgnored => sampling.min_p = None,
        Flaw::OneCandidateTooMany => {
            sampling.top_k = asked
                .top_k
                .map(|k| if k > 1 { k.saturating_add(1) } else { k });
        }
        Flaw::NucleusTooLarge => {
            sampling.top_p = asked.top_p.map(|p| if p > 0.01 { p.sqrt() } else { p });
        }
        Flaw::NucleusOfOne => {
            sampling.top_p = asked.top_p.map(|p| if p < 1.0 { 0.001 } else { p });
        }
        Flaw::NarrowsUnasked => {
            sampling.top_k = asked.top_k.or(Some(4));
            sampling.top_p = asked.top_p.or(Some(0.8));
            sampling.min_p = asked.min_p.or(Some(0.1));
        }
        Flaw::NarrowsAlways => {
            sampling.top_p = asked.top_p.filter(|p| *p < 1.0).or(Some(0.5));
        }
        Flaw::MinPLostBesideTopK if asked.top_k.is_some_and(|k| k < model::VOCAB_SIZE) => {
            sampling.min_p = None
        }
        Flaw::MinPInAnotherBase => {
            sampling.min_p = asked.min_p.map(|p| p.powf(std::f32::consts::LOG2_E));
        }
        Flaw::TemperatureIsOne if asked.temperature > Some(0.0) => sampling.temperature = Some(1.0),
        Flaw::FrequencyCountsOnce => {
            sampling.presence_penalty = sum(asked.presence_penalty, asked.frequency_penalty);
            sampling.frequency_penalty = None;
        }
        Flaw::PresenceCountsEach => {
            sampling.frequency_penalty = sum(asked.presence_penalty, asked.frequency_penalty);
            sampling.presence_penalty = None;
        }
        Flaw::RepetitionOverflows => {
            let overflows = |penalty: &f32| *penalty > OVERFLOWS;
            let is_over = asked.repetition_penalty.as_ref().is_some_and(overflows);
            sampling.repetition_penalty = if is_over {
                Some(f32::NAN)
            } else {
                asked.repetition_penalty
            };
        }
        Flaw::BiasesForAll if running.has_company() => {
            sampling.logit_bias = running.biases.lock().clone().into();
        }
        Flaw::HottestForAll if running.has_company() => sampling.temperature = running.hottest(),
        Flaw::PenaltiesIgnored => {
            sampling.presence_penalty = None;
            sampling.frequency_penalty = None;
            sampling.repetition_penalty = None;
        }
        _ => {}
    }
    sampling
}
