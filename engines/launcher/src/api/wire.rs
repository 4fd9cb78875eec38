//! JSON types that several APIs share: OpenAI's completions with the servers' additions, errors, models. Fields that are not
//! read here are ignored.

use genset_backend_common::output::{TokenLogprob, TopLogprob};
use genset_backend_common::{EngineError, ErrorKind, TokenId};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::unreadable;

/// llama-server's counts so far.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Timings {
    /// The number of prompt tokens found in its cache.
    pub(super) cache_n: Option<u32>,
    /// The number of tokens generated.
    pub(super) predicted_n: Option<u32>,
}

/// An event of a streamed completion.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Chunk {
    pub(super) choices: Vec<Choice>,
    pub(super) usage: Option<UsageInfo>,
    /// llama-server's, in each event if requested.
    pub(super) timings: Timings,
    pub(super) error: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Choice {
    pub(super) text: Option<String>,
    pub(super) delta: Option<Delta>,
    pub(super) token_ids: Option<Vec<TokenId>>,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish_reason: Option<String>,
    /// A token id, or the text of a stop string.
    pub(super) stop_reason: Option<Value>,
}

impl Choice {
    /// Whether it contains only the role, like the first event of a chat.
    pub(super) fn is_role_alone(&self) -> bool {
        let content = self.delta.as_ref().map(|delta| delta.content.as_deref());
        content.is_some_and(|content| content.unwrap_or_default().is_empty())
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Delta {
    pub(super) content: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Logprobs {
    pub(super) token_logprobs: Vec<Option<f32>>,
    pub(super) top_logprobs: Option<Vec<Option<Map<String, Value>>>>,
    /// The log probabilities of a chat.
    pub(super) content: Option<Vec<ChatLogprob>>,
}

/// The log probabilities of a token in a chat.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ChatLogprob {
    pub(super) token: String,
    pub(super) logprob: f32,
    pub(super) top_logprobs: Vec<ChatLogprob>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct UsageInfo {
    pub(super) prompt_tokens: Option<u32>,
    pub(super) completion_tokens: Option<u32>,
    pub(super) prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct PromptTokensDetails {
    pub(super) cached_tokens: Option<u32>,
}

impl UsageInfo {
    pub(super) fn cached_tokens(&self) -> Option<u32> {
        self.prompt_tokens_details.as_ref()?.cached_tokens
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Models {
    pub(super) data: Vec<Model>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Model {
    pub(super) max_model_len: Option<u32>,
}

/// The transfer parameters in vLLM's answer to a prefill; `None` if there are none.
///
/// # Errors
/// `Disconnected` if the answer cannot be decoded.
pub(crate) fn kept_blocks(answer: &[u8]) -> Result<Option<Value>, EngineError> {
    #[derive(Deserialize)]
    struct Prefilled {
        kv_transfer_params: Option<Value>,
    }
    let prefilled: Prefilled = serde_json::from_slice(answer).map_err(unreadable)?;
    Ok(prefilled.kv_transfer_params)
}

/// One position's log probabilities, with the candidates sorted and cut to the number requested.
pub(crate) fn token_logprob(logprob: f32, mut top: Vec<TopLogprob>, asked: u32) -> TokenLogprob {
    top.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
    top.truncate(usize::try_from(asked).unwrap_or(usize::MAX));
    for candidate in &mut top {
        candidate.logprob = candidate.logprob.min(0.0);
    }
    // Some servers round the log probability of a certain token to slightly above 0.
    TokenLogprob {
        logprob: logprob.min(0.0),
        top,
    }
}

/// llama-server's (b11434) message when the running requests have more tokens than its shared KV cache holds. The status is
/// that of any fault, so only the message identifies it.
const LLAMA_IS_FULL: &str = "Context size has been exceeded.";

/// The maximum length of a server's message that is passed on, in characters.
const MESSAGE_CHARS: usize = 300;

/// Converts a server's JSON error: OpenAI's `{"error": {...}}`, its content, or FastAPI's `{"detail": ...}`.
pub(crate) fn error_of(status: Option<u16>, body: &Value) -> EngineError {
    let inside = body
        .get("error")
        .filter(|error| !error.is_null())
        .unwrap_or(body);
    let code = inside.get("code");
    let status = status
        .filter(|status| *status != 200)
        .or_else(|| {
            code.and_then(Value::as_u64)
                .and_then(|code| u16::try_from(code).ok())
        })
        .unwrap_or(500);
    let is_context = [inside.get("type"), code]
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .any(|name| ["exceed_context_size_error", "context_length_exceeded"].contains(&name));
    let message = inside
        .get("message")
        .or_else(|| body.get("detail"))
        .unwrap_or(inside);
    let message = message
        .as_str()
        .map_or_else(|| message.to_string(), str::to_owned);
    let kind = if is_context {
        ErrorKind::ContextLengthExceeded
    } else if status == 500 && message == LLAMA_IS_FULL {
        ErrorKind::Overloaded
    } else {
        kind_of(status)
    };
    let shown: String = message.chars().take(MESSAGE_CHARS).collect();
    EngineError::new(
        kind,
        format!("the server answered with status {status}: {shown}"),
    )
}

/// The error kind of a status.
fn kind_of(status: u16) -> ErrorKind {
    match status {
        400 | 413 | 422 => ErrorKind::InvalidArgument,
        404 => ErrorKind::NotFound,
        408 | 504 => ErrorKind::DeadlineExceeded,
        429 => ErrorKind::Overloaded,
        502 | 503 => ErrorKind::Unavailable,
        _ => ErrorKind::Internal,
    }
}
