//! An engine whose KV blocks run out, and its faults then. A sequence holds one block for every 16 of its tokens. If it needs
//! another block and none is left, it releases its own and waits until all that it needs are free: it is preempted.

use std::num::NonZeroU32;
use std::sync::Arc;

use futures_util::StreamExt;
use genset_backend_common::output::{self, Finish, OutputWriter, TokenChunk};
use genset_backend_common::{
    EngineConfig, EngineError, ErrorKind, Output, OutputStream, TokenId, async_trait,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Mutant;
use super::fault::{Call, Fault, Inner, finish_of, with_fault};

/// Tokens per KV block.
const BLOCK_TOKENS: usize = 16;
/// The total number of KV blocks.
const BLOCKS: usize = 64;
/// The context length in tokens: half of what the KV blocks hold.
const CONTEXT_TOKENS: u32 = 512;
/// The number of concurrent sequences.
const SEQUENCES: u32 = 8;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "preempted-is-lost",
        stands_for: "a sequence that is taken out of the batch and put into no queue: its client waits for ever",
        killed_by: &["CC17", "SH14"],
        build: |clean, scenario| with_fault(clean, scenario, Paged::new(When::Loses)),
    },
    Mutant {
        name: "preempted-keeps-its-blocks",
        stands_for: "blocks of a preempted sequence that nobody counts as free again",
        killed_by: &["CC17", "SH14"],
        build: |clean, scenario| with_fault(clean, scenario, Paged::new(When::Leaks)),
    },
    Mutant {
        name: "holds-blocks-and-waits",
        stands_for: "sequences that each keep what they have and wait for one block more: nobody goes on",
        killed_by: &["CC17", "SH14"],
        build: |clean, scenario| with_fault(clean, scenario, Paged::new(When::HoldsAndWaits)),
    },
    Mutant {
        name: "preempted-begins-anew",
        stands_for: "a preempted sequence that is computed again from its prompt alone: its answer begins once more in the middle",
        killed_by: &["CC17"],
        build: |clean, scenario| with_fault(clean, scenario, Paged::new(When::BeginsAnew)),
    },
    Mutant {
        name: "preempted-reads-another-row",
        stands_for: "the first token after a preemption, chosen from a row of the batch that is another sequence's by then",
        killed_by: &["CC17"],
        build: |clean, scenario| with_fault(clean, scenario, Paged::new(When::ReadsAnotherRow)),
    },
    Mutant {
        name: "cut-where-blocks-run-out",
        stands_for: "an answer that ends as if it had come to its length, because a neighbour's was long",
        killed_by: &["CC17"],
        build: |clean, scenario| with_fault(clean, scenario, Paged::new(When::Cuts)),
    },
    Mutant {
        name: "fails-where-blocks-run-out",
        stands_for: "out of memory as an error of the request that asked for the last block",
        killed_by: &["CC17"],
        build: |clean, scenario| with_fault(clean, scenario, Paged::new(When::Fails)),
    },
];

/// Engines that continue when their blocks run out.
pub(super) const CONTROLS: &[Mutant] = &[
    Mutant {
        name: "preempts",
        stands_for: "a sequence gives up its blocks and goes on when others have ended",
        killed_by: &[],
        build: |clean, scenario| with_fault(clean, scenario, Paged::new(When::Preempts)),
    },
    Mutant {
        name: "reserves",
        stands_for: "a request waits until there are blocks for all that it may become",
        killed_by: &[],
        build: |clean, scenario| with_fault(clean, scenario, Paged::new(When::Reserves)),
    },
    Mutant {
        name: "refuses",
        stands_for: "a request is refused where there are no blocks for all that it may become",
        killed_by: &[],
        build: |clean, scenario| with_fault(clean, scenario, Paged::new(When::Refuses)),
    },
];

/// The behavior when no block is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Preempts,
    Reserves,
    Refuses,
    Loses,
    Leaks,
    HoldsAndWaits,
    BeginsAnew,
    ReadsAnotherRow,
    Cuts,
    Fails,
}

impl When {
    /// Whether a request holds all its blocks from the start.
    fn is_reserving(self) -> bool {
        matches!(self, Self::Reserves | Self::Refuses)
    }
}

struct Paged {
    when: When,
    blocks: Arc<Semaphore>,
}

impl Paged {
    fn new(when: When) -> Self {
        let blocks = Arc::new(Semaphore::new(BLOCKS));
        Self { when, blocks }
    }
}

#[async_trait]
impl Fault for Paged {
    fn declare(&self, config: &mut EngineConfig) {
        config.context_length_tokens = CONTEXT_TOKENS.min(config.context_length_tokens);
        config.kv_block_size = u32::try_from(BLOCK_TOKENS).ok().and_then(NonZeroU32::new);
        config.kv_total_blocks = u64::try_from(BLOCKS).ok();
        config.max_num_seqs = Some(SEQUENCES);
    }

    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let (mut request, ctx) = (call.request, call.ctx);
        let prompt_tokens = usize::try_from(ctx.prompt_tokens()).unwrap_or(usize::MAX);
        let max_tokens = request.max_tokens(CONTEXT_TOKENS);
        request.stop.max_tokens = Some(max_tokens);
        let most = usize::try_from(max_tokens).unwrap_or(usize::MAX);
        let mut sequence = Paging {
            when: self.when,
            blocks: Arc::clone(&self.blocks),
            held: None,
            tokens: prompt_tokens,
            given: Vec::new(),
            replayed: 0,
        };
        if self.when == When::Refuses {
            sequence.reserve(prompt_tokens + most)?;
        }
        let mut outputs = inner.generate(request, ctx.clone()).await?;
        Ok(output::stream(ctx, move |out| async move {
            let whole = prompt_tokens + most;
            let first = if sequence.when.is_reserving() {
                whole
            } else {
                prompt_tokens
            };
            sequence.wait_for(first).await;
            while let Some(item) = outputs.next().await {
                match item? {
                    Output::Tokens(chunk) => {
                        if let Some(end) = sequence.pass_on(&out, chunk).await? {
                            return Ok(end);
                        }
                    }
                    Output::Finished(finished) => return Ok(finish_of(*finished)),
                    other @ (Output::Text(_) | Output::Embeddings(_) | Output::Scores(_)) => {
                        return Err(EngineError::internal(format!("cannot pass on {other:?}")));
                    }
                }
            }
            Err(EngineError::internal("the engine within gave no terminal"))
        }))
    }
}

/// A sequence and its KV blocks.
struct Paging {
    when: When,
    blocks: Arc<Semaphore>,
    held: Option<OwnedSemaphorePermit>,
    /// The number of tokens so far, including the prompt.
    tokens: usize,
    given: Vec<TokenId>,
    /// How many tokens of the answer were sent again, for [`When::BeginsAnew`].
    replayed: usize,
}

fn blocks_for(tokens: usize) -> u32 {
    u32::try_from(tokens.div_ceil(BLOCK_TOKENS).min(BLOCKS)).unwrap_or(u32::MAX)
}

impl Paging {
    /// Acquires the blocks of `tokens` tokens now.
    fn reserve(&mut self, tokens: usize) -> Result<(), EngineError> {
        let blocks = Arc::clone(&self.blocks);
        let full = |_| EngineError::new(ErrorKind::Overloaded, "no KV blocks are left");
        self.held = Some(
            blocks
                .try_acquire_many_owned(blocks_for(tokens))
                .map_err(full)?,
        );
        Ok(())
    }

    /// Waits for the blocks of `tokens` tokens, unless blocks are held already.
    async fn wait_for(&mut self, tokens: usize) {
        if self.held.is_none() {
            let blocks = Arc::clone(&self.blocks);
            // The semaphore is never closed.
            self.held = blocks.acquire_many_owned(blocks_for(tokens)).await.ok();
        }
    }

    /// Passes tokens on once there are blocks for them; or returns how the answer ends.
    async fn pass_on(
        &mut self,
        out: &OutputWriter,
        mut chunk: TokenChunk,
    ) -> Result<Option<Finish>, EngineError> {
        self.tokens += chunk.token_ids.len();
        if !self.grow() {
            match self.when {
                When::Cuts => return Ok(Some(Finish::length())),
                When::Fails => return Err(EngineError::internal("out of KV blocks")),
                When::HoldsAndWaits => self.wait_for_one_more().await,
                When::Loses => {
                    self.held = None;
                    std::future::pending::<()>().await;
                }
                When::Leaks => {
                    self.held
                        .take()
                        .into_iter()
                        .for_each(OwnedSemaphorePermit::forget);
                    self.wait_for(self.tokens).await;
                }
                When::Preempts
                | When::Reserves
                | When::Refuses
                | When::BeginsAnew
                | When::ReadsAnotherRow => {
                    self.held = None;
                    self.wait_for(self.tokens).await;
                }
            }
            if self.when == When::ReadsAnotherRow {
                chunk.token_ids.iter_mut().for_each(|token| *token ^= 1);
            }
            if self.when == When::BeginsAnew {
                self.replayed = 1;
            }
        }
        self.give(out, chunk).await?;
        Ok(None)
    }

    async fn give(&mut self, out: &OutputWriter, mut chunk: TokenChunk) -> Result<(), EngineError> {
        for token in &mut chunk.token_ids {
            if self.replayed > 0 {
                *token = self.given.get(self.replayed - 1).copied().unwrap_or(*token);
                self.replayed += 1;
            }
            self.given.push(*token);
        }
        out.tokens(chunk).await
    }

    /// Whether there are blocks for all tokens; acquires a free one if needed.
    fn grow(&mut self) -> bool {
        let Some(held) = &mut self.held else {
            return false;
        };
        let missing = usize::try_from(blocks_for(self.tokens))
            .unwrap_or(usize::MAX)
            .saturating_sub(held.num_permits());
        let Ok(missing) = u32::try_from(missing) else {
            return false;
        };
        if missing == 0 {
            return true;
        }
        match Arc::clone(&self.blocks).try_acquire_many_owned(missing) {
            Ok(more) => {
                held.merge(more);
                true
            }
            Err(_) => false,
        }
    }

    async fn wait_for_one_more(&mut self) {
        let more = Arc::clone(&self.blocks).acquire_owned().await;
        if let (Some(held), Ok(more)) = (&mut self.held, more) {
            held.merge(more);
        }
    }
}
