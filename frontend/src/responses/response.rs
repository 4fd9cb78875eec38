//! The `response` object: its head, the fields that it repeats from the request, and how it ended.

use std::sync::Arc;

use genset_backend_common::{FinishReason, context::Explanation};
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::error::param_name;
use super::output::{Output, OutputJson};
use super::tools::Namespaces;
use crate::answer::{AnswerEnd, TotalUsage};
use crate::error::ApiError;
use crate::json::value_bytes;
use crate::openai::{
    Fields, check_options, explanation_json, is_short, json_bytes, json_text, short_texts,
};

/// The number of serialized copies of the repeated fields: in two events at the beginning of a stream and one at the end,
/// which may wait for a slow client.
const WRITTEN_COPIES: usize = 3;

/// The most characters of an identifier.
const IDENTIFIER_LETTERS: usize = 64;

/// Fields that a response repeats, and their defaults. The sampling has none here: the engine has its own.
fn repeated_fields() -> [(&'static str, Value); 20] {
    [
        ("background", json!(false)),
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("max_tool_calls", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("previous_response_id", Value::Null),
        ("prompt_cache_key", Value::Null),
        ("prompt_cache_options", Value::Null),
        ("prompt_cache_retention", Value::Null),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("safety_identifier", Value::Null),
        ("temperature", Value::Null),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_logprobs", json!(0)),
        ("top_p", Value::Null),
        ("truncation", json!("disabled")),
        ("user", Value::Null),
    ]
}

/// The fields that a response repeats from its request.
#[derive(Debug, Clone, Default)]
pub struct Repeated {
    fields: Map<String, Value>,
    /// Whether text has log probabilities.
    pub(super) has_logprobs: bool,
    /// The functions of its namespaces.
    pub(super) namespaces: Namespaces,
}

impl Repeated {
    pub(super) fn copy_of(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let values = repeated_fields().map(|(name, default)| {
            let value = fields.copy(name)?;
            if let Some(value) = &value {
                check(name, value)?;
            }
            Ok::<_, ApiError>((name.to_owned(), value.unwrap_or(default)))
        });
        Ok(Self {
            fields: values.into_iter().collect::<Result<_, _>>()?,
            ..Self::default()
        })
    }

    /// Adds the fields to its functions that those of OpenAI's responses always have.
    pub(super) fn complete_functions(&mut self) {
        let tools = self.fields.get_mut("tools").and_then(Value::as_array_mut);
        for tool in tools.into_iter().flatten() {
            complete_function(tool);
            let own = tool.get_mut("tools").and_then(Value::as_array_mut);
            own.into_iter().flatten().for_each(complete_function);
        }
    }

    /// Its approximate memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.namespaces.bytes() + self.fields.values().map(value_bytes).sum::<usize>()
    }

    /// Its approximate memory in bytes, including the serialized copies.
    pub(crate) fn bytes_with_copies(&self) -> usize {
        let written = json_bytes(&self.fields).saturating_mul(WRITTEN_COPIES);
        self.bytes().saturating_add(written)
    }
}

fn complete_function(tool: &mut Value) {
    if let Value::Object(tool) = tool
        && tool.get("type").is_some_and(|kind| kind == "function")
    {
        for name in ["parameters", "strict"] {
            tool.entry(name).or_insert(Value::Null);
        }
    }
}

/// Validates repeated fields that nothing else reads, as OpenAI's API does.
fn check(name: &str, value: &Value) -> Result<(), ApiError> {
    let problem = match name {
        "metadata" => {
            short_texts(name, value)?;
            return Ok(());
        }
        "prompt_cache_options" => return check_options(name, value),
        "safety_identifier" | "prompt_cache_retention" => match value.as_str() {
            Some(text) if is_short(text, IDENTIFIER_LETTERS) => return Ok(()),
            _ => format!("expected a string of at most {IDENTIFIER_LETTERS} letters"),
        },
        "prompt_cache_key" | "user" if !value.is_string() => "expected a string".into(),
        "max_tool_calls" if !is_count(value) => {
            "expected an integer between 0 and 4294967295".into()
        }
        _ => return Ok(()),
    };
    Err(ApiError::invalid(name, problem))
}

fn is_count(value: &Value) -> bool {
    let count = value.as_u64();
    count.is_some_and(|count| u32::try_from(count).is_ok())
}

/// The common part of all `response` objects of one request.
#[derive(Debug, Clone)]
pub struct ResponseHead {
    /// The response's id.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name, as the client wrote it.
    pub model: String,
    /// The most bytes of the response and its output that are stored; `None` if nothing is stored. Failed responses are not
    /// stored.
    pub store_bytes: Option<usize>,
    /// How it is routed, if the client asks.
    pub explanation: Option<Explanation>,
    /// The repeated fields.
    pub repeated: Arc<Repeated>,
}

/// How a response ended.
#[derive(Debug, Clone, PartialEq)]
pub enum ResponseEnd {
    /// It is complete. The number is the time of completion, in seconds since 1970.
    Completed(TotalUsage, u64),
    /// It was cut short.
    Incomplete(TotalUsage, &'static str),
    /// It failed after it had begun.
    Failed(Box<ApiError>),
}

impl ResponseEnd {
    /// The end of a response, from its answer's end, its usage, and `now` in seconds since 1970.
    #[must_use]
    pub fn new(end: &AnswerEnd, total: TotalUsage, now: u64) -> Self {
        match end.reason {
            FinishReason::Stop => Self::Completed(total, now),
            // Nobody reads a cancelled answer; if somebody does, it was cut short.
            FinishReason::Length | FinishReason::Cancelled => {
                Self::Incomplete(total, "max_output_tokens")
            }
            FinishReason::ContentFilter => Self::Incomplete(total, "content_filter"),
        }
    }

    /// The response's `status`.
    #[must_use]
    pub const fn status(&self) -> &'static str {
        match self {
            Self::Completed(..) => "completed",
            Self::Incomplete(..) => "incomplete",
            Self::Failed(_) => "failed",
        }
    }

    /// The status of the last item.
    #[must_use]
    pub const fn last_item_status(&self) -> &'static str {
        match self {
            Self::Completed(..) => "completed",
            Self::Incomplete(..) | Self::Failed(_) => "incomplete",
        }
    }
}

impl ResponseHead {
    /// Serializes a response that has just begun.
    pub(super) fn begun(&self) -> ResponseJson<'_> {
        ResponseJson {
            head: self,
            end: None,
            output: OutputJson::NONE,
            is_kept: self.store_bytes.is_some(),
        }
    }

    /// Returns the ended response as JSON. If it is too large to be stored, it says so.
    pub(crate) fn ended(&self, output: &Output, end: &ResponseEnd) -> String {
        let room = match end {
            ResponseEnd::Completed(..) | ResponseEnd::Incomplete(..) => self.store_bytes,
            ResponseEnd::Failed(_) => None,
        };
        let room = room.and_then(|room| room.checked_sub(output.kept_bytes()));
        let written = self.written(output, end, room.is_some());
        match room {
            Some(room) if written.len() > room => {
                drop(written);
                self.written(output, end, false)
            }
            Some(_) | None => written,
        }
    }

    fn written(&self, output: &Output, end: &ResponseEnd, is_kept: bool) -> String {
        json_text(&ResponseJson {
            head: self,
            end: Some(end),
            output: output.json(end.last_item_status()),
            is_kept,
        })
    }
}

/// Fields without a value, which clients expect.
const EMPTY: [&str; 8] = [
    "conversation",
    "prompt",
    "moderation",
    "access_programs",
    "image",
    "input_transformations",
    "prompt_cache_diagnostics",
    "tool_usage",
];

/// A `response` object to serialize. It copies nothing.
#[derive(Debug, Clone, Copy)]
pub(super) struct ResponseJson<'a> {
    head: &'a ResponseHead,
    /// `None` if it has just begun.
    end: Option<&'a ResponseEnd>,
    output: OutputJson<'a>,
    is_kept: bool,
}

impl Serialize for ResponseJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self {
            head,
            end,
            output,
            is_kept,
        } = *self;
        let (completed_at, details, total, error) = match end {
            None => (None, None, None, None),
            Some(ResponseEnd::Completed(total, at)) => (Some(at), None, Some(total), None),
            Some(ResponseEnd::Incomplete(total, reason)) => {
                (None, Some(json!({"reason": reason})), Some(total), None)
            }
            Some(ResponseEnd::Failed(error)) => (None, None, None, Some(error_json(error))),
        };
        let repeated = &head.repeated.fields;
        let mut object = serializer.serialize_map(None)?;
        object.serialize_entry("id", &head.id)?;
        object.serialize_entry("object", "response")?;
        object.serialize_entry("created_at", &head.created)?;
        object.serialize_entry("completed_at", &completed_at)?;
        object.serialize_entry("status", end.map_or("in_progress", ResponseEnd::status))?;
        object.serialize_entry("error", &error)?;
        object.serialize_entry("incomplete_details", &details)?;
        object.serialize_entry("model", &head.model)?;
        object.serialize_entry("output", &output)?;
        object.serialize_entry("service_tier", "default")?;
        object.serialize_entry("store", &is_kept)?;
        // The only repeated field with a place here.
        object.serialize_entry("truncation", &repeated.get("truncation"))?;
        object.serialize_entry("usage", &total.map(usage_json))?;
        for name in EMPTY {
            object.serialize_entry(name, &())?;
        }
        for (name, value) in repeated.iter().filter(|(name, _)| *name != "truncation") {
            object.serialize_entry(name, value)?;
        }
        if let (Some(_), Some(explanation)) = (end, &head.explanation) {
            object.serialize_entry("genset", &explanation_json(explanation))?;
        }
        object.end()
    }
}

/// The `error` of a failed response. Its `code` is one of those that clients know.
fn error_json(error: &ApiError) -> Value {
    let code = match error.status {
        http::StatusCode::TOO_MANY_REQUESTS => "rate_limit_exceeded",
        status if status.is_client_error() => "invalid_prompt",
        _ => "server_error",
    };
    json!({"code": code, "message": error.message(param_name)})
}

fn usage_json(total: &TotalUsage) -> Value {
    let usage = &total.usage;
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens.unwrap_or(0),
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": total.reasoning_tokens},
        "total_tokens": usage.total_tokens(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_repeated_counts_once_as_values_and_else_as_text() {
        let city = json!({"type": "string", "enum": ["Oslo", "Rome"]});
        let parameters = json!({"type": "object", "properties": {"city": city}});
        let tool = json!({"type": "function", "name": "f", "parameters": parameters});
        let tools = Value::Array(vec![tool; 200]);
        let text = tools.to_string().len();
        let repeated = Repeated {
            fields: Map::from_iter([("tools".to_owned(), tools)]),
            ..Repeated::default()
        };
        let copies = repeated.bytes_with_copies() - repeated.bytes();
        assert!(copies > 3 * text && copies < 4 * text, "{copies} {text}");
    }
}
