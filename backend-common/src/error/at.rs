//! [`At`]: what an error is about, as a value that programs read instead of its text.
//!
//! Engines and the Worker create it. Each API of the frontend has one function that maps [`RequestField`] to its own name.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What an error is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum At {
    /// A field of a [`GenerateRequest`](crate::GenerateRequest), which the client can change.
    Request(RequestField),
    /// A flag or configuration key, as the operator writes it (`--threads`, `etcd.endpoints`).
    Setting(String),
    /// Anything else with a name: an operation, a file, a header.
    Other(String),
}

impl At {
    /// Creates [`At::Other`].
    #[must_use]
    pub fn other(name: impl Into<String>) -> Self {
        Self::Other(name.into())
    }

    /// Returns the name alone; for a request's field, [`RequestField::name`].
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Request(field) => field.name(),
            Self::Setting(name) | Self::Other(name) => name,
        }
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<RequestField> for At {
    fn from(field: RequestField) -> Self {
        Self::Request(field)
    }
}

/// A bare name is a setting's.
impl From<&str> for At {
    fn from(name: &str) -> Self {
        Self::Setting(name.to_owned())
    }
}

/// A bare name is a setting's.
impl From<String> for At {
    fn from(name: String) -> Self {
        Self::Setting(name)
    }
}

crate::named! {
    /// A field of a [`GenerateRequest`](crate::GenerateRequest) that an error may be about.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum RequestField {
        /// The model's name.
        Model = "model",
        /// The input: tokens, text, messages, inputs to embed, or pairs to score.
        Prompt = "prompt",
        /// The tools of a chat.
        Tools = "tools",
        /// The most tokens to generate.
        MaxTokens = "max_tokens",
        /// The fewest tokens to generate.
        MinTokens = "min_tokens",
        /// The token ids that end the sequence.
        StopTokenIds = "stop_token_ids",
        /// Whether to continue past the end of the sequence.
        IgnoreEos = "ignore_eos",
        /// The temperature.
        Temperature = "temperature",
        /// The limit of nucleus sampling.
        TopP = "top_p",
        /// How many of the most probable tokens are kept.
        TopK = "top_k",
        /// The minimum probability relative to the best token.
        MinP = "min_p",
        /// The presence penalty.
        PresencePenalty = "presence_penalty",
        /// The frequency penalty.
        FrequencyPenalty = "frequency_penalty",
        /// The repetition penalty.
        RepetitionPenalty = "repetition_penalty",
        /// The biases of tokens.
        LogitBias = "logit_bias",
        /// The seed.
        Seed = "seed",
        /// The log probabilities of the answer.
        Logprobs = "logprobs",
        /// The log probabilities of the prompt.
        PromptLogprobs = "prompt_logprobs",
        /// The grammar that the output must follow.
        Guided = "guided",
        /// The priority.
        Priority = "priority",
        /// The salt of cached prompts.
        CacheSalt = "cache_salt",
        /// The LoRA adapter.
        Adapter = "adapter",
        /// The location of a prefill engine's KV blocks.
        Transfer = "transfer",
        /// The number of prompt tokens that another instance generated.
        ResumedTokens = "resumed_tokens",
        /// The data-parallel rank.
        DataParallelRank = "data_parallel_rank",
        /// Engine-specific values.
        Annotations = "annotations",
    }
}

/// Writes and reads an `Option<At>` as a [`WireAt`].
pub(super) mod wire {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::{At, WireAt};

    pub(in crate::error) fn serialize<S: Serializer>(
        at: &Option<At>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        WireAt::from(at.clone()).serialize(serializer)
    }

    pub(in crate::error) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<At>, D::Error> {
        WireAt::deserialize(deserializer).map(Option::from)
    }
}

/// [`At`] in wire form: at most one of the three is set. A field that this version does not know is [`At::Other`].
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct WireAt {
    #[serde(skip_serializing_if = "Option::is_none")]
    field: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    setting: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    other: Option<String>,
}

impl From<Option<At>> for WireAt {
    fn from(at: Option<At>) -> Self {
        let mut wire = Self::default();
        match at {
            None => {}
            Some(At::Request(field)) => wire.field = Some(field.name().to_owned()),
            Some(At::Setting(name)) => wire.setting = Some(name),
            Some(At::Other(name)) => wire.other = Some(name),
        }
        wire
    }
}

impl From<WireAt> for Option<At> {
    fn from(wire: WireAt) -> Self {
        let of_field = |name: String| match RequestField::from_name(&name) {
            Some(field) => At::Request(field),
            None => At::Other(name),
        };
        let named = wire.field.map(of_field);
        named
            .or(wire.setting.map(At::Setting))
            .or(wire.other.map(At::Other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_names() {
        for field in RequestField::ALL {
            assert_eq!(RequestField::from_name(field.name()), Some(field));
        }
        assert_eq!(RequestField::from_name("--threads"), None);
    }

    #[test]
    fn every_place_survives_the_wire_and_foreign_fields_are_kept_by_name() {
        let all = [
            None,
            Some(At::from(RequestField::TopP)),
            Some(At::from("--threads")),
            Some(At::other("priority")),
        ];
        for at in all {
            assert_eq!(Option::<At>::from(WireAt::from(at.clone())), at);
        }
        let foreign = serde_json::from_str::<WireAt>(r#"{"field": "of_tomorrow"}"#).unwrap();
        assert_eq!(Option::<At>::from(foreign), Some(At::other("of_tomorrow")));
    }
}
