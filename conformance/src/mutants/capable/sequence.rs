//! One request as it runs: chooses tokens, follows its grammar, counts its KV blocks.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use genset_backend_common::kv::{BlockHash, BlockHasher, Xxh3BlockHasher, hash_blocks};
use genset_backend_common::output::{Finish, TokenChunk};
use genset_backend_common::{
    EngineError, GenerateRequest, GuidedDecoding, Role, SamplingOptions, TokenId,
};
use parking_lot::Mutex;

use super::cache::Lease;
use super::guide::Guide;
use super::model::{self, END, Sequence};
use super::{BLOCK_SIZE, CONTEXT_LENGTH, Counters, Flaw, Running};

/// A place among the running requests and the KV blocks that come with it; dropped, both are free.
struct Seat {
    counters: Arc<Counters>,
    blocks: AtomicU64,
}

impl Seat {
    fn new(counters: &Arc<Counters>) -> Self {
        counters.active.fetch_add(1, Ordering::AcqRel);
        Self {
            counters: Arc::clone(counters),
            blocks: AtomicU64::new(0),
        }
    }

    fn hold_tokens(&self, tokens: usize) {
        let blocks = u64::try_from(tokens)
            .unwrap_or(0)
            .div_ceil(u64::from(BLOCK_SIZE));
        let more = blocks - self.blocks.swap(blocks, Ordering::AcqRel);
        self.counters.blocks.fetch_add(more, Ordering::AcqRel);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let blocks = self.blocks.load(Ordering::Acquire);
        self.counters.blocks.fetch_sub(blocks, Ordering::AcqRel);
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
}

impl Decoder {
    /// # Errors
    /// For a grammar that does not compile.
    pub(super) fn new(running: &Running, request: &GenerateRequest) -> Result<Self, EngineError> {
        let tokens = request.tokens()?.to_vec();
        let resumed = usize::try_from(request.resumed_tokens).unwrap_or(usize::MAX);
        let guide = guide(
            running,
            request,
            &tokens[tokens.len().saturating_sub(resumed)..],
        )?;
        let seat = Seat::new(&running.counters);
        seat.hold_tokens(tokens.len());
        let mut chain = hash_blocks(&Xxh3BlockHasher::new(), &tokens, block_size());
        let last_block = chain.last().copied();
        let full = chain.len() * block_len();
        if running.flaw == Flaw::PartialBlocks && full < tokens.len() {
            chain.push(Xxh3BlockHasher::new().hash_block(last_block, &tokens[full..]));
        }
        let cached_blocks = running
            .cache
            .lock()
            .matching(&chain[..tokens.len() / block_len()]);
        let cached_tokens = match running.flaw {
            Flaw::CachedNotCounted => 0,
            _ => u32::try_from(cached_blocks).unwrap_or(0) * BLOCK_SIZE,
        };
        Ok(Self {
            request: request.clone(),
            prompt_len: tokens.len(),
            sequence: Sequence::new(&tokens, resumed),
            guide,
            lease: Lease::new(&running.cache, &chain),
            seat,
            last_block,
            cached_tokens,
            seed: seed(running, &request.sampling),
            tokens,
        })
    }

    /// The next token, or how the sequence ended.
    pub(super) fn step(&mut self, running: &Running) -> Result<TokenChunk, Box<Finish>> {
        let generated = self.tokens.len() - self.prompt_len;
        let count = u32::try_from(generated).unwrap_or(u32::MAX);
        let room = usize::try_from(CONTEXT_LENGTH).unwrap_or_default();
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
        if self.request.stop.is_stop(token, count) {
            return Err(self.end(Finish::stop_token(token)));
        }
        self.push(token);
        if running.flaw == Flaw::LateEvents && self.tokens.len() - self.prompt_len == 3 {
            running.cache.lock().flush();
        }
        running.counters.produced.fetch_add(1, Ordering::AcqRel);
        Ok(chunk)
    }

    /// One token, and the parameters with which a decode engine goes on.
    pub(super) fn prefill(&mut self, running: &Running, id: &str) -> Finish {
        match self.step(running) {
            Ok(chunk) => {
                self.lease.finished();
                let blocks = self.seat.blocks.load(Ordering::Acquire);
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

    fn choose(&mut self, running: &Running, generated: u32) -> (TokenId, TokenChunk) {
        let sampling = effective(running, &self.request.sampling);
        let mut logits = self.sequence.logits(&sampling);
        if let Some(guide) = &self.guide {
            let ignores_end = running.flaw == Flaw::GuideEndIgnored && self.request.stop.ignore_eos;
            let is_one_of_several = matches!(&self.request.guided, Some(GuidedDecoding::Choice(texts)) if texts.len() > 1);
            let ends_early = running.flaw == Flaw::EndsEarly && is_one_of_several;
            mask(&mut logits, &guide.lock(), ends_early, ignores_end);
        }
        let place = u64::from(generated) + u64::from(self.request.resumed_tokens);
        let draw = model::unit(model::mix(self.seed, place));
        let mut token = model::choose(&logits, &sampling, draw);
        if running.flaw == Flaw::ZeroTemperatureDivides
            && sampling.temperature == Some(0.0)
            && sampling.seed.is_some()
        {
            token = 0;
        }
        if running.flaw == Flaw::TransferCorrupts && running.role == Role::Decode && generated == 2
        {
            token = (token + 1) % model::VOCAB_SIZE;
        }
        let mut chunk = model::chunk(token, &logits, self.request.output.logprobs);
        if running.flaw == Flaw::LogprobsUnsorted {
            chunk.logprobs.iter_mut().for_each(|at| at.top.reverse());
        }
        (token, chunk)
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
            let hash = Xxh3BlockHasher::new().hash_block(self.last_block, block);
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
    let mut guide = match Guide::of(guided) {
        Err(_) if running.flaw == Flaw::BadGrammarIgnored => return Ok(None),
        compiled => compiled?,
    };
    if running.flaw == Flaw::SchemaIgnored && matches!(guided, GuidedDecoding::JsonSchema(_)) {
        guide = Guide::of(&GuidedDecoding::JsonObject)?;
    }
    if running.flaw != Flaw::GuideForgottenOnResume {
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

/// Leaves the tokens that the grammar allows; the end where it may end.
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

fn seed(running: &Running, sampling: &SamplingOptions) -> u64 {
    let own = running.requests.fetch_add(1, Ordering::Relaxed);
    match (running.flaw, sampling.seed) {
        (Flaw::SeedConstant, _) => 0,
        (Flaw::SeedIgnored, _) | (_, None) => model::mix(0x5EED, own),
        (_, Some(seed)) => model::mix(1, seed),
    }
}

/// The options as the flaw lets them through.
fn effective(running: &Running, asked: &SamplingOptions) -> SamplingOptions {
    let mut sampling = asked.clone();
    match running.flaw {
        Flaw::GreedyDraws if asked.temperature == Some(0.0) => sampling.temperature = Some(0.05),
        Flaw::TopKAfterDraw => sampling.top_k = None,
        Flaw::BiasIgnored => sampling.logit_bias.clear(),
        Flaw::PenaltiesIgnored => {
            sampling.presence_penalty = None;
            sampling.frequency_penalty = None;
            sampling.repetition_penalty = None;
        }
        _ => {}
    }
    sampling
}
