//! What the scheduler refuses.

use crate::sequence::SequenceId;

/// Why a sequence was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// Too many sequences wait already.
    #[error("{waiting} sequences wait already, and no more may")]
    QueueFull {
        /// How many wait.
        waiting: usize,
    },
    /// The prompt needs more KV blocks than there are.
    #[error(
        "a prompt of {prompt_tokens} tokens does not fit the KV cache, which holds {capacity_tokens}"
    )]
    NeverFits {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens that all KV blocks hold together.
        capacity_tokens: usize,
    },
    /// The prompt is longer than a step, and prompts are computed in one.
    #[error(
        "a prompt of {prompt_tokens} tokens does not fit a step of {step_tokens}, and prompts are not computed in chunks"
    )]
    ExceedsStep {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens of a step.
        step_tokens: usize,
    },
    /// There is nothing to compute.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The id is in use.
    #[error("sequence {0:?} is here already")]
    DuplicateId(SequenceId),
}

/// Why a scheduler cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LimitsError {
    /// A size is zero.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// A step could not hold one token of each running sequence.
    #[error(
        "max_num_batched_tokens ({max_num_batched_tokens}) must not be below max_num_seqs ({max_num_seqs}): \
         each running sequence computes a token a step"
    )]
    BudgetTooSmall {
        /// Tokens a step.
        max_num_batched_tokens: usize,
        /// Sequences a step.
        max_num_seqs: usize,
    },
    /// More blocks than a block id can name.
    #[error("there are too many KV blocks: {0}")]
    TooManyBlocks(usize),
}
