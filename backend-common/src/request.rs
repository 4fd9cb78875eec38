//! [`GenerateRequest`]: the input of an engine for one sequence.
//!
//! The frontend builds it, the Worker's adapter checks it against the engine's declaration, and the engine reads it. One request
//! is one sequence: the frontend turns a client's `n` into `n` requests.

mod media;
mod resuming;
mod shared;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use media::{MAX_MEDIA, Media, MediaError, MediaFormat, MediaKind, Part, PartPlace};
pub use resuming::NotResumable;
pub use shared::Shared;

use crate::config::GuidedKind;
use crate::error::{EngineError, RequestField};
use crate::transfer::TransferParams;

/// A token's id in the model's vocabulary, in `0..vocab_size`.
pub type TokenId = u32;

/// The longest [`GenerateRequest::cache_salt`], in bytes.
pub const MAX_CACHE_SALT_BYTES: usize = 256;

/// One sequence to generate, or one batch of inputs to embed or of pairs to score.
///
/// Build it with [`GenerateRequest::from_tokens`] (or `from_text`, `from_chat`) and set the fields that differ. A clone is cheap
/// however long the prompt is: large parts are [`Shared`].
///
/// # Examples
/// ```
/// use genset_backend_common::GenerateRequest;
///
/// let mut request = GenerateRequest::from_tokens("tiny-chat", vec![1, 2, 3]);
/// request.stop.max_tokens = Some(16);
/// assert_eq!(request.prompt_tokens(), Some(3));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    /// The served model's name, as the client wrote it.
    pub model: String,
    /// The input to process.
    pub input: Input,
    /// When to stop.
    #[serde(default)]
    pub stop: StopConditions,
    /// How to choose tokens.
    #[serde(default)]
    pub sampling: SamplingOptions,
    /// What to return beside the tokens.
    #[serde(default)]
    pub output: OutputOptions,
    /// A grammar the output must follow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guided: Option<Shared<GuidedDecoding>>,
    /// Scheduling priority; larger values run first. Engines that do not declare `priority` refuse any value except 0.
    #[serde(default)]
    pub priority: i32,
    /// Requests share KV blocks only if they have the same salt, or none. It isolates tenants, and is part of the
    /// [first block's hash](crate::kv::hash_blocks). At most [`MAX_CACHE_SALT_BYTES`]. An engine without a prefix cache ignores
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// The name of a LoRA adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Where a decode engine finds the KV blocks from a prefill engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer: Option<TransferParams>,
    /// The number of tokens at the end of the prompt that another instance generated before a migration. The router counts them
    /// toward `max_tokens` and `min_tokens`; the engine does not.
    #[serde(default)]
    pub resumed_tokens: u32,
    /// The data-parallel rank that must serve the request, below the engine's `data_parallel_size`; `None` lets the engine
    /// choose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_parallel_rank: Option<u32>,
    /// The client's free-form values, passed to the engine unchanged.
    #[serde(default, skip_serializing_if = "has_no_entries")]
    pub annotations: Shared<BTreeMap<String, Value>>,
}

/// The task a request carries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Input {
    /// Prompt token ids: the usual case.
    Tokens(Shared<Vec<TokenId>>),
    /// Text, for engines that tokenize themselves.
    Text(Shared<String>),
    /// Chat messages, for engines that apply their own template.
    Chat(Shared<ChatInput>),
    /// Token sequences to embed, one embedding each.
    Embed(Shared<Vec<Vec<TokenId>>>),
    /// Pairs of texts to score by a cross-encoder, one score each.
    Score(Shared<Vec<ScorePair>>),
}

/// Two texts as one token sequence, combined by the model's tokenizer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScorePair {
    /// The tokens of both texts, with the special tokens around and between them; at least one.
    pub token_ids: Vec<TokenId>,
    /// The number of leading tokens of the first type (BERT's token type 0); the rest are of the second. At most all. Models
    /// without token types ignore it.
    pub first_tokens: u32,
}

/// A conversation in the OpenAI shape, for engines that apply their own template.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChatInput {
    /// The messages, oldest first, each an object with at least `role`. If `content` is a list, its parts are of type `text`,
    /// `image_url` with a `data:` URL, and `input_audio`: [`Media`] reads them.
    pub messages: Vec<Value>,
    /// The tools the model may call.
    pub tools: Vec<Value>,
}

/// When generation ends. The reason is reported in the terminal item.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StopConditions {
    /// The most tokens to generate, at least 1; `None` for as many as the context holds. A value beyond the context's room is
    /// capped, not refused: the sequence ends with `Length` at the end of the context. A Worker fills it in for a prompt of token
    /// ids. For text and chat it may be `None`: only the engine knows the prompt's length.
    pub max_tokens: Option<u32>,
    /// The fewest tokens to generate before a stop token may end the sequence.
    pub min_tokens: u32,
    /// Token ids that end the sequence. The token itself is not part of the output.
    pub stop_token_ids: Shared<Vec<TokenId>>,
    /// The model's end-of-sequence ids, filled in by the frontend. They act as `stop_token_ids` unless `ignore_eos`.
    pub eos_token_ids: Shared<Vec<TokenId>>,
    /// Continue past end-of-sequence tokens, and stream them like any other.
    pub ignore_eos: bool,
}

impl StopConditions {
    /// Returns the most tokens to generate if the context has room for `room`.
    #[must_use]
    pub fn max_tokens_within(&self, room: u32) -> u32 {
        self.max_tokens.map_or(room, |asked| asked.min(room))
    }

    /// Returns whether `token`, as completion token number `generated` (counted from 0), ends the sequence.
    #[must_use]
    pub fn is_stop(&self, token: TokenId, generated: u32) -> bool {
        generated >= self.min_tokens
            && (self.stop_token_ids.contains(&token)
                || (!self.ignore_eos && self.eos_token_ids.contains(&token)))
    }
}

/// How to choose tokens. `None` means the engine's default, which is greedy unless its documentation says otherwise.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingOptions {
    /// Divides the logits; 0 is greedy. Finite, `0.0..=2.0`.
    pub temperature: Option<f32>,
    /// Nucleus sampling: the smallest set of tokens with this probability. `0.0 < p <= 1.0`.
    pub top_p: Option<f32>,
    /// Keep the k most probable tokens; at least 1. `u32::MAX` is no limit, whatever the engine's default is.
    pub top_k: Option<u32>,
    /// Keep tokens at least this probable relative to the best one. `0.0..=1.0`.
    pub min_p: Option<f32>,
    /// Subtracted once from the logit of each token already generated. `-2.0..=2.0`.
    pub presence_penalty: Option<f32>,
    /// Subtracted from a token's logit for each time it was generated. `-2.0..=2.0`.
    pub frequency_penalty: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output. `> 0.0`; 1 has no effect. An engine
    /// with a limit refuses larger values as `InvalidArgument` for this field.
    pub repetition_penalty: Option<f32>,
    /// Added to the logits, `-100.0..=100.0` each.
    #[serde(skip_serializing_if = "has_no_entries")]
    pub logit_bias: Shared<BTreeMap<TokenId, f32>>,
    /// Makes sampling repeatable.
    pub seed: Option<u64>,
}

/// What to return beside the tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OutputOptions {
    /// Log probabilities: the chosen token's, and this many of the most probable (0 for the chosen one alone).
    pub logprobs: Option<u32>,
    /// Log probabilities of the prompt's tokens, as for `logprobs`.
    pub prompt_logprobs: Option<u32>,
}

/// A grammar for the output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuidedDecoding {
    /// Any JSON object.
    JsonObject,
    /// JSON that validates against this schema.
    JsonSchema(Value),
    /// Text that matches this regular expression from end to end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A context-free grammar in the engine's documented notation.
    Grammar(String),
}

impl GuidedDecoding {
    /// The ability that an engine must declare to enforce it.
    #[must_use]
    pub const fn kind(&self) -> GuidedKind {
        match self {
            Self::JsonObject => GuidedKind::JsonObject,
            Self::JsonSchema(_) => GuidedKind::JsonSchema,
            Self::Regex(_) => GuidedKind::Regex,
            Self::Choice(_) => GuidedKind::Choice,
            Self::Grammar(_) => GuidedKind::Grammar,
        }
    }
}

impl GenerateRequest {
    /// Creates a request on prompt tokens, with default options.
    #[must_use]
    pub fn from_tokens(model: impl Into<String>, tokens: Vec<TokenId>) -> Self {
        Self::new(model.into(), Input::Tokens(tokens.into()))
    }

    /// Creates a request on text, for engines that tokenize themselves.
    #[must_use]
    pub fn from_text(model: impl Into<String>, text: impl Into<String>) -> Self {
        Self::new(model.into(), Input::Text(text.into().into()))
    }

    /// Creates a request on chat messages, for engines that apply their own template.
    #[must_use]
    pub fn from_chat(model: impl Into<String>, chat: ChatInput) -> Self {
        Self::new(model.into(), Input::Chat(chat.into()))
    }

    fn new(model: String, input: Input) -> Self {
        Self {
            model,
            input,
            stop: StopConditions::default(),
            sampling: SamplingOptions::default(),
            output: OutputOptions::default(),
            guided: None,
            priority: 0,
            cache_salt: None,
            adapter: None,
            transfer: None,
            resumed_tokens: 0,
            data_parallel_rank: None,
            annotations: Shared::default(),
        }
    }

    /// Returns the prompt's token ids; an error for any other input.
    ///
    /// # Errors
    /// `Unsupported` when the input is not tokens.
    pub fn tokens(&self) -> Result<&[TokenId], EngineError> {
        match &self.input {
            Input::Tokens(tokens) => Ok(tokens),
            Input::Text(_) | Input::Chat(_) | Input::Embed(_) | Input::Score(_) => {
                Err(EngineError::unsupported(
                    RequestField::Prompt,
                    "this engine takes prompt token ids only",
                ))
            }
        }
    }

    /// Returns the number of prompt tokens, if the request itself determines it.
    #[must_use]
    pub fn prompt_tokens(&self) -> Option<u32> {
        let len = match &self.input {
            Input::Tokens(tokens) => tokens.len(),
            Input::Embed(inputs) => inputs.iter().map(Vec::len).sum(),
            Input::Score(pairs) => pairs.iter().map(|pair| pair.token_ids.len()).sum(),
            Input::Text(_) | Input::Chat(_) => return None,
        };
        Some(u32::try_from(len).unwrap_or(u32::MAX))
    }

    /// Returns the most tokens to generate: as many as requested, within the room that a context of `context_length_tokens` has
    /// after the prompt. Text counts as an empty prompt, since only its engine knows the number of tokens; such an engine calls
    /// [`StopConditions::max_tokens_within`].
    ///
    /// # Examples
    /// ```
    /// use genset_backend_common::GenerateRequest;
    ///
    /// let mut request = GenerateRequest::from_tokens("tiny-chat", vec![1, 2, 3]);
    /// assert_eq!(request.max_tokens(10), 7);
    /// request.stop.max_tokens = Some(16);
    /// assert_eq!(request.max_tokens(10), 7);
    /// request.stop.max_tokens = Some(5);
    /// assert_eq!(request.max_tokens(10), 5);
    /// ```
    #[must_use]
    pub fn max_tokens(&self, context_length_tokens: u32) -> u32 {
        let prompt_tokens = self.prompt_tokens().unwrap_or(0);
        let room = context_length_tokens.saturating_sub(prompt_tokens);
        self.stop.max_tokens_within(room)
    }

    /// Checks every value against the range of its field, independent of the engine.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the first field out of range.
    pub fn validate(&self) -> Result<(), EngineError> {
        if self.stop.max_tokens == Some(0) {
            return refuse(RequestField::MaxTokens, "must be at least 1");
        }
        if let (Some(max), min) = (self.stop.max_tokens, self.stop.min_tokens)
            && min > max
        {
            return refuse(
                RequestField::MinTokens,
                format!("must not exceed max_tokens ({max}), got {min}"),
            );
        }
        let salt_bytes = self.cache_salt.as_ref().map_or(0, String::len);
        if salt_bytes > MAX_CACHE_SALT_BYTES {
            return refuse(
                RequestField::CacheSalt,
                format!("must have at most {MAX_CACHE_SALT_BYTES} bytes, got {salt_bytes}"),
            );
        }
        match &self.input {
            Input::Tokens(tokens) if tokens.is_empty() => {
                return refuse(RequestField::Prompt, "must hold at least one token");
            }
            Input::Embed(inputs) if inputs.is_empty() || inputs.iter().any(Vec::is_empty) => {
                return refuse(RequestField::Prompt, "must hold at least one token each");
            }
            Input::Chat(chat) if chat.messages.is_empty() => {
                return refuse(RequestField::Prompt, "must hold at least one message");
            }
            Input::Score(pairs) => check_pairs(pairs)?,
            Input::Tokens(_) | Input::Text(_) | Input::Chat(_) | Input::Embed(_) => {}
        }
        self.sampling.validate()
    }
}

impl SamplingOptions {
    /// Checks every option against its range.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the first option out of range.
    pub fn validate(&self) -> Result<(), EngineError> {
        check_range(RequestField::Temperature, self.temperature, 0.0, 2.0)?;
        check_range(RequestField::TopP, self.top_p, 0.0, 1.0)?;
        check_range(RequestField::MinP, self.min_p, 0.0, 1.0)?;
        check_range(
            RequestField::PresencePenalty,
            self.presence_penalty,
            -2.0,
            2.0,
        )?;
        check_range(
            RequestField::FrequencyPenalty,
            self.frequency_penalty,
            -2.0,
            2.0,
        )?;
        if self.top_p == Some(0.0) {
            return refuse(RequestField::TopP, "must be greater than 0");
        }
        if self.top_k == Some(0) {
            return refuse(
                RequestField::TopK,
                "must be at least 1; 4294967295 is no limit",
            );
        }
        if let Some(penalty) = self.repetition_penalty
            && !(penalty.is_finite() && penalty > 0.0)
        {
            return refuse(
                RequestField::RepetitionPenalty,
                format!("must be a finite number greater than 0, got {penalty}"),
            );
        }
        for (token, bias) in &self.logit_bias {
            if !(-100.0..=100.0).contains(bias) {
                return refuse(
                    RequestField::LogitBias,
                    format!("must be between -100 and 100, got {bias} for token {token}"),
                );
            }
        }
        Ok(())
    }
}

fn check_pairs(pairs: &[ScorePair]) -> Result<(), EngineError> {
    let is_wrong = |pair: &ScorePair| {
        let first = usize::try_from(pair.first_tokens).unwrap_or(usize::MAX);
        pair.token_ids.is_empty() || first > pair.token_ids.len()
    };
    if pairs.is_empty() || pairs.iter().any(is_wrong) {
        return refuse(
            RequestField::Prompt,
            "must hold pairs of at least one token each, whose first_tokens is at most their length",
        );
    }
    Ok(())
}

/// Returns whether an option has another value than the one without effect.
pub(crate) fn is_set(option: Option<f32>, neutral: f32) -> bool {
    option.is_some_and(|value| value != neutral)
}

fn refuse(field: RequestField, problem: impl fmt::Display) -> Result<(), EngineError> {
    Err(EngineError::invalid_argument(field, problem))
}

fn has_no_entries<K, V>(map: &Shared<BTreeMap<K, V>>) -> bool {
    map.is_empty()
}

fn check_range(
    field: RequestField,
    value: Option<f32>,
    min: f32,
    max: f32,
) -> Result<(), EngineError> {
    match value {
        // NaN is in no range, so it is refused too.
        Some(value) if !(min..=max).contains(&value) => refuse(
            field,
            format!("must be between {min} and {max}, got {value}"),
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field_of(request: &GenerateRequest) -> Option<String> {
        request
            .validate()
            .err()
            .and_then(|error| error.at().map(|at| at.name().to_owned()))
    }

    #[test]
    fn every_range_is_checked_and_the_field_named() {
        let base = GenerateRequest::from_tokens("m", vec![1]);
        assert_eq!(field_of(&base), None);
        type Break = fn(&mut GenerateRequest);
        let cases: &[(&str, Break)] = &[
            ("max_tokens", |r| r.stop.max_tokens = Some(0)),
            ("min_tokens", |r| {
                (r.stop.max_tokens, r.stop.min_tokens) = (Some(1), 2)
            }),
            ("prompt", |r| r.input = Input::Tokens([].into())),
            ("prompt", |r| r.input = Input::Chat(Shared::default())),
            ("prompt", |r| r.input = Input::Embed([vec![]].into())),
            ("prompt", |r| r.input = Input::Score([].into())),
            ("prompt", |r| {
                r.input = Input::Score([ScorePair::default()].into());
            }),
            ("prompt", |r| {
                let pair = ScorePair {
                    token_ids: vec![1, 2],
                    first_tokens: 3,
                };
                r.input = Input::Score([pair].into());
            }),
            ("temperature", |r| r.sampling.temperature = Some(-0.1)),
            ("temperature", |r| r.sampling.temperature = Some(f32::NAN)),
            ("top_p", |r| r.sampling.top_p = Some(0.0)),
            ("top_k", |r| r.sampling.top_k = Some(0)),
            ("min_p", |r| r.sampling.min_p = Some(1.5)),
            ("presence_penalty", |r| {
                r.sampling.presence_penalty = Some(2.5)
            }),
            ("frequency_penalty", |r| {
                r.sampling.frequency_penalty = Some(-2.5)
            }),
            ("repetition_penalty", |r| {
                r.sampling.repetition_penalty = Some(0.0)
            }),
            ("logit_bias", |r| {
                r.sampling.logit_bias = [(7, f32::INFINITY)].into()
            }),
        ];
        for (field, break_it) in cases {
            let mut request = base.clone();
            break_it(&mut request);
            assert_eq!(field_of(&request).as_deref(), Some(*field));
        }
    }

    #[test]
    fn stop_tokens_respect_min_tokens_and_ignore_eos() {
        let mut stop = StopConditions {
            min_tokens: 2,
            stop_token_ids: [5].into(),
            eos_token_ids: [9].into(),
            ..Default::default()
        };
        assert!(!stop.is_stop(5, 1));
        assert!(stop.is_stop(5, 2) && stop.is_stop(9, 2));
        stop.ignore_eos = true;
        assert!(stop.is_stop(5, 2) && !stop.is_stop(9, 2));
    }
}
