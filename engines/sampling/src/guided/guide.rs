//! [`Guide`]: the position of one sequence in its grammar.

use std::convert::identity;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use genset_backend_common::TokenId;
use llguidance::api::StopReason;
use llguidance::{TokenParser, panic_utils};

use super::compile::reason;
use super::error::GuideError;
use crate::mask::TokenMask;

/// The position of one sequence in its grammar.
///
/// # Contract
/// - For each token: [`mask`](Self::mask), sample, then [`accept`](Self::accept), unless a stop token ended the sequence.
/// - After `compile`, and after each `accept`, [`is_finished`](Self::is_finished) tells whether the sequence is over. Then
///   sample no more tokens; the request ends with `stop`.
/// - A sampled [`is_end`](Self::is_end) token also ends the sequence, whatever `ignore_eos` and `min_tokens` are; it is not
///   text. A sampler that knows the [`ends`](Self::ends) bans them until `min_tokens`.
/// - A guide is `Send`: masks may be computed on another thread during the forward pass.
pub struct Guide {
    state: State,
    /// The mask of the first token, until one is accepted.
    first: Option<TokenMask>,
    eos: Arc<[TokenId]>,
    vocab_size: usize,
}

enum State {
    Open(Box<TokenParser>),
    Finished,
    Failed(GuideError),
}

impl Guide {
    /// # Errors
    /// As [`mask`](Self::mask), for the first token.
    pub(super) fn try_new(
        parser: TokenParser,
        eos: Arc<[TokenId]>,
        vocab_size: usize,
    ) -> Result<Self, GuideError> {
        let mut guide = Self {
            state: State::Open(Box::new(parser)),
            first: None,
            eos,
            vocab_size,
        };
        guide.first = Some(guide.mask()?);
        Ok(guide)
    }

    /// Returns the tokens that may come next. It takes about 50 microseconds, at times some milliseconds. If the text is
    /// complete and cannot continue, only the end-of-sequence tokens are allowed.
    ///
    /// # Errors
    /// The grammar became too complex, or no token continues the text. The guide is unusable then.
    pub fn mask(&mut self) -> Result<TokenMask, GuideError> {
        if let Some(first) = &self.first {
            return Ok(first.clone());
        }
        let computed = match &mut self.state {
            State::Open(parser) => run(parser, TokenParser::compute_mask),
            State::Finished => {
                let mut mask = TokenMask::none(self.vocab_size);
                self.eos.iter().for_each(|token| mask.allow(*token));
                return Ok(mask);
            }
            State::Failed(error) => Err(error.clone()),
        };
        let allowed = computed.map_err(|error| self.fail(error))?;
        Ok(TokenMask::from_words(allowed.into(), self.vocab_size))
    }

    /// Records that `token` is the next one of the sequence.
    ///
    /// # Errors
    /// The grammar does not allow the token here, or became too complex. The guide is unusable then.
    pub fn accept(&mut self, token: TokenId) -> Result<(), GuideError> {
        self.first = None;
        let is_end = self.is_end(token);
        let accepted = match &mut self.state {
            State::Open(parser) => {
                run(parser, |parser| consume(parser, token, is_end)).and_then(identity)
            }
            State::Finished if is_end => Ok(true),
            State::Finished => Err(GuideError::NotAllowed { token }),
            State::Failed(error) => Err(error.clone()),
        };
        match accepted {
            Ok(true) => self.state = State::Finished,
            Ok(false) => {}
            Err(error) => return Err(self.fail(error)),
        }
        Ok(())
    }

    /// Whether the text is complete and cannot continue, or an end-of-sequence token was accepted.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        matches!(self.state, State::Finished)
    }

    /// The model's end-of-sequence tokens, for [`Sampler::with_ends`](crate::Sampler::with_ends).
    #[must_use]
    pub fn ends(&self) -> &[TokenId] {
        &self.eos
    }

    /// Whether `token` ends a guided sequence, as one of the model's end-of-sequence tokens.
    #[must_use]
    pub fn is_end(&self, token: TokenId) -> bool {
        self.eos.contains(&token)
    }

    fn fail(&mut self, error: GuideError) -> GuideError {
        self.state = State::Failed(error.clone());
        error
    }
}

/// Consumes `token`. Returns whether the text is over after it.
fn consume(
    parser: &mut TokenParser,
    token: TokenId,
    is_end: bool,
) -> anyhow::Result<Result<bool, GuideError>> {
    let is_allowed = if is_end {
        parser.is_accepting()
    } else {
        parser.validate_token(token)?
    };
    if !is_allowed {
        // A mask does not explore every token that it allows, so this one may reach a limit.
        return Ok(Err(match parser.parser.get_error() {
            Some(error) => GuideError::TooComplex {
                reason: reason(&error.message()),
            },
            None => GuideError::NotAllowed { token },
        }));
    }
    parser.consume_token(token)?;
    Ok(Ok(parser.check_stop()? || is_end))
}

/// Turns a panic in the grammar engine into an error of this guide.
fn run<T>(
    parser: &mut TokenParser,
    work: impl FnOnce(&mut TokenParser) -> anyhow::Result<T>,
) -> Result<T, GuideError> {
    let done = panic_utils::catch_unwind(AssertUnwindSafe(|| work(parser)));
    done.map_err(|error| {
        let reason = reason(&error);
        match parser.stop_reason() {
            StopReason::NoExtension | StopReason::NoExtensionBias => GuideError::DeadEnd,
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
                GuideError::TooComplex { reason }
            }
            StopReason::NotStopped
            | StopReason::MaxTokensTotal
            | StopReason::MaxTokensParser
            | StopReason::EndOfSentence
            | StopReason::InternalError
            | StopReason::Cancelled => GuideError::Failed { reason },
        }
    })
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Open(_) => "open",
            State::Finished => "finished",
            State::Failed(_) => "failed",
        };
        f.debug_struct("Guide")
            .field("state", &state)
            .finish_non_exhaustive()
    }
}
