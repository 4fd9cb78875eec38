//! The items of a stream.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::context::{CancelReason, RequestContext};
use crate::error::EngineError;
use crate::request::TokenId;
use crate::transfer::TransferParams;

/// The token ids of one item; up to four are stored inline.
pub type TokenIds = SmallVec<[TokenId; 4]>;

/// One item of an [`OutputStream`](super::OutputStream).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Output {
    /// Generated tokens, at least one.
    Tokens(TokenChunk),
    /// Generated text, from engines that detokenize themselves.
    Text(TextChunk),
    /// One embedding for each input of an `Embed` request, in order.
    Embeddings(Vec<Vec<f32>>),
    /// One score for each pair of a `Score` request, in order. Finite; larger means more relevant.
    Scores(Vec<f32>),
    /// The terminal item.
    Finished(Box<Finished>),
}

impl Output {
    /// Returns whether this is the terminal item.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Finished(_))
    }

    /// Returns the terminal of a cancelled request that streamed this many tokens: `Finished` if its client cancelled or left.
    ///
    /// # Errors
    /// The error of any other reason.
    pub fn cancelled(
        ctx: &RequestContext,
        prompt_tokens: u32,
        streamed_tokens: u32,
    ) -> Result<Self, EngineError> {
        match ctx.cancel_reason().unwrap_or(CancelReason::Client) {
            CancelReason::Client => {
                let finished = Finish::cancelled().into_finished(prompt_tokens, streamed_tokens);
                Ok(Self::Finished(Box::new(finished)))
            }
            reason @ (CancelReason::Deadline
            | CancelReason::Shutdown
            | CancelReason::EngineDead) => Err(reason.to_error().with_request_id(ctx.id())),
        }
    }

    /// Returns the number of completion tokens in the item.
    #[must_use]
    pub fn token_count(&self) -> u32 {
        match self {
            Self::Tokens(chunk) => chunk.len(),
            Self::Text(chunk) => chunk.token_count,
            Self::Embeddings(_) | Self::Scores(_) => 0,
            Self::Finished(finished) => finished.last.len(),
        }
    }
}

impl From<TokenId> for Output {
    fn from(token: TokenId) -> Self {
        Self::Tokens(TokenChunk::from(token))
    }
}

/// Tokens that became ready together: one per decode step, several with speculative decoding.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokenChunk {
    /// The ids, in order.
    #[serde(deserialize_with = "super::token_ids::deserialize")]
    pub token_ids: TokenIds,
    /// One entry per token if log probabilities were requested, else empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenLogprob>,
}

impl TokenChunk {
    /// Returns the number of tokens.
    #[must_use]
    pub fn len(&self) -> u32 {
        u32::try_from(self.token_ids.len()).unwrap_or(u32::MAX)
    }

    /// Returns whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.token_ids.is_empty()
    }
}

impl From<TokenId> for TokenChunk {
    fn from(token: TokenId) -> Self {
        Self {
            token_ids: SmallVec::from_slice(&[token]),
            logprobs: Vec::new(),
        }
    }
}

impl FromIterator<TokenId> for TokenChunk {
    fn from_iter<I: IntoIterator<Item = TokenId>>(tokens: I) -> Self {
        Self {
            token_ids: tokens.into_iter().collect(),
            logprobs: Vec::new(),
        }
    }
}

/// The log probabilities at one position, in the model's own distribution: from its raw logits, before biases, penalties,
/// temperature and grammars.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// Natural logarithm of the chosen token's probability, at most 0.
    pub logprob: f32,
    /// The most probable tokens, best first; as many as were requested.
    #[serde(default)]
    pub top: Vec<TopLogprob>,
}

/// A candidate token and its log probability.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// The candidate.
    pub token_id: TokenId,
    /// Natural logarithm of its probability, at most 0.
    pub logprob: f32,
}

/// A piece of text and the number of tokens in it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextChunk {
    /// The text; never splits a code point.
    pub text: String,
    /// Completion tokens in it, as the engine counts them.
    pub token_count: u32,
}

crate::named! {
    /// Why a sequence ended.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum FinishReason {
        /// A stop or end-of-sequence token, or a natural end.
        Stop = "stop",
        /// `max_tokens` or the end of the context.
        Length = "length",
        /// The request was cancelled; the usage covers what was streamed.
        Cancelled = "cancelled",
        /// The engine's content filter ended it.
        ContentFilter = "content_filter",
    }
}

/// Tokens counted for billing. The total is computed, so it is always consistent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens streamed.
    pub completion_tokens: u32,
    /// Prompt tokens whose KV blocks were reused, at most `prompt_tokens`; `None` when the engine does not count them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u32>,
    /// Counts of speculative tokens; `None` when the engine does not speculate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predictions: Option<PredictionTokens>,
}

/// Draft tokens of speculative decoding, verified by the model. All of them were computed; `rejected` ones are not part of the
/// answer or its completion tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PredictionTokens {
    /// Draft tokens that the model also chose.
    pub accepted: u32,
    /// Draft tokens that it did not choose.
    pub rejected: u32,
}

impl PredictionTokens {
    /// Adds the counts of another answer.
    pub fn add(&mut self, other: Self) {
        self.accepted = self.accepted.saturating_add(other.accepted);
        self.rejected = self.rejected.saturating_add(other.rejected);
    }
}

impl Usage {
    /// Returns the sum of prompt and completion tokens.
    #[must_use]
    pub fn total_tokens(&self) -> u32 {
        self.prompt_tokens.saturating_add(self.completion_tokens)
    }
}

/// The terminal item: how the sequence ended, its usage, and the tokens that became ready at the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finished {
    /// Why it ended.
    pub reason: FinishReason,
    /// The tokens it used.
    pub usage: Usage,
    /// Tokens of the last step; may be empty.
    #[serde(default)]
    pub last: TokenChunk,
    /// The stop or end-of-sequence token that ended it; not part of the output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_token: Option<TokenId>,
    /// What a decode engine needs to continue; set by prefill engines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer: Option<TransferParams>,
}

/// How an engine ends a sequence; the helpers add the usage to make it a [`Finished`].
///
/// # Examples
/// ```
/// use genset_backend_common::output::{Finish, FinishReason};
///
/// let finish = Finish::stop_token(2).with_cached_tokens(64);
/// assert_eq!(finish.reason, FinishReason::Stop);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Finish {
    /// Why it ended.
    pub reason: FinishReason,
    /// Tokens that became ready at the end.
    pub last: TokenChunk,
    /// The token that ended it.
    pub stop_token: Option<TokenId>,
    /// Prompt tokens whose KV blocks were reused.
    pub cached_tokens: Option<u32>,
    /// Counts of speculative tokens.
    pub predictions: Option<PredictionTokens>,
    /// The prompt's length, from engines that tokenize themselves; other engines leave it to the context.
    pub prompt_tokens: Option<u32>,
    /// What a decode engine needs to continue.
    pub transfer: Option<TransferParams>,
}

impl Finish {
    fn new(reason: FinishReason) -> Self {
        Self {
            reason,
            last: TokenChunk::default(),
            stop_token: None,
            cached_tokens: None,
            predictions: None,
            prompt_tokens: None,
            transfer: None,
        }
    }

    /// The sequence ended naturally.
    #[must_use]
    pub fn stop() -> Self {
        Self::new(FinishReason::Stop)
    }

    /// A stop or end-of-sequence token ended it.
    #[must_use]
    pub fn stop_token(token: TokenId) -> Self {
        Self {
            stop_token: Some(token),
            ..Self::stop()
        }
    }

    /// `max_tokens` or the end of the context was reached.
    #[must_use]
    pub fn length() -> Self {
        Self::new(FinishReason::Length)
    }

    /// The request was cancelled. The helpers do this themselves; for hand-written streams.
    #[must_use]
    pub fn cancelled() -> Self {
        Self::new(FinishReason::Cancelled)
    }

    /// Adds the tokens of the last step.
    #[must_use]
    pub fn with_last(mut self, last: impl Into<TokenChunk>) -> Self {
        self.last = last.into();
        self
    }

    /// Adds the number of prompt tokens whose KV blocks were reused.
    #[must_use]
    pub fn with_cached_tokens(mut self, cached_tokens: u32) -> Self {
        self.cached_tokens = Some(cached_tokens);
        self
    }

    /// Adds the counts of speculative tokens.
    #[must_use]
    pub fn with_predictions(mut self, predictions: PredictionTokens) -> Self {
        self.predictions = Some(predictions);
        self
    }

    /// Sets the prompt's length, for engines that tokenize themselves.
    #[must_use]
    pub fn with_prompt_tokens(mut self, prompt_tokens: u32) -> Self {
        self.prompt_tokens = Some(prompt_tokens);
        self
    }

    /// Adds what a decode engine needs to continue.
    #[must_use]
    pub fn with_transfer(mut self, transfer: TransferParams) -> Self {
        self.transfer = Some(transfer);
        self
    }

    /// Builds the terminal item, given the number of tokens streamed before it.
    #[must_use]
    pub fn into_finished(self, prompt_tokens: u32, streamed_tokens: u32) -> Finished {
        let usage = Usage {
            prompt_tokens: self.prompt_tokens.unwrap_or(prompt_tokens),
            completion_tokens: streamed_tokens.saturating_add(self.last.len()),
            cached_tokens: self.cached_tokens,
            predictions: self.predictions,
        };
        Finished {
            reason: self.reason,
            usage,
            last: self.last,
            stop_token: self.stop_token,
            transfer: self.transfer,
        }
    }
}
