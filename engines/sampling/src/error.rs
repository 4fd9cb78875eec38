//! [`SampleError`]: why no token could be sampled. The request fails; the engine continues.

use genset_backend_common::{EngineError, TokenId};

/// Why no token could be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// A logit is not a number: the forward pass went wrong.
    #[error("the logit of token {token} is not a number")]
    NotANumber {
        /// The first token with such a logit.
        token: TokenId,
    },
    /// A logit is plus infinity: the forward pass overflowed.
    #[error("the logit of token {token} is infinite")]
    Infinite {
        /// The first token with such a logit.
        token: TokenId,
    },
    /// Every logit is minus infinity, after the mask and the ban of stop tokens.
    #[error("no token is possible: every logit is minus infinity")]
    NothingPossible,
    /// The row of logits and the vocabulary differ in length.
    #[error("{found} logits for a vocabulary of {expected}")]
    WrongLength {
        /// The vocabulary's size.
        expected: usize,
        /// The row's length.
        found: usize,
    },
    /// The mask and the vocabulary differ in length.
    #[error("a mask of {found} tokens for a vocabulary of {expected}")]
    WrongMaskLength {
        /// The vocabulary's size.
        expected: usize,
        /// The mask's length.
        found: usize,
    },
}

/// `Internal`: no client option can cause such logits.
impl From<SampleError> for EngineError {
    fn from(error: SampleError) -> Self {
        Self::internal(format!("sampling failed: {error}")).with_source(error)
    }
}
