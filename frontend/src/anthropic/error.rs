//! Errors as Anthropic's clients know them.

use http::StatusCode;
use serde_json::{Value, json};

use crate::error::ApiError;

/// The fields of a chat and what a Messages client calls them.
const NAMES: [(&str, &str); 7] = [
    ("prompt", "messages"),
    ("stop", "stop_sequences"),
    ("tool_choice.function.name", "tool_choice.name"),
    (
        "parallel_tool_calls",
        "tool_choice.disable_parallel_tool_use",
    ),
    ("reasoning_effort", "output_config.effort"),
    ("response_format", "output_config.format"),
    (
        "response_format.json_schema.schema",
        "output_config.format.schema",
    ),
];

/// The error as a client of the Messages API finds it: a chat's field has this API's name, in `param` and in the message.
#[must_use]
pub fn in_our_words(error: ApiError) -> ApiError {
    error.renamed(our_name)
}

fn our_name(field: &str) -> String {
    if let Some((_, ours)) = NAMES.iter().find(|(theirs, _)| *theirs == field) {
        return (*ours).to_owned();
    }
    if field.starts_with("tools[") {
        let field = field.replace(".function", "");
        return field.replace(".parameters", ".input_schema");
    }
    field.to_owned()
}

/// The body of an error: `{"type": "error", "error": {"type", "message"}, "request_id"}`. The message names the field.
///
/// # Source
/// <https://docs.anthropic.com/en/api/errors>
#[must_use]
pub fn error_json(error: &ApiError, request_id: &str) -> Value {
    let message = match &error.param {
        Some(param) if !error.message.contains(param) => format!("{param}: {}", error.message),
        _ => error.message.clone(),
    };
    json!({
        "type": "error",
        "error": {"type": kind(error.status), "message": message},
        "request_id": request_id,
    })
}

/// Anthropic's `type` for the status.
fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    }
}
