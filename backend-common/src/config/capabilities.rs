//! What an engine declares it can do, and the refusal of everything else.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::engine::Role;
use crate::error::{EngineError, RequestField};
use crate::request::{
    ChatInput, GenerateRequest, GuidedDecoding, Input, MediaKind, NotResumable, SamplingOptions,
    is_set,
};

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
    /// Returns whether it is a prompt: an input from which the engine generates.
    #[must_use]
    pub const fn is_prompt(self) -> bool {
        match self {
            Self::Tokens | Self::Text | Self::Chat => true,
            Self::Embed | Self::Score => false,
        }
    }
}

crate::named! {
    /// A sampling option that an engine may support.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum SamplingOption {
        /// `temperature`; 0 is greedy.
        Temperature = "temperature",
        /// `top_p`.
        TopP = "top_p",
        /// `top_k`.
        TopK = "top_k",
        /// `min_p`.
        MinP = "min_p",
        /// `presence_penalty`.
        PresencePenalty = "presence_penalty",
        /// `frequency_penalty`.
        FrequencyPenalty = "frequency_penalty",
        /// `repetition_penalty`.
        RepetitionPenalty = "repetition_penalty",
        /// `logit_bias`.
        LogitBias = "logit_bias",
        /// `seed`.
        Seed = "seed",
    }
}

impl SamplingOption {
    /// Returns whether a request needs it: not if its value has no effect.
    fn is_asked_by(self, sampling: &SamplingOptions) -> bool {
        match self {
            Self::Temperature => sampling.temperature.is_some(),
            Self::TopP => is_set(sampling.top_p, 1.0),
            Self::TopK => sampling.top_k.is_some_and(|top_k| top_k < u32::MAX),
            Self::MinP => is_set(sampling.min_p, 0.0),
            Self::PresencePenalty => is_set(sampling.presence_penalty, 0.0),
            Self::FrequencyPenalty => is_set(sampling.frequency_penalty, 0.0),
            Self::RepetitionPenalty => is_set(sampling.repetition_penalty, 1.0),
            Self::LogitBias => !sampling.logit_bias.is_empty(),
            Self::Seed => sampling.seed.is_some(),
        }
    }

    const fn field(self) -> RequestField {
        match self {
            Self::Temperature => RequestField::Temperature,
            Self::TopP => RequestField::TopP,
            Self::TopK => RequestField::TopK,
            Self::MinP => RequestField::MinP,
            Self::PresencePenalty => RequestField::PresencePenalty,
            Self::FrequencyPenalty => RequestField::FrequencyPenalty,
            Self::RepetitionPenalty => RequestField::RepetitionPenalty,
            Self::LogitBias => RequestField::LogitBias,
            Self::Seed => RequestField::Seed,
        }
    }
}

crate::named! {
    /// A kind of grammar that an engine may enforce.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum GuidedKind {
        /// Any JSON object.
        JsonObject = "json_object",
        /// A JSON schema.
        JsonSchema = "json_schema",
        /// A regular expression.
        Regex = "regex",
        /// One of several strings.
        Choice = "choice",
        /// A context-free grammar.
        Grammar = "grammar",
    }
}

/// A requirement of the contract that an engine is known not to meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Deviation {
    /// An answer, including its own tokens, may depend on the rest of its batch and on how much of its prompt is cached, which
    /// change the order of additions. Greedy and seeded answers are repeatable only on an idle engine, and a resumed one may
    /// diverge from the original. A greedy one diverges only where two tokens are almost equally likely.
    BatchVariant,
    /// `min_tokens` is not supported: a request with it is refused.
    NoMinTokens,
    /// `presence_penalty` and `frequency_penalty` also count the prompt's tokens, within a window of at least the last 64 tokens.
    PenaltiesCountPrompt,
    /// Log probabilities include `logit_bias` and the penalties, as the logits for sampling do. Without those options they are
    /// the model's own.
    LogprobsAfterBias,
}

/// What an engine can do. The frontend and the Worker's adapter refuse everything else, and the conformance kit checks that the
/// declared abilities work.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Capabilities {
    /// Kinds of input; at least one.
    pub inputs: BTreeSet<InputKind>,
    /// Kinds of media that chat messages may contain beside text; only for engines that take chat messages. An engine that also
    /// takes tokens receives tokens if a chat has no media.
    pub media: BTreeSet<MediaKind>,
    /// Sampling options.
    pub sampling: BTreeSet<SamplingOption>,
    /// The maximum `logprobs` of a request; `None` if unsupported.
    pub max_logprobs: Option<u32>,
    /// Whether the engine reports log probabilities of the prompt. No output item can carry them yet, so an engine that declares
    /// them is refused at its start.
    pub prompt_logprobs: bool,
    /// Kinds of grammar.
    pub guided: BTreeSet<GuidedKind>,
    /// Whether a text input is the unmodified body of a request to the OpenAI API, and each text of the answer one JSON object of
    /// that API: the whole answer, or an event if streamed. Frontends pass both through. They convert a request to another API
    /// into the body of a streamed chat, and its answer from the events.
    pub whole_bodies: bool,
    /// Whether `priority` is supported.
    pub priority: bool,
    /// Whether LoRA adapters are supported.
    pub adapters: bool,
    /// Whether the engine publishes KV events.
    pub kv_events: bool,
    /// Whether it also publishes the events of each data-parallel rank, if it has several.
    pub kv_ranks: bool,
    /// Whether a request may resume from another instance's tokens with the same result.
    pub resume: bool,
    /// Whether a request may resume from another instance's tokens as from a longer prompt. For engines that do not
    /// [`resume`](Self::resume) every request; they receive only requests whose rest is the same after a longer prompt:
    /// [`GenerateRequest::resumes_as_prompt`].
    pub resume_as_prompt: bool,
    /// Whether all the engine's waits use `tokio::time`, so that tests can pause the clock.
    pub virtual_time: bool,
    /// Roles that the engine supports; empty means aggregated only.
    pub roles: BTreeSet<Role>,
    /// Known deviations from the contract. The conformance kit skips those requirements, and checks the limits of the deviations.
    pub deviations: BTreeSet<Deviation>,
}

impl Capabilities {
    /// Declares prompt token ids as the only input.
    #[must_use]
    pub fn tokens() -> Self {
        Self {
            inputs: BTreeSet::from([InputKind::Tokens]),
            ..Self::default()
        }
    }

    /// Declares text and chat messages as the only inputs.
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

    /// Adds the options that an engine with a single possible next token supports trivially: temperature, `top_p`, `top_k`,
    /// `min_p` and `seed` choose among candidates, and there is only one.
    #[must_use]
    pub fn with_point_mass_sampling(self) -> Self {
        use SamplingOption::{MinP, Seed, Temperature, TopK, TopP};
        self.with_sampling([Temperature, TopP, TopK, MinP, Seed])
    }

    /// Declares that every wait uses `tokio::time`.
    #[must_use]
    pub fn with_virtual_time(mut self) -> Self {
        self.virtual_time = true;
        self
    }

    /// Declares that a request may resume from another instance's tokens.
    #[must_use]
    pub fn with_resume(mut self) -> Self {
        self.resume = true;
        self
    }

    /// Declares that a request may resume from another instance's tokens as from a longer prompt.
    #[must_use]
    pub fn with_resume_as_prompt(mut self) -> Self {
        self.resume_as_prompt = true;
        self
    }

    /// Adds supported roles; without any, the engine is aggregated only.
    #[must_use]
    pub fn with_roles(mut self, roles: impl IntoIterator<Item = Role>) -> Self {
        self.roles.extend(roles);
        self
    }

    /// Declares deviations from the contract.
    #[must_use]
    pub fn with_deviations(mut self, deviations: impl IntoIterator<Item = Deviation>) -> Self {
        self.deviations.extend(deviations);
        self
    }

    /// Returns whether the engine declares this deviation.
    #[must_use]
    pub fn deviates(&self, deviation: Deviation) -> bool {
        self.deviations.contains(&deviation)
    }

    /// Returns whether an instance supports `role`.
    #[must_use]
    pub fn plays(&self, role: Role) -> bool {
        self.roles.contains(&role) || (self.roles.is_empty() && role == Role::Aggregated)
    }

    /// Returns whether prefill and decode can run on different instances.
    #[must_use]
    pub fn can_be_apart(&self) -> bool {
        self.plays(Role::Prefill) && self.plays(Role::Decode)
    }

    /// Returns whether the answer to `request` may resume from another instance's tokens.
    ///
    /// # Errors
    /// Why it may not.
    pub fn resumes(&self, request: &GenerateRequest) -> Result<(), NotResumable> {
        if !matches!(request.input, Input::Tokens(_)) {
            return Err(NotResumable::NotTokens);
        }
        match (self.resume, self.resume_as_prompt) {
            (true, _) => Ok(()),
            (false, true) => request.resumes_as_prompt(),
            (false, false) => Err(NotResumable::Undeclared),
        }
    }

    /// Refuses a request that needs undeclared abilities.
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
        if request.resumed_tokens != 0
            && let Err(why) = self.resumes(request)
        {
            return Err(EngineError::unsupported(RequestField::ResumedTokens, why));
        }
        Ok(())
    }

    /// The sender may be an older version or hostile: a URL that the engine would fetch must not pass.
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
        let mut options = SamplingOption::ALL.into_iter();
        match options.find(|it| it.is_asked_by(sampling) && !self.sampling.contains(it)) {
            Some(option) => Err(undeclared(option.field(), "it")),
            None => Ok(()),
        }
    }

    fn check_guided(&self, guided: &GuidedDecoding) -> Result<(), EngineError> {
        if self.guided.contains(&guided.kind()) {
            Ok(())
        } else {
            Err(undeclared(
                RequestField::Guided,
                "this kind of guided decoding",
            ))
        }
    }
}

/// Returns the refusal message for a medium that the engine does not declare.
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
