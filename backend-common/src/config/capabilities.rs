//! What an engine declares that it can do, and the refusal of what it does not.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::engine::Role;
use crate::error::{EngineError, RequestField};
use crate::request::{
    ChatInput, GenerateRequest, GuidedDecoding, Input, MediaKind, NotResumable, SamplingOptions,
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
    /// Whether it is a prompt: what the engine goes on from.
    #[must_use]
    pub const fn is_prompt(self) -> bool {
        match self {
            Self::Tokens | Self::Text | Self::Chat => true,
            Self::Embed | Self::Score => false,
        }
    }
}

crate::named! {
    /// A sampling option an engine may honour.
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
    /// Whether a request may go on from another instance's tokens as from a longer prompt. It is for engines that do not
    /// [`resume`](Self::resume) every request, and are asked only for those whose rest a longer prompt has too:
    /// [`GenerateRequest::resumes_as_prompt`].
    pub resume_as_prompt: bool,
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

    /// Declares that a request may go on from another instance's tokens as from a longer prompt.
    #[must_use]
    pub fn with_resume_as_prompt(mut self) -> Self {
        self.resume_as_prompt = true;
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

    /// Whether the answer to `request` may go on from another instance's tokens.
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
        if request.resumed_tokens != 0
            && let Err(why) = self.resumes(request)
        {
            return Err(EngineError::unsupported(RequestField::ResumedTokens, why));
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
