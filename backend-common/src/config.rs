//! What an engine says about itself at start: [`EngineConfig`] with its [`Capabilities`]. What is not declared is
//! refused before it reaches the engine.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::engine::Role;
use crate::error::{At, EngineError, ErrorKind, RequestField};
use crate::request::{
    ChatInput, GenerateRequest, GuidedDecoding, Input, MediaKind, SamplingOptions, TokenId,
};

/// The most data-parallel ranks of an instance.
pub const MAX_DATA_PARALLEL_SIZE: u32 = 1024;

/// What an engine is once it started.
///
/// # Examples
/// ```
/// use genset_backend_common::{Capabilities, EngineConfig};
///
/// let config = EngineConfig::new("tiny-chat", 2048)
///     .with_vocab_size(2048)
///     .with_capabilities(Capabilities::tokens().with_point_mass_sampling());
/// config.validate().unwrap();
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineConfig {
    /// The model's name; not empty.
    pub model: String,
    /// The most tokens of prompt and output together, at least 1.
    pub context_length_tokens: u32,
    /// Token ids are below this; `None` when the engine does not know.
    pub vocab_size: Option<NonZeroU32>,
    /// Tokens per KV block; `None` for engines without KV blocks.
    pub kv_block_size: Option<NonZeroU32>,
    /// KV blocks in all.
    pub kv_total_blocks: Option<u64>,
    /// Sequences the engine runs at once; others wait or are refused as `Overloaded`. One that runs only a few says so, for
    /// a Worker would send it more.
    pub max_num_seqs: Option<u32>,
    /// Tokens the engine takes in one step.
    pub max_num_batched_tokens: Option<u32>,
    /// Data-parallel ranks inside the instance, from 1 to [`MAX_DATA_PARALLEL_SIZE`].
    pub data_parallel_size: u32,
    /// What the engine can do.
    pub capabilities: Capabilities,
    /// The request the Worker probes the engine with; `None` for a one-token default.
    pub canary: Option<Box<GenerateRequest>>,
}

impl EngineConfig {
    /// A config with the two values every engine has, that takes tokens and declares nothing else.
    #[must_use]
    pub fn new(model: impl Into<String>, context_length_tokens: u32) -> Self {
        Self {
            model: model.into(),
            context_length_tokens,
            vocab_size: None,
            kv_block_size: None,
            kv_total_blocks: None,
            max_num_seqs: None,
            max_num_batched_tokens: None,
            data_parallel_size: 1,
            capabilities: Capabilities::tokens(),
            canary: None,
        }
    }

    /// Sets the vocabulary's size; 0 leaves it unknown.
    #[must_use]
    pub fn with_vocab_size(mut self, vocab_size: u32) -> Self {
        self.vocab_size = NonZeroU32::new(vocab_size);
        self
    }

    /// Sets what the engine can do.
    #[must_use]
    pub fn with_capabilities(mut self, capabilities: Capabilities) -> Self {
        self.capabilities = capabilities;
        self
    }

    /// Checks the config itself.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field: an empty model, a zero context, no input kind, media without chats, no rank, an
    /// ability that answers have no place for.
    pub fn validate(&self) -> Result<(), EngineError> {
        let problem = if self.model.trim().is_empty() {
            (
                "model",
                "the engine returned an empty model name from start",
            )
        } else if self.context_length_tokens == 0 {
            ("context_length_tokens", "must be at least 1")
        } else if self.capabilities.inputs.is_empty() {
            ("capabilities.inputs", "declare at least one kind of input")
        } else if !self.capabilities.media.is_empty()
            && !self.capabilities.inputs.contains(&InputKind::Chat)
        {
            (
                "capabilities.media",
                "are parts of chat messages; declare that input too",
            )
        } else if !(1..=MAX_DATA_PARALLEL_SIZE).contains(&self.data_parallel_size) {
            ("data_parallel_size", "must be between 1 and 1024")
        } else if self.capabilities.prompt_logprobs {
            (
                "capabilities.prompt_logprobs",
                "no item of an answer can carry them yet; declare false",
            )
        } else {
            return Ok(());
        };
        Err(EngineError::invalid_argument(
            At::other(problem.0),
            problem.1,
        ))
    }

    /// Checks a request against ranges, capabilities, vocabulary and context, before the engine sees it.
    ///
    /// # Errors
    /// `InvalidArgument`, `Unsupported` or `ContextLengthExceeded`, naming the field.
    pub fn check(&self, request: &GenerateRequest) -> Result<(), EngineError> {
        let bounds = Bounds {
            capabilities: &self.capabilities,
            vocab_size: self.vocab_size,
            context_length_tokens: self.context_length_tokens,
        };
        bounds.check(request)?;
        match request.data_parallel_rank {
            Some(rank) if rank >= self.data_parallel_size => Err(EngineError::invalid_argument(
                RequestField::DataParallelRank,
                format!(
                    "must be below {}, the number of ranks that can be named, got {rank}",
                    self.data_parallel_size
                ),
            )),
            Some(_) | None => Ok(()),
        }
    }
}

/// What a request must keep to, wherever that is known: at the engine, and from its card at the frontend.
pub(crate) struct Bounds<'a> {
    pub(crate) capabilities: &'a Capabilities,
    pub(crate) vocab_size: Option<NonZeroU32>,
    pub(crate) context_length_tokens: u32,
}

impl Bounds<'_> {
    pub(crate) fn check(&self, request: &GenerateRequest) -> Result<(), EngineError> {
        request.validate()?;
        self.capabilities.check(request)?;
        self.check_vocabulary(RequestField::StopTokenIds, &request.stop.stop_token_ids)?;
        self.check_vocabulary(RequestField::LogitBias, request.sampling.logit_bias.keys())?;
        match &request.input {
            Input::Tokens(tokens) => {
                self.check_vocabulary(RequestField::Prompt, tokens.iter())?;
                self.check_prompt_len(tokens.len())
            }
            Input::Embed(inputs) => self.check_inputs("input", inputs.iter().map(Vec::as_slice)),
            Input::Score(pairs) => {
                self.check_inputs("pair", pairs.iter().map(|pair| pair.token_ids.as_slice()))
            }
            Input::Text(_) | Input::Chat(_) => Ok(()),
        }
    }

    /// Nothing is generated from inputs to embed or to score: each may fill the context.
    fn check_inputs<'t>(
        &self,
        word: &str,
        inputs: impl Iterator<Item = &'t [TokenId]>,
    ) -> Result<(), EngineError> {
        for (place, input) in inputs.enumerate() {
            self.check_vocabulary(RequestField::Prompt, input)?;
            let (tokens, context) = (input.len(), self.context());
            if tokens > context {
                let message = format!(
                    "{word} {place} has {tokens} tokens, but the model's context holds {context}; shorten it"
                );
                return Err(too_long(message));
            }
        }
        Ok(())
    }

    /// The model's own end-of-sequence ids are not looked at: no client gave them.
    fn check_vocabulary<'t>(
        &self,
        field: RequestField,
        tokens: impl IntoIterator<Item = &'t TokenId>,
    ) -> Result<(), EngineError> {
        let Some(vocab_size) = self.vocab_size else {
            return Ok(());
        };
        let mut tokens = tokens.into_iter();
        match tokens.find(|token| **token >= vocab_size.get()) {
            None => Ok(()),
            Some(token) => Err(EngineError::invalid_argument(
                field,
                format!(
                    "token id {token} is not in the vocabulary, which ends at {}",
                    vocab_size.get() - 1
                ),
            )),
        }
    }

    fn context(&self) -> usize {
        usize::try_from(self.context_length_tokens).unwrap_or(usize::MAX)
    }

    /// A prompt to generate from must leave room for one token.
    fn check_prompt_len(&self, prompt_tokens: usize) -> Result<(), EngineError> {
        let context = self.context();
        if prompt_tokens < context {
            return Ok(());
        }
        let message = format!(
            "the prompt has {prompt_tokens} tokens, but the model's context holds {context} with the answer; \
             shorten the prompt"
        );
        Err(too_long(message))
    }
}

fn too_long(message: String) -> EngineError {
    EngineError::new(ErrorKind::ContextLengthExceeded, message).with_at(RequestField::Prompt)
}

/// A kind of input an engine may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputKind {
    /// Prompt token ids.
    Tokens,
    /// Text.
    Text,
    /// Chat messages.
    Chat,
    /// Token sequences to embed.
    Embed,
    /// Pairs of texts to score.
    Score,
}

impl InputKind {
    /// Whether it is a prompt: what the engine goes on from.
    #[must_use]
    pub const fn is_prompt(self) -> bool {
        match self {
            Self::Tokens | Self::Text | Self::Chat => true,
            Self::Embed | Self::Score => false,
        }
    }
}

/// A sampling option an engine may honour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplingOption {
    /// `temperature`; 0 is greedy.
    Temperature,
    /// `top_p`.
    TopP,
    /// `top_k`.
    TopK,
    /// `min_p`.
    MinP,
    /// `presence_penalty`.
    PresencePenalty,
    /// `frequency_penalty`.
    FrequencyPenalty,
    /// `repetition_penalty`.
    RepetitionPenalty,
    /// `logit_bias`.
    LogitBias,
    /// `seed`.
    Seed,
}

/// A kind of grammar an engine may enforce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuidedKind {
    /// Any JSON object.
    JsonObject,
    /// A JSON schema.
    JsonSchema,
    /// A regular expression.
    Regex,
    /// One of several texts.
    Choice,
    /// A context-free grammar.
    Grammar,
}

/// Something that the contract asks of every engine and that this one is known not to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Deviation {
    /// An answer may depend on what else is in its batch, its own tokens included: the engine adds the same numbers up in another order
    /// then. Greedy and seeded answers are repeatable on an idle engine only, and a resumed one need not draw on as it would have. A greedy
    /// one goes another way only where two tokens are all but equally likely.
    BatchVariant,
    /// `min_tokens` cannot be kept: a request with it is refused.
    NoMinTokens,
    /// `presence_penalty` and `frequency_penalty` count the prompt's tokens, too, of the last 64 tokens at least.
    PenaltiesCountPrompt,
    /// Log probabilities have `logit_bias` and the penalties in them, as the logits that tokens are chosen from do. Those of a
    /// request that sets neither are the model's own.
    LogprobsAfterBias,
}

/// What an engine can do. The frontend and the Worker's adapter refuse the rest, and the conformance kit checks that what
/// is declared works.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Capabilities {
    /// Kinds of input; at least one.
    pub inputs: BTreeSet<InputKind>,
    /// Kinds of media that chat messages may have beside text; only for engines that take chat messages. An engine that takes
    /// tokens too gets tokens where a chat has none of them.
    pub media: BTreeSet<MediaKind>,
    /// Sampling options.
    pub sampling: BTreeSet<SamplingOption>,
    /// The most `logprobs` a request may ask for; `None` when there are none.
    pub max_logprobs: Option<u32>,
    /// Whether log probabilities of the prompt are given. No item of an answer can carry them yet, so an engine that declares
    /// them is refused at its start.
    pub prompt_logprobs: bool,
    /// Kinds of grammar.
    pub guided: BTreeSet<GuidedKind>,
    /// Whether an input of text is the whole body of a request of OpenAI's API, as its client sent it, and each text of the
    /// answer one JSON object of that API: the answer where it is not streamed, else an event. Frontends pass both through.
    pub whole_bodies: bool,
    /// Whether `priority` is honoured.
    pub priority: bool,
    /// Whether LoRA adapters are served.
    pub adapters: bool,
    /// Whether the engine publishes KV events.
    pub kv_events: bool,
    /// Whether it also publishes those of each data-parallel rank alone, where it has several.
    pub kv_ranks: bool,
    /// Whether a request may go on from another instance's tokens with the same result.
    pub resume: bool,
    /// Whether all the engine's waits follow `tokio::time`, so that tests may pause the clock.
    pub virtual_time: bool,
    /// Roles the engine can play; empty means aggregated only.
    pub roles: BTreeSet<Role>,
    /// Where the engine deviates from the contract. The conformance kit judges it by what is left, and by how far it may deviate.
    pub deviations: BTreeSet<Deviation>,
}

impl Capabilities {
    /// Takes prompt token ids; nothing else.
    #[must_use]
    pub fn tokens() -> Self {
        Self {
            inputs: BTreeSet::from([InputKind::Tokens]),
            ..Self::default()
        }
    }

    /// Takes text and chat messages; nothing else.
    #[must_use]
    pub fn text() -> Self {
        Self {
            inputs: BTreeSet::from([InputKind::Text, InputKind::Chat]),
            ..Self::default()
        }
    }

    /// Adds sampling options.
    #[must_use]
    pub fn with_sampling(mut self, options: impl IntoIterator<Item = SamplingOption>) -> Self {
        self.sampling.extend(options);
        self
    }

    /// Adds the options that engines with one possible next token honour whatever their value: temperature, `top_p`,
    /// `top_k`, `min_p` and `seed` choose among candidates, and there is one.
    #[must_use]
    pub fn with_point_mass_sampling(self) -> Self {
        use SamplingOption::{MinP, Seed, Temperature, TopK, TopP};
        self.with_sampling([Temperature, TopP, TopK, MinP, Seed])
    }

    /// Declares that every wait follows `tokio::time`.
    #[must_use]
    pub fn with_virtual_time(mut self) -> Self {
        self.virtual_time = true;
        self
    }

    /// Declares that a request may go on from another instance's tokens.
    #[must_use]
    pub fn with_resume(mut self) -> Self {
        self.resume = true;
        self
    }

    /// Adds roles the engine can play; without any it is aggregated only.
    #[must_use]
    pub fn with_roles(mut self, roles: impl IntoIterator<Item = Role>) -> Self {
        self.roles.extend(roles);
        self
    }

    /// Declares where the engine deviates from the contract.
    #[must_use]
    pub fn with_deviations(mut self, deviations: impl IntoIterator<Item = Deviation>) -> Self {
        self.deviations.extend(deviations);
        self
    }

    /// Whether the engine is known to deviate so.
    #[must_use]
    pub fn deviates(&self, deviation: Deviation) -> bool {
        self.deviations.contains(&deviation)
    }

    /// Whether an instance can play `role`.
    #[must_use]
    pub fn plays(&self, role: Role) -> bool {
        self.roles.contains(&role) || (self.roles.is_empty() && role == Role::Aggregated)
    }

    /// Whether prefill and decode can be done apart.
    #[must_use]
    pub fn can_be_apart(&self) -> bool {
        self.plays(Role::Prefill) && self.plays(Role::Decode)
    }

    /// Refuses what is asked for and not declared.
    ///
    /// # Errors
    /// `Unsupported`, naming the field.
    pub fn check(&self, request: &GenerateRequest) -> Result<(), EngineError> {
        let input = match &request.input {
            Input::Tokens(_) => InputKind::Tokens,
            Input::Text(_) => InputKind::Text,
            Input::Chat(_) => InputKind::Chat,
            Input::Embed(_) => InputKind::Embed,
            Input::Score(_) => InputKind::Score,
        };
        if !self.inputs.contains(&input) {
            return Err(undeclared(RequestField::Prompt, "this kind of input"));
        }
        if let Input::Chat(chat) = &request.input {
            self.check_media(&request.model, chat)?;
        }
        self.check_sampling(&request.sampling)?;
        if request.stop.min_tokens != 0 && self.deviates(Deviation::NoMinTokens) {
            return Err(undeclared(RequestField::MinTokens, "a least length"));
        }
        if let Some(guided) = &request.guided {
            self.check_guided(guided)?;
        }
        match request.output.logprobs {
            Some(asked) if self.max_logprobs.is_none_or(|max| asked > max) => {
                return Err(match self.max_logprobs {
                    None => undeclared(RequestField::Logprobs, "log probabilities"),
                    Some(max) => EngineError::invalid_argument(
                        RequestField::Logprobs,
                        format!("this engine gives at most {max}, got {asked}"),
                    ),
                });
            }
            _ => {}
        }
        if request.output.prompt_logprobs.is_some() && !self.prompt_logprobs {
            return Err(undeclared(
                RequestField::PromptLogprobs,
                "log probabilities of the prompt",
            ));
        }
        if request.priority != 0 && !self.priority {
            return Err(undeclared(RequestField::Priority, "priorities"));
        }
        if request.adapter.is_some() && !self.adapters {
            return Err(undeclared(RequestField::Adapter, "LoRA adapters"));
        }
        if request.resumed_tokens != 0 && !self.resume {
            return Err(undeclared(
                RequestField::ResumedTokens,
                "going on from another instance's tokens",
            ));
        }
        Ok(())
    }

    /// Whoever sent them may be older than this, or hostile: a URL that an engine would fetch does not get through.
    fn check_media(&self, model: &str, chat: &ChatInput) -> Result<(), EngineError> {
        let media = chat.media()?;
        let mut media = media.into_iter();
        match media.find(|(_, medium)| !self.media.contains(&medium.kind())) {
            None => Ok(()),
            Some((place, medium)) => Err(EngineError::unsupported(
                place,
                no_media(model, medium.kind()),
            )),
        }
    }

    fn check_sampling(&self, sampling: &SamplingOptions) -> Result<(), EngineError> {
        use SamplingOption as Opt;
        let asked = [
            (
                Opt::Temperature,
                RequestField::Temperature,
                sampling.temperature.is_some(),
            ),
            (
                Opt::TopP,
                RequestField::TopP,
                sampling.top_p.is_some_and(|p| p != 1.0),
            ),
            (Opt::TopK, RequestField::TopK, sampling.top_k.is_some()),
            (
                Opt::MinP,
                RequestField::MinP,
                sampling.min_p.is_some_and(|p| p != 0.0),
            ),
            (
                Opt::PresencePenalty,
                RequestField::PresencePenalty,
                sampling.presence_penalty.is_some_and(|p| p != 0.0),
            ),
            (
                Opt::FrequencyPenalty,
                RequestField::FrequencyPenalty,
                sampling.frequency_penalty.is_some_and(|p| p != 0.0),
            ),
            (
                Opt::RepetitionPenalty,
                RequestField::RepetitionPenalty,
                sampling.repetition_penalty.is_some_and(|p| p != 1.0),
            ),
            (
                Opt::LogitBias,
                RequestField::LogitBias,
                !sampling.logit_bias.is_empty(),
            ),
            (Opt::Seed, RequestField::Seed, sampling.seed.is_some()),
        ];
        match asked
            .iter()
            .find(|(option, _, is_asked)| *is_asked && !self.sampling.contains(option))
        {
            Some((_, field, _)) => Err(undeclared(*field, "it")),
            None => Ok(()),
        }
    }

    fn check_guided(&self, guided: &GuidedDecoding) -> Result<(), EngineError> {
        let kind = match guided {
            GuidedDecoding::JsonObject => GuidedKind::JsonObject,
            GuidedDecoding::JsonSchema(_) => GuidedKind::JsonSchema,
            GuidedDecoding::Regex(_) => GuidedKind::Regex,
            GuidedDecoding::Choice(_) => GuidedKind::Choice,
            GuidedDecoding::Grammar(_) => GuidedKind::Grammar,
        };
        if self.guided.contains(&kind) {
            Ok(())
        } else {
            Err(undeclared(
                RequestField::Guided,
                "this kind of guided decoding",
            ))
        }
    }
}

/// The refusal of a medium that a model's engine does not declare.
#[must_use]
pub fn no_media(model: &str, kind: MediaKind) -> String {
    let plural = kind.plural();
    format!(
        "the model {model} takes no {plural}; leave the part out, or ask a model that takes {plural}"
    )
}

fn undeclared(field: RequestField, what: &str) -> EngineError {
    EngineError::unsupported(
        field,
        format!("this model's engine does not support {what}; leave the field out"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::ScorePair;

    fn request() -> GenerateRequest {
        GenerateRequest::from_tokens("m", vec![1, 2])
    }

    #[test]
    fn every_undeclared_ability_is_refused_by_name() {
        let config = EngineConfig::new("m", 16).with_vocab_size(10);
        type Ask = fn(&mut GenerateRequest);
        let cases: &[(&str, Ask)] = &[
            ("temperature", |r| r.sampling.temperature = Some(0.0)),
            ("top_p", |r| r.sampling.top_p = Some(0.5)),
            ("top_k", |r| r.sampling.top_k = Some(1)),
            ("min_p", |r| r.sampling.min_p = Some(0.5)),
            ("presence_penalty", |r| {
                r.sampling.presence_penalty = Some(1.0)
            }),
            ("frequency_penalty", |r| {
                r.sampling.frequency_penalty = Some(1.0)
            }),
            ("repetition_penalty", |r| {
                r.sampling.repetition_penalty = Some(1.1)
            }),
            ("logit_bias", |r| r.sampling.logit_bias = [(1, 1.0)].into()),
            ("seed", |r| r.sampling.seed = Some(1)),
            ("logprobs", |r| r.output.logprobs = Some(0)),
            ("prompt_logprobs", |r| r.output.prompt_logprobs = Some(0)),
            ("guided", |r| {
                r.guided = Some(GuidedDecoding::JsonObject.into())
            }),
            ("guided", |r| {
                r.guided = Some(GuidedDecoding::Regex(".".into()).into())
            }),
            ("priority", |r| r.priority = 1),
            ("adapter", |r| r.adapter = Some("a".into())),
            ("resumed_tokens", |r| r.resumed_tokens = 1),
            ("prompt", |r| r.input = Input::Text("x".into())),
            ("prompt", |r| r.input = Input::Embed([vec![1]].into())),
            ("prompt", |r| {
                let pair = ScorePair {
                    token_ids: vec![1],
                    first_tokens: 1,
                };
                r.input = Input::Score([pair].into());
            }),
        ];
        config.check(&request()).unwrap();
        for (field, ask) in cases {
            let mut request = request();
            ask(&mut request);
            let error = config.check(&request).unwrap_err();
            assert_eq!(
                (error.kind(), error.at().map(|at| at.name())),
                (ErrorKind::Unsupported, Some(*field))
            );
        }
    }

    /// An old or hostile frontend sends what was not declared, or what an engine would fetch by itself.
    #[test]
    fn media_that_are_not_declared_are_refused_by_their_place() {
        use serde_json::json;
        let config = |media: &[MediaKind]| {
            let can = Capabilities {
                media: media.iter().copied().collect(),
                ..Capabilities::text()
            };
            EngineConfig::new("m", 16).with_capabilities(can)
        };
        let chat = |url: &str| {
            let image = json!({"type": "image_url", "image_url": {"url": url}});
            let text = json!({"type": "text", "text": "?"});
            let messages = vec![json!({"role": "user", "content": [text, image]})];
            let tools = Vec::new();
            GenerateRequest::from_chat("blind", ChatInput { messages, tools })
        };
        let gif = chat("data:image/gif;base64,R0lGODlhAQABAAAAACw=");
        config(&[MediaKind::Image]).check(&gif).unwrap();
        for blind in [config(&[]), config(&[MediaKind::Audio])] {
            let error = blind.check(&gif).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert_eq!(error.at().map(At::name), Some("messages[0].content[1]"));
            assert!(
                error
                    .message()
                    .starts_with("the model blind takes no images"),
                "{error}"
            );
        }
        let fetched = config(&[MediaKind::Image]).check(&chat("http://169.254.169.254/"));
        assert_eq!(fetched.unwrap_err().kind(), ErrorKind::InvalidArgument);
        let mut no_chats = config(&[MediaKind::Image]);
        no_chats.validate().unwrap();
        no_chats.capabilities.inputs = [InputKind::Tokens].into();
        let error = no_chats.validate().unwrap_err();
        assert_eq!(error.at().map(At::name), Some("capabilities.media"));
    }

    #[test]
    fn options_at_their_neutral_value_ask_for_nothing() {
        let mut request = request();
        request.sampling.top_p = Some(1.0);
        request.sampling.min_p = Some(0.0);
        request.sampling.presence_penalty = Some(0.0);
        request.sampling.frequency_penalty = Some(0.0);
        request.sampling.repetition_penalty = Some(1.0);
        EngineConfig::new("m", 16).check(&request).unwrap();
    }

    #[test]
    fn prompts_out_of_vocabulary_or_context_are_refused() {
        let config = EngineConfig::new("m", 4).with_vocab_size(10);
        let kind = |tokens| {
            config
                .check(&GenerateRequest::from_tokens("m", tokens))
                .map_err(|e| e.kind())
        };
        assert_eq!(kind(vec![1, 2, 9]), Ok(()));
        assert_eq!(kind(vec![10]), Err(ErrorKind::InvalidArgument));
        assert_eq!(kind(vec![1; 4]), Err(ErrorKind::ContextLengthExceeded));
    }

    #[test]
    fn inputs_and_pairs_may_fill_the_context_and_no_more() {
        let can = Capabilities {
            inputs: [InputKind::Embed, InputKind::Score].into(),
            ..Capabilities::default()
        };
        let config = EngineConfig::new("m", 4)
            .with_vocab_size(10)
            .with_capabilities(can);
        let pair = |tokens| ScorePair {
            token_ids: tokens,
            first_tokens: 1,
        };
        let embed = |tokens| Input::Embed([vec![1], tokens].into());
        let score = |tokens| Input::Score([pair(vec![1]), pair(tokens)].into());
        let asks_of = |word: &str, tokens: Vec<TokenId>| match word {
            "pair 1" => score(tokens),
            _ => embed(tokens),
        };
        for word in ["input 1", "pair 1"] {
            let check = |tokens| {
                let mut request = request();
                request.input = asks_of(word, tokens);
                config.check(&request)
            };
            check(vec![9; 4]).unwrap();
            let unknown = check(vec![10]).unwrap_err();
            assert_eq!(unknown.kind(), ErrorKind::InvalidArgument);
            let long = check(vec![1; 5]).unwrap_err();
            assert_eq!(long.kind(), ErrorKind::ContextLengthExceeded);
            let message = long.message();
            assert!(
                message.contains(word) && !message.contains("answer"),
                "{message}"
            );
        }
    }

    #[test]
    fn options_out_of_the_vocabulary_are_refused_by_name_and_id() {
        type Ask = fn(&mut GenerateRequest, TokenId);
        let asks: [(&str, Ask); 2] = [
            ("stop_token_ids", |request, token| {
                request.stop.stop_token_ids = [1, token].into();
            }),
            ("logit_bias", |request, token| {
                request.sampling.logit_bias = [(1, 1.0), (token, 1.0)].into();
            }),
        ];
        let can = Capabilities::tokens().with_sampling([SamplingOption::LogitBias]);
        let unknown = EngineConfig::new("m", 16).with_capabilities(can);
        let known = unknown.clone().with_vocab_size(10);
        for (field, ask) in asks {
            let mut request = request();
            request.stop.eos_token_ids = [10].into();
            ask(&mut request, 9);
            known.check(&request).unwrap();
            ask(&mut request, 10);
            unknown.check(&request).unwrap();
            let error = known.check(&request).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert_eq!(error.at().map(|at| at.name()), Some(field));
            assert!(error.message().contains("token id 10 "), "{error}");
        }
    }

    #[test]
    fn what_an_engine_deviates_in_is_refused_by_name_or_only_told() {
        let mut request = request();
        let deviating = |deviation| {
            let can = Capabilities::tokens().with_deviations([deviation]);
            EngineConfig::new("m", 16).with_capabilities(can)
        };
        request.stop.min_tokens = 1;
        let error = deviating(Deviation::NoMinTokens).check(&request);
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.at().map(|at| at.name()), Some("min_tokens"));
        for told in [
            Deviation::BatchVariant,
            Deviation::PenaltiesCountPrompt,
            Deviation::LogprobsAfterBias,
        ] {
            deviating(told).check(&request).unwrap();
        }
    }

    #[test]
    fn ranks_that_the_engine_has_not_are_refused() {
        let mut config = EngineConfig::new("m", 16);
        config.data_parallel_size = 2;
        let mut request = request();
        request.data_parallel_rank = Some(1);
        config.check(&request).unwrap();
        request.data_parallel_rank = Some(2);
        let error = config.check(&request).unwrap_err();
        assert_eq!(error.at().map(|at| at.name()), Some("data_parallel_rank"));
    }

    #[test]
    fn a_config_without_model_context_or_input_is_refused() {
        let good = EngineConfig::new("m", 1);
        good.validate().unwrap();
        for bad in [
            EngineConfig::new(" ", 1),
            EngineConfig::new("m", 0),
            good.clone().with_capabilities(Capabilities::default()),
            good.clone().with_capabilities(Capabilities {
                prompt_logprobs: true,
                ..Capabilities::tokens()
            }),
            EngineConfig {
                data_parallel_size: 0,
                ..good
            },
        ] {
            assert_eq!(
                bad.validate().unwrap_err().kind(),
                ErrorKind::InvalidArgument
            );
        }
    }
}
