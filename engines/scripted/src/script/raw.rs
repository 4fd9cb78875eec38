//! The types of the script file. Serde refuses unknown keys, wrong types and negative times here.

use std::collections::{BTreeMap, BTreeSet};

use genset_backend_common::{ErrorKind, config::GuidedKind};
use serde::Deserialize;
use toml::Spanned;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawScript {
    #[serde(default)]
    pub(super) defaults: RawDefaults,
    #[serde(default)]
    pub(super) prompt: RawPrompt,
    #[serde(default)]
    pub(super) guided: BTreeSet<GuidedKind>,
    #[serde(default)]
    pub(super) reply: Vec<Spanned<RawReply>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawDefaults {
    pub(super) first_token_ms: Option<u64>,
    pub(super) token_ms: Option<u64>,
    pub(super) chunk_chars: Option<usize>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawPrompt {
    pub(super) user_start: Option<String>,
    pub(super) user_end: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawReply {
    #[serde(rename = "match")]
    pub(super) matcher: Option<RawMatch>,
    pub(super) times: Option<u32>,
    pub(super) text: Option<String>,
    pub(super) chunks: Option<Vec<String>>,
    pub(super) chunk_chars: Option<usize>,
    pub(super) substitute: Option<bool>,
    pub(super) first_token_ms: Option<u64>,
    pub(super) token_ms: Option<u64>,
    pub(super) finish_reason: Option<RawFinishReason>,
    pub(super) logprobs: Vec<RawLogprob>,
    pub(super) fault: Option<RawFault>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawMatch {
    pub(super) exact: Option<String>,
    pub(super) contains: Option<String>,
    pub(super) regex: Option<String>,
    pub(super) last_role: Option<String>,
}

/// The finish reasons that a script may use; `cancelled` is not one of them.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RawFinishReason {
    Stop,
    Length,
    ContentFilter,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawLogprob {
    pub(super) logprob: f32,
    #[serde(default)]
    pub(super) alternatives: BTreeMap<String, f32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawFault {
    pub(super) action: RawAction,
    pub(super) kind: Option<ErrorKind>,
    pub(super) message: Option<String>,
    pub(super) retry_after_ms: Option<u64>,
    pub(super) after_chunks: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RawAction {
    Refuse,
    Error,
    Hang,
    Panic,
    Vanish,
}
