//! This API's names for the fields of a chat.

use std::borrow::Cow;

use genset_backend_common::RequestField;

use crate::error::Param;

/// This API's name for a position in a request.
#[must_use]
pub fn param_name(param: &Param) -> Cow<'_, str> {
    match param {
        Param::Request(RequestField::Prompt) => "input".into(),
        Param::Request(RequestField::MaxTokens) => "max_output_tokens".into(),
        Param::Request(RequestField::Logprobs) => "top_logprobs".into(),
        Param::Request(RequestField::Guided) => "text.format".into(),
        Param::Request(field) => field.name().into(),
        Param::Chat(path) => of_chat(path),
        Param::Path(path) => path.into(),
    }
}

/// Each request is converted to a chat. Returns this API's name for a path in that chat.
fn of_chat(path: &str) -> Cow<'_, str> {
    match path {
        "messages" => "input".into(),
        "max_completion_tokens" => "max_output_tokens".into(),
        "logprobs" => "top_logprobs".into(),
        "reasoning_effort" => "reasoning.effort".into(),
        "response_format" => "text.format".into(),
        "response_format.json_schema.name" => "text.format.name".into(),
        "response_format.json_schema.schema" => "text.format.schema".into(),
        "tool_choice.function.name" | "tool_choice.custom.name" => "tool_choice.name".into(),
        choice if choice.starts_with("tool_choice.allowed_tools.") => choice
            .replace(".allowed_tools", "")
            .replace(".function", "")
            .replace(".custom", "")
            .into(),
        tool if tool.starts_with("tools[") => tool.replace(".function", "").into(),
        own => own.into(),
    }
}
