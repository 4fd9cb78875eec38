//! [`Fake`]: a model whose next token is a hash of all tokens before it, as it finds them in its KV blocks.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use genset_backend_common::{EngineConfig, EngineError, StartContext, TokenId};
use genset_sampling::guided::{GuideFactory, GuideLimits};
use genset_scheduler::Limits;
use parking_lot::Mutex;

use super::super::adapters::{AdapterLimits, Adapters, ReadAdapter};
use super::super::forward::{Forward, ForwardError};
use super::super::speculation::draft_model::DraftModel;
use super::super::speculation::{Method, Speculation};
use super::super::thread::{Loaded, Loader};
use super::super::{CandleEngine, capabilities};
use crate::load::AdapterError;
use crate::model::{AdapterRows, AdapterTarget, AdapterWeights, Site, StepBatch};

const VOCAB_SIZE: TokenId = 2048;
const CONTEXT_LENGTH: u32 = 2048;
/// Prompts that begin with one of these have NaN logits.
pub(super) const NAN_TOKENS: [TokenId; 4] = [2047, 2046, 2045, 2044];
/// Of `models/tiny-chat`.
const EOS: [TokenId; 2] = [2, 0];

pub(super) const TOKENIZER: &[u8] =
    include_bytes!("../../../../../models/tiny-chat/tokenizer.json");

static GUIDES: LazyLock<Arc<GuideFactory>> =
    LazyLock::new(|| Arc::new(GuideFactory::try_new(TOKENIZER, 2048, &EOS).unwrap()));

/// The settings of the fake model.
#[derive(Debug, Clone)]
pub(super) struct Fake {
    pub(super) num_blocks: usize,
    pub(super) block_size: usize,
    pub(super) limits: Limits,
    /// Answers depend on this number of last tokens alone, and run in cycles.
    pub(super) memory: Option<usize>,
    /// The source of drafts, and their number.
    pub(super) guesses: Option<(Guesser, usize)>,
    /// Grammars get so few lexer states that hardly any reaches its end.
    pub(super) has_small_grammars: bool,
    pub(super) switches: Arc<Switches>,
}

/// The source of drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Guesser {
    /// The sequence's own tokens.
    Ngram,
    /// A draft model that is wrong about one token in `wrong` (0: never wrong).
    Model { wrong: u64 },
    /// A draft model with a context of this many tokens.
    ShortModel(usize),
    /// A draft model that fails.
    Broken,
}

/// Controls for a test to change the running model.
#[derive(Debug, Default)]
pub(super) struct Switches {
    /// The number of next steps that fail.
    pub(super) failing_steps: AtomicU32,
    /// Whether failing steps panic.
    pub(super) panics: AtomicBool,
    /// Whether loading blocks until the start is given up.
    pub(super) loads_until_given_up: AtomicBool,
    /// A test that holds it blocks all steps.
    pub(super) gate: Mutex<()>,
}

impl Default for Fake {
    fn default() -> Self {
        Self {
            num_blocks: 256,
            block_size: 16,
            limits: Limits {
                max_num_seqs: 16,
                max_num_batched_tokens: 64,
                max_waiting: 256,
            },
            memory: None,
            guesses: None,
            has_small_grammars: false,
            switches: Arc::default(),
        }
    }
}

impl Fake {
    pub(super) fn engine(self) -> CandleEngine {
        CandleEngine::with_loader(Arc::new(self))
    }

    fn config(&self) -> EngineConfig {
        let mut config = EngineConfig::new("fake", CONTEXT_LENGTH)
            .with_vocab_size(VOCAB_SIZE)
            .with_capabilities(capabilities(Some(&GUIDES), false, true));
        config.kv_block_size = std::num::NonZeroU32::new(u32::try_from(self.block_size).unwrap());
        config.kv_total_blocks = u64::try_from(self.num_blocks).ok();
        config.max_num_seqs = u32::try_from(self.limits.max_num_seqs).ok();
        config.max_num_batched_tokens = u32::try_from(self.limits.max_num_batched_tokens).ok();
        config
    }
}

impl Fake {
    fn forward(&self, switches: Arc<Switches>) -> FakeForward {
        FakeForward {
            kept: vec![None; (self.num_blocks + 1) * self.block_size],
            block_size: self.block_size,
            memory: self.memory,
            wrong: 0,
            switches,
        }
    }

    fn guides(&self) -> Arc<GuideFactory> {
        if !self.has_small_grammars {
            return Arc::clone(&GUIDES);
        }
        let guides = GuideFactory::try_new(TOKENIZER, 2048, &EOS).unwrap();
        Arc::new(guides.with_limits(GuideLimits {
            lexer_states: 3,
            ..GuideLimits::default()
        }))
    }

    fn speculation(&self) -> Option<Speculation> {
        let (guesser, num_tokens) = self.guesses?;
        let mut forward = self.forward(Arc::default());
        let mut context_length = CONTEXT_LENGTH as usize;
        match guesser {
            Guesser::Ngram => {
                let method = Method::Ngram;
                return Some(Speculation { num_tokens, method });
            }
            Guesser::Model { wrong } => forward.wrong = wrong,
            Guesser::ShortModel(tokens) => context_length = tokens,
            Guesser::Broken => forward.switches.failing_steps.store(9, Ordering::Relaxed),
        }
        let vocab_size = VOCAB_SIZE as usize;
        let model = DraftModel::new(Box::new(forward), vocab_size, vocab_size, context_length);
        let method = Method::DraftModel(Box::new(model));
        Some(Speculation { num_tokens, method })
    }
}

impl Loader<Loaded> for Fake {
    fn load(
        &self,
        _start: &StartContext,
        was_given_up: &dyn Fn() -> bool,
    ) -> Result<Loaded, EngineError> {
        while self.switches.loads_until_given_up.load(Ordering::Relaxed) {
            if was_given_up() {
                return Err(EngineError::internal("given up"));
            }
            std::thread::yield_now();
        }
        Ok(Loaded {
            forward: Box::new(self.forward(Arc::clone(&self.switches))),
            speculation: self.speculation(),
            config: self.config(),
            limits: self.limits,
            num_blocks: self.num_blocks,
            block_size: self.block_size,
            guides: Some(self.guides()),
            kv_lease: Duration::from_secs(30),
            weights: None,
            adapters: Some(Arc::new(Adapters::new(
                Box::new(FakeAdapters),
                ADAPTER_LIMITS,
            ))),
        })
    }
}

pub(super) const ADAPTER_LIMITS: AdapterLimits = AdapterLimits {
    count: 3,
    bytes: 64 * 8,
};

/// Adapters that are distinguished by their size: `SIZE`, a number in place of a path, takes `SIZE + 1` tiles of 64 bytes.
struct FakeAdapters;

impl ReadAdapter for FakeAdapters {
    fn read(&self, path: &Path, left: u64) -> Result<AdapterWeights, AdapterError> {
        let size = path.to_str().and_then(|path| path.parse().ok());
        let size: usize = size.ok_or_else(|| AdapterError::NotAnAdapter {
            path: path.to_owned(),
            problem: "it is no number".into(),
        })?;
        let target = AdapterTarget {
            site: Site::Down,
            first_column: 0,
            out_features: 1,
            in_features: size,
        };
        let zeros = |shape| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
        let mut weights = AdapterWeights::new(1);
        weights
            .add(0, target, zeros((1, size)), zeros((1, 1)))
            .unwrap();
        let bytes = weights.bytes();
        if bytes > left {
            let path = path.to_owned();
            return Err(AdapterError::TooLarge { path, bytes, left });
        }
        Ok(weights)
    }
}

/// The stored value in place of a row's keys and values: the token, changed by the adapter.
fn kept(batch: &StepBatch, row: usize) -> TokenId {
    let has_row = |rows: &&AdapterRows| rows.rows.contains(&u32::try_from(row).unwrap());
    let adapter = batch.adapters.iter().find(has_row);
    let tiles = adapter.map_or(0, |adapter| adapter.weights.bytes() / 64);
    batch.tokens[row] + 4096 * TokenId::try_from(tiles).unwrap()
}

struct FakeForward {
    /// The token in each slot.
    kept: Vec<Option<TokenId>>,
    block_size: usize,
    memory: Option<usize>,
    /// Wrong once in this many times, as a draft model is.
    wrong: u64,
    switches: Arc<Switches>,
}

impl Forward for FakeForward {
    fn forward(&mut self, batch: &StepBatch) -> Result<Tensor, ForwardError> {
        drop(self.switches.gate.lock());
        let fails = |left: u32| left.checked_sub(1);
        if self
            .switches
            .failing_steps
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fails)
            .is_ok()
        {
            assert!(
                !self.switches.panics.load(Ordering::Relaxed),
                "the fake model panics as it was told to"
            );
            return Err("the fake model fails as it was told to".into());
        }
        for (row, slot) in batch.slots.iter().enumerate() {
            self.kept[usize::try_from(*slot)?] = Some(kept(batch, row));
        }
        let mut logits = Vec::new();
        for row in &batch.logit_rows {
            let row = usize::try_from(*row)?;
            let sequence = batch
                .sequences
                .iter()
                .find(|sequence| sequence.rows.contains(&row))
                .ok_or("no such row")?;
            let slot = |place: usize| {
                sequence.blocks[place / self.block_size] as usize * self.block_size
                    + place % self.block_size
            };
            let end = sequence.context_len - (sequence.rows.end - 1 - row);
            let context: Option<Vec<TokenId>> =
                (0..end).map(|place| self.kept[slot(place)]).collect();
            let context = context.ok_or("a slot was read before it was written")?;
            let mut row = logits_after(&context, self.memory);
            if self.wrong > 0 && (hash(&context) >> 7).is_multiple_of(self.wrong) {
                row[0] = 9.0;
            }
            logits.extend(row);
        }
        let shape = (batch.logit_rows.len(), VOCAB_SIZE as usize);
        Ok(Tensor::from_vec(logits, shape, &Device::Cpu)?)
    }
}

/// FNV-1a over the tokens.
fn hash(context: &[TokenId]) -> u64 {
    context.iter().fold(0xcbf2_9ce4_8422_2325, |hash, token| {
        (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[expect(clippy::cast_precision_loss, reason = "logits of a fake model")]
pub(super) fn logits_after(context: &[TokenId], memory: Option<usize>) -> Vec<f32> {
    if context.starts_with(&NAN_TOKENS) {
        return vec![f32::NAN; VOCAB_SIZE as usize];
    }
    let forgotten = memory.map_or(0, |tokens| context.len().saturating_sub(tokens));
    let hash = hash(&context[forgotten..]) >> 20;
    let mut logits: Vec<f32> = (0..u64::from(VOCAB_SIZE))
        .map(|token| ((hash ^ token) % 97) as f32 / 97.0)
        .collect();
    logits[best(hash)] = 4.0;
    logits[best(hash / 7919)] = 3.5;
    logits
}

fn best(hash: u64) -> usize {
    usize::try_from(hash % 2040).unwrap()
}

/// The greedy answer to a prompt.
pub(super) fn answer_to(prompt: &[TokenId], tokens: usize) -> Vec<TokenId> {
    answer_from(prompt, tokens, None)
}

/// The answer of a model with this [memory](Fake::memory).
pub(super) fn answer_from(
    prompt: &[TokenId],
    tokens: usize,
    memory: Option<usize>,
) -> Vec<TokenId> {
    let mut context = prompt.to_vec();
    for _ in 0..tokens {
        let logits = logits_after(&context, memory);
        let best = (0..logits.len())
            .rev()
            .max_by(|a, b| logits[*a].total_cmp(&logits[*b]))
            .unwrap();
        context.push(u32::try_from(best).unwrap());
    }
    context.split_off(prompt.len())
}
