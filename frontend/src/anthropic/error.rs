//! Errors in Anthropic's format.

use std::borrow::Cow;

use genset_backend_common::RequestField;
use http::StatusCode;
use serde_json::{Value, json};

use crate::error::{ApiError, Param};

/// This API's name for a position in a request.
#[must_use]
pub fn param_name(param: &Param) -> Cow<'_, str> {
    match param {
        Param::Request(RequestField::Prompt) => "messages".into(),
        Param::Request(RequestField::Guided) => "output_config.format".into(),
        Param::Request(field) => field.name().into(),
        Param::Chat(path) => of_chat(path),
        Param::Path(path) => path.into(),
    }
}

/// Each request is converted to a chat. Returns this API's name for a path in that chat.
fn of_chat(path: &str) -> Cow<'_, str> {
    match path {
        "stop" => "stop_sequences".into(),
        "tool_choice.function.name" => "tool_choice.name".into(),
        "parallel_tool_calls" => "tool_choice.disable_parallel_tool_use".into(),
        "reasoning_effort" => "output_config.effort".into(),
        "response_format" => "output_config.format".into(),
        "response_format.json_schema.schema" => "output_config.format.schema".into(),
        tool if tool.starts_with("tools[") => tool
            .replace(".function", "")
            .replace(".parameters", ".input_schema")
            .into(),
        own => own.into(),
    }
}

/// The body of an error: `{"type": "error", "error": {"type", "message"}, "request_id"}`. The message names the field.
///
/// # Source
/// <https://docs.anthropic.com/en/api/errors>
#[must_use]
pub fn error_json(error: &ApiError, request_id: &str) -> Value {
    let message = error.message_with_param(param_name);
    json!({
        "type": "error",
        "error": {"type": kind(error.status), "message": message},
        "request_id": request_id,
    })
}

/// Anthropic's error `type` for the status.
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
