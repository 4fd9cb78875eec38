//! The request of `/v1/chat/completions`.

use std::rc::Rc;

use serde_json::{Map, Value, json};

use super::common::{CommonParams, IGNORED, ParamLimits};
use super::fields::Fields;
use super::guided::{self, GuidedOptions};
use super::logprobs::LogprobOptions;
use super::parts::{ChatMedium, Contents};
use super::tools::{ToolOptions, read_calls};
use crate::error::ApiError;
use crate::json::{JsonBody, Meter};

/// A validated chat completion request. Checks that depend on the model (template, context, capabilities) come later.
///
/// # Source
/// <https://platform.openai.com/docs/api-reference/chat/create>
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The fields shared with completions.
    pub params: CommonParams,
    /// The messages, oldest first. Each has a `role`; content that is only text parts is joined to one string.
    pub messages: Vec<Value>,
    /// Their images and other media, in order.
    pub media: Vec<ChatMedium>,
    /// The tools that it offers.
    pub tools: ToolOptions,
    /// Whether the prompt ends with the beginning of an assistant message.
    pub add_generation_prompt: bool,
    /// Further variables of the chat template.
    pub template_args: Map<String, Value>,
    /// The reasoning effort, for templates that use it.
    pub reasoning_effort: Option<String>,
}

impl ChatRequest {
    /// Parses a request body.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn parse<'a>(
        body: impl Into<JsonBody<'a>>,
        limits: &ParamLimits,
    ) -> Result<Self, ApiError> {
        Self::read(Fields::parse(body)?, limits)
    }

    /// Parses the fields of a request from any source.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub(crate) fn read(mut fields: Fields<'_>, limits: &ParamLimits) -> Result<Self, ApiError> {
        let mut params = CommonParams::read(&mut fields, limits, None)?;
        params.logprobs = LogprobOptions::read_chat(&mut fields)?;
        let format = GuidedOptions::read_response_format(&mut fields)?;
        guided::join(&mut params.guided, format)?;
        let messages = fields.list("messages")?.unwrap_or_default();
        if messages.is_empty() {
            return Err(ApiError::invalid(
                "messages",
                "must hold at least one message",
            ));
        }
        let meter = Rc::clone(fields.meter());
        let mut contents = Contents::new(limits);
        let messages = messages
            .into_iter()
            .enumerate()
            .map(|(index, message)| read_message(index, message, &mut contents, &meter));
        let mut request = Self {
            params,
            messages: messages.collect::<Result<_, _>>()?,
            media: contents.media,
            tools: ToolOptions::read(&mut fields, limits)?,
            add_generation_prompt: fields.bool("add_generation_prompt")?.unwrap_or(true),
            template_args: read_template_args(&mut fields)?,
            reasoning_effort: fields.string("reasoning_effort")?,
        };
        refuse_unsupported(&mut fields)?;
        let hints = fields.finish_request(IGNORED)?;
        request.params.hints = hints.checked(limits.is_strict)?;
        Ok(request)
    }
}

impl ChatRequest {
    /// Sets the positions of the media, for a request converted from another API.
    pub(crate) fn with_media_at(mut self, places: Vec<String>) -> Self {
        for (medium, at) in self.media.iter_mut().zip(places) {
            medium.at = at;
        }
        self
    }
}

fn read_template_args(fields: &mut Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    match fields.take("chat_template_kwargs")? {
        None => Ok(Map::new()),
        Some(Value::Object(args)) => Ok(args),
        Some(other) => Err(fields.wrong_type("chat_template_kwargs", "an object", &other)),
    }
}

/// A message with its content as templates expect it: one string, if it is only text.
fn read_message(
    index: usize,
    message: Value,
    contents: &mut Contents,
    meter: &Meter,
) -> Result<Value, ApiError> {
    let at = |field: &str| format!("messages[{index}]{field}");
    let Value::Object(mut message) = message else {
        return Err(ApiError::invalid(
            at(""),
            "expected an object with a role and content",
        ));
    };
    match message.get_mut("role") {
        Some(Value::String(role)) if role == "developer" => *role = "system".into(),
        Some(Value::String(role)) if role == "function" => {
            return Err(ApiError::unsupported(at(".role"), "use \"tool\""));
        }
        Some(Value::String(role)) if !role.is_empty() => {}
        _ => return Err(ApiError::invalid(at(".role"), "expected a string")),
    }
    for unsupported in ["function_call", "audio"] {
        if message
            .get(unsupported)
            .is_some_and(|value| !value.is_null() && *value != json!([]))
        {
            let why = "it is not available";
            return Err(ApiError::unsupported(at(&format!(".{unsupported}")), why));
        }
    }
    read_calls(&at(""), &mut message, meter)?;
    if message.get("role") == Some(&json!("tool"))
        && !message.get("tool_call_id").is_some_and(Value::is_string)
    {
        let problem = "expected the id of the call that this answers";
        return Err(ApiError::invalid(at(".tool_call_id"), problem));
    }
    let content = match message.shift_remove("content") {
        Some(text @ Value::String(_)) => text,
        Some(Value::Array(parts)) => contents.read(&at(".content"), index, parts)?,
        Some(Value::Null) | None if message.get("role") == Some(&json!("assistant")) => "".into(),
        _ => {
            return Err(ApiError::invalid(
                at(".content"),
                "expected a string or a list of parts",
            ));
        }
    };
    message.insert("content".into(), content);
    Ok(Value::Object(message))
}

/// Refuses fields that the API has and this server does not support (yet).
fn refuse_unsupported(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    fields.refuse(
        "modalities",
        &[json!(["text"])],
        "only [\"text\"] is available",
    )?;
    fields.hint("verbosity", &["medium"], "only \"medium\" is available")?;
    for name in ["audio", "web_search_options", "moderation"] {
        fields.refuse(name, &[], "it is not available")?;
    }
    Ok(())
}
