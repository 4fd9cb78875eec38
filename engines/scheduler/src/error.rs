//! The scheduler's errors.

use crate::sequence::SequenceId;

/// Why the scheduler rejected a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// Too many sequences are waiting already.
    #[error("{waiting} sequences wait already, and no more may")]
    QueueFull {
        /// The number of waiting sequences.
        waiting: usize,
    },
    /// The prompt needs more KV blocks than the pool has.
    #[error(
        "a prompt of {prompt_tokens} tokens does not fit the KV cache, which holds {capacity_tokens}"
    )]
    NeverFits {
        /// The prompt's length, in tokens.
        prompt_tokens: usize,
        /// The capacity of all KV blocks together, in tokens.
        capacity_tokens: usize,
    },
    /// The prompt is longer than one step, and chunked prefill is off.
    #[error(
        "a prompt of {prompt_tokens} tokens does not fit a step of {step_tokens}, and prompts are not computed in chunks"
    )]
    ExceedsStep {
        /// The prompt's length, in tokens.
        prompt_tokens: usize,
        /// The size of a step, in tokens.
        step_tokens: usize,
    },
    /// The prompt is empty.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The id is in use.
    #[error("sequence {0:?} is here already")]
    DuplicateId(SequenceId),
}

/// Why a scheduler cannot be created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LimitsError {
    /// A size is zero.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// A step has no room for one token of each running sequence.
    #[error(
        "max_num_batched_tokens ({max_num_batched_tokens}) must not be below max_num_seqs ({max_num_seqs}): \
         each running sequence computes a token a step"
    )]
    BudgetTooSmall {
        /// Tokens per step.
        max_num_batched_tokens: usize,
        /// Sequences per step.
        max_num_seqs: usize,
    },
    /// There are more blocks than a block id can number.
    #[error("there are too many KV blocks: {0}")]
    TooManyBlocks(usize),
}
