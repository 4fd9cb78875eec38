//! Responses: whole ones as JSON values, streamed ones as server-sent events written straight into a buffer.

use bytes::{BufMut, BytesMut};
use genset_backend_common::{FinishReason, context::Explanation};
use serde::Serialize;
use serde_json::{Value, json};

use super::logprobs::logprobs_json;
use super::names::{chat_name, completion_name};
use crate::answer::{AnswerEnd, Completed, TokenLogprobs, TotalUsage};
use crate::error::{ApiError, ParamName};
use crate::markup::{Delta, Message};

/// The `system_fingerprint`.
const FINGERPRINT: &str = concat!("genset-", env!("CARGO_PKG_VERSION"));

/// The only service tier.
pub(super) const SERVICE_TIER: &str = "default";

/// Which API an answer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

impl Api {
    /// The prefix of response ids.
    #[must_use]
    pub const fn id_prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl-",
            Self::Completions => "cmpl-",
        }
    }

    /// The API's name for a position in a request.
    #[must_use]
    pub const fn param_name(self) -> ParamName {
        match self {
            Self::Chat => chat_name,
            Self::Completions => completion_name,
        }
    }

    const fn object(self, is_chunk: bool) -> &'static str {
        match (self, is_chunk) {
            (Self::Chat, false) => "chat.completion",
            (Self::Chat, true) => "chat.completion.chunk",
            (Self::Completions, _) => "text_completion",
        }
    }
}

/// What every response and chunk of one request repeats.
#[derive(Debug, Clone)]
pub struct CompletionHead {
    /// The API.
    pub api: Api,
    /// The response's id.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name, as the client wrote it.
    pub model: String,
}

/// Why an answer ended, in OpenAI's terms. Reaching the length limit takes precedence over calls, and so does a stop string
/// that cut the last call.
pub(crate) fn finish_reason(end: &AnswerEnd, has_calls: bool, has_open_call: bool) -> &'static str {
    let is_cut = has_open_call && end.stop_string.is_some();
    match end.reason {
        FinishReason::Stop if has_calls && !is_cut => "tool_calls",
        FinishReason::Stop => "stop",
        // Nobody reads a cancelled answer; if somebody does, it was cut short.
        FinishReason::Length | FinishReason::Cancelled => "length",
        FinishReason::ContentFilter => "content_filter",
    }
}

/// The `usage` object. Uncounted tokens are 0.
fn usage_json(total: &TotalUsage) -> Value {
    let TotalUsage {
        usage,
        reasoning_tokens,
    } = total;
    let predictions = usage.predictions.unwrap_or_default();
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens(),
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens.unwrap_or(0),
            "cache_write_tokens": 0,
            "text_tokens": usage.prompt_tokens,
            "image_tokens": 0,
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "text_tokens": usage.completion_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": predictions.accepted,
            "rejected_prediction_tokens": predictions.rejected,
        },
    })
}

/// One whole answer.
#[must_use]
pub fn completed_choice(api: Api, index: usize, answer: &Completed) -> Value {
    let Completed {
        message,
        end,
        rated,
        reasoning_tokens: _,
        has_open_call,
    } = answer;
    let has_calls = !message.tool_calls.is_empty();
    let reason = finish_reason(end, has_calls, *has_open_call);
    let logprobs = rated.as_ref().map(|rated| logprobs_json(api, rated));
    match api {
        Api::Chat => json!({
            "index": index,
            "message": message_json(message),
            "logprobs": logprobs,
            "finish_reason": reason,
        }),
        Api::Completions => json!({
            "text": message.content,
            "index": index,
            "logprobs": logprobs,
            "finish_reason": reason,
        }),
    }
}

/// The `message` of a choice: every field that clients know, and reasoning if there is any. Content is null if the message
/// has only calls.
fn message_json(message: &Message) -> Value {
    let mut fields = json!({
        "role": "assistant",
        "content": message.content,
        "refusal": null,
        "annotations": [],
        "audio": null,
        "function_call": null,
        "tool_calls": null,
    });
    if message.content.is_empty() && !message.tool_calls.is_empty() {
        fields["content"] = Value::Null;
    }
    if !message.reasoning.is_empty() {
        fields["reasoning_content"] = message.reasoning.as_str().into();
    }
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter();
        let calls = calls.map(|it| call_json(&it.id, &it.name, &it.arguments, it.is_custom));
        fields["tool_calls"] = calls.collect();
    }
    fields
}

/// A call in a message.
pub(crate) fn call_json(id: &str, name: &str, text: &str, is_custom: bool) -> Value {
    let (kind, field) = call_fields(is_custom);
    json!({"id": id, "type": kind, kind: {"name": name, field: text}})
}

/// The type of a call, and the name of its text.
const fn call_fields(is_custom: bool) -> (&'static str, &'static str) {
    if is_custom {
        ("custom", "input")
    } else {
        ("function", "arguments")
    }
}

/// A whole response.
#[must_use]
pub fn response_json(head: &CompletionHead, choices: Vec<Value>, total: &TotalUsage) -> Value {
    let mut response = json!({
        "id": head.id,
        "object": head.api.object(false),
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": usage_json(total),
        "system_fingerprint": FINGERPRINT,
    });
    if let (Api::Chat, Some(fields)) = (head.api, response.as_object_mut()) {
        fields.insert("service_tier".into(), SERVICE_TIER.into());
        fields.insert("metadata".into(), Value::Null);
        fields.insert("moderation".into(), Value::Null);
    }
    response
}

/// The `genset` object of a response.
pub(crate) fn explanation_json(explanation: &Explanation) -> Value {
    json!({"router": explanation.decisions()})
}

/// Writes the events of one stream. Constant parts are rendered once; a text event is two copies and an escape.
///
/// # Examples
/// ```
/// use bytes::BytesMut;
/// use genset_frontend::openai::{Api, ChunkEncoder, CompletionHead};
///
/// let head = CompletionHead { api: Api::Completions, id: "cmpl-1".into(), created: 0, model: "m".into() };
/// let encoder = ChunkEncoder::new(&head, false);
/// let mut out = BytesMut::new();
/// encoder.text(0, "say \"hi\"", &mut out);
/// assert!(out.starts_with(b"data: {") && out.ends_with(b"}\n\n"));
/// assert!(String::from_utf8_lossy(&out).contains(r#""text":"say \"hi\"""#));
/// ```
#[derive(Debug, Clone)]
pub struct ChunkEncoder {
    api: Api,
    /// The bytes before the choice's index.
    before_index: Vec<u8>,
    /// From the end of the choices to the end of the event.
    after_choices: &'static [u8],
}

impl ChunkEncoder {
    /// An encoder for one response. With `has_usage`, every chunk has a `usage`, null except in the last.
    #[must_use]
    pub fn new(head: &CompletionHead, has_usage: bool) -> Self {
        let mut fields = json!({
            "id": head.id,
            "object": head.api.object(true),
            "created": head.created,
            "model": head.model,
            "system_fingerprint": FINGERPRINT,
        });
        if head.api == Api::Chat {
            fields["service_tier"] = SERVICE_TIER.into();
        }
        // The object ends with a brace; the choices replace it.
        let fields = fields.to_string();
        let open = fields.strip_suffix('}').unwrap_or(&fields);
        let before_index = format!("data: {open},\"choices\":[").into_bytes();
        let after_choices: &[u8] = if has_usage {
            b"],\"usage\":null}\n\n"
        } else {
            b"]}\n\n"
        };
        Self {
            api: head.api,
            before_index,
            after_choices,
        }
    }

    fn begin(&self, index: usize, out: &mut BytesMut) {
        out.put_slice(&self.before_index);
        out.put_slice(b"{\"index\":");
        put_json(&index, out);
    }

    /// Writes the first event of a choice, with its role. Completions have none.
    pub fn start(&self, index: usize, out: &mut BytesMut) {
        match self.api {
            Api::Completions => {}
            Api::Chat => {
                self.begin(index, out);
                out.put_slice(
                    b",\"delta\":{\"role\":\"assistant\",\"content\":\"\",\"refusal\":null},\"logprobs\":null,\"finish_reason\":null}",
                );
                out.put_slice(self.after_choices);
            }
        }
    }

    /// Writes a piece of text.
    pub fn text(&self, index: usize, text: &str, out: &mut BytesMut) {
        self.delta(index, Delta::Content(text), &[], out);
    }

    /// Writes a delta with its log probabilities. Completions have only content.
    pub fn delta(
        &self,
        index: usize,
        delta: Delta<'_>,
        rated: &[TokenLogprobs],
        out: &mut BytesMut,
    ) {
        self.begin(index, out);
        match (self.api, delta) {
            (Api::Completions, Delta::Content(text)) => {
                out.put_slice(b",\"text\":");
                put_json(text, out);
            }
            (Api::Chat | Api::Completions, delta) => {
                out.put_slice(b",\"delta\":{");
                put_delta(delta, out);
                out.put_slice(b"}");
            }
        }
        self.put_logprobs(rated, out);
        out.put_slice(b",\"finish_reason\":null}");
        out.put_slice(self.after_choices);
    }

    fn put_logprobs(&self, rated: &[TokenLogprobs], out: &mut BytesMut) {
        if rated.is_empty() {
            return out.put_slice(b",\"logprobs\":null");
        }
        out.put_slice(b",\"logprobs\":");
        put_json(&logprobs_json(self.api, rated), out);
    }

    /// Writes the last event of a choice, with its finish reason, which is written as it is, and the remaining log probabilities.
    pub fn finish(
        &self,
        index: usize,
        reason: &'static str,
        rated: &[TokenLogprobs],
        out: &mut BytesMut,
    ) {
        self.begin(index, out);
        out.put_slice(match self.api {
            Api::Chat => b",\"delta\":{}".as_slice(),
            Api::Completions => b",\"text\":\"\"",
        });
        self.put_logprobs(rated, out);
        out.put_slice(b",\"finish_reason\":\"");
        out.put_slice(reason.as_bytes());
        out.put_slice(b"\"}");
        out.put_slice(self.after_choices);
    }

    /// Writes the usage event: no choices.
    pub fn usage(&self, total: &TotalUsage, out: &mut BytesMut) {
        out.put_slice(&self.before_index);
        out.put_slice(b"],\"usage\":");
        put_json(&usage_json(total), out);
        out.put_slice(b"}\n\n");
    }

    /// Writes how the answers were routed: an event without choices.
    pub fn explanation(&self, explanation: &Explanation, out: &mut BytesMut) {
        out.put_slice(&self.before_index);
        out.put_slice(b"],\"genset\":");
        put_json(&explanation_json(explanation), out);
        out.put_slice(self.after_choices.get(1..).unwrap_or_default());
    }

    /// Writes an error after the first byte.
    pub fn error(&self, error: &ApiError, out: &mut BytesMut) {
        out.put_slice(b"data: ");
        put_json(&error.to_json(self.api.param_name()), out);
        out.put_slice(b"\n\n");
    }

    /// Writes the end of the stream.
    pub fn done(&self, out: &mut BytesMut) {
        out.put_slice(b"data: [DONE]\n\n");
    }
}

fn put_delta(delta: Delta<'_>, out: &mut BytesMut) {
    match delta {
        Delta::Content(text) => {
            out.put_slice(b"\"content\":");
            put_json(text, out);
        }
        Delta::Reasoning(text) => {
            out.put_slice(b"\"reasoning_content\":");
            put_json(text, out);
        }
        Delta::ToolCall {
            index,
            name,
            id,
            is_custom,
        } => {
            let (kind, field) = call_fields(is_custom);
            put_call(index, out);
            out.put_slice(b",\"id\":");
            put_json(id, out);
            put_parts([",\"type\":\"", kind, "\",\"", kind, "\":{\"name\":"], out);
            put_json(name, out);
            put_parts([",\"", field, "\":\"\"}}]"], out);
        }
        Delta::Arguments {
            index,
            text,
            is_custom,
        } => {
            let (kind, field) = call_fields(is_custom);
            put_call(index, out);
            put_parts([",\"", kind, "\":{\"", field, "\":"], out);
            put_json(text, out);
            out.put_slice(b"}}]");
        }
    }
}

/// Writes a named event.
pub(crate) fn put_event(name: &str, data: &impl Serialize, out: &mut BytesMut) {
    put_parts(["event: ", name, "\ndata: "], out);
    put_json(data, out);
    out.put_slice(b"\n\n");
}

pub(crate) fn put_parts<const N: usize>(parts: [&str; N], out: &mut BytesMut) {
    for part in parts {
        out.put_slice(part.as_bytes());
    }
}

/// Writes the beginning of a call's delta, up to its index.
fn put_call(index: u32, out: &mut BytesMut) {
    out.put_slice(b"\"tool_calls\":[{\"index\":");
    put_json(&index, out);
}

/// The `usage` object of a request for which nothing is generated.
pub(super) fn prompt_usage(prompt_tokens: u32) -> Value {
    json!({"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens})
}

/// A value of strings and numbers as JSON.
pub(crate) fn json_text(value: &impl Serialize) -> String {
    let written = serde_json::to_string(value);
    debug_assert!(written.is_ok(), "strings and numbers are JSON");
    written.unwrap_or_default()
}

pub(crate) fn put_json<T: Serialize + ?Sized>(value: &T, out: &mut BytesMut) {
    let written = serde_json::to_writer(out.writer(), value);
    debug_assert!(
        written.is_ok(),
        "a buffer takes whatever is written, and these values are JSON"
    );
}
