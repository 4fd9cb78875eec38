//! The request of `/v1/messages` and of `/v1/messages/count_tokens`.

use std::rc::Rc;

use serde_json::{Map, Value, json};

use super::content::chat_messages;
use super::options::{read_context_management, read_output_config, read_thinking, read_tools};
use crate::error::ApiError;
use crate::json::JsonBody;
use crate::openai::{ChatRequest, Fields, ParamLimits};

/// Fields with the same name in a chat request.
const SAME: [&str; 6] = [
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "cache_salt",
];

/// Fields that the API has and this server does not support.
const REFUSED: [&str; 6] = [
    "container",
    "fallbacks",
    "inference_geo",
    "mcp_servers",
    "user_profile_id",
    "workspace_id",
];

/// A Messages request: the chat request that it asks for, and what only this API has.
///
/// # Source
/// <https://docs.anthropic.com/en/api/messages>
#[derive(Debug, Clone, PartialEq)]
pub struct MessagesRequest {
    /// The chat request.
    pub chat: ChatRequest,
    /// Whether the answer's reasoning is shown.
    pub shows_thinking: bool,
}

impl MessagesRequest {
    /// Parses the body of a message request.
    ///
    /// # Errors
    /// A 400 that names the field as this API does.
    pub fn parse<'a>(
        body: impl Into<JsonBody<'a>>,
        limits: &ParamLimits,
    ) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let max_tokens = fields.u32("max_tokens")?;
        let max_tokens = max_tokens.ok_or_else(|| {
            ApiError::invalid(
                "max_tokens",
                "you must say how many tokens the answer may have",
            )
        })?;
        let mut chat = Map::new();
        chat.insert("max_tokens".into(), max_tokens.into());
        for name in SAME {
            fields.hand_on(name, &mut chat, name)?;
        }
        fields.hand_on("stop_sequences", &mut chat, "stop")?;
        if let Some(Value::String(_)) = chat.get("stop") {
            let problem = "expected a list of strings, got a string";
            return Err(ApiError::invalid("stop_sequences", problem));
        }
        if let Some(mut metadata) = fields.object("metadata")? {
            let user = metadata.string("user_id").ok().flatten();
            match user.filter(|_| limits.has_affinity) {
                Some(user) => drop(chat.insert("user".into(), user.into())),
                None => fields.ignore("metadata"),
            }
        }
        // Claude Code asks why a prompt was not in the cache. Whatever else it asks has no effect either.
        if fields.object("diagnostics")?.is_some() {
            fields.ignore("diagnostics");
        }
        let tiers = ["auto", "standard_only"];
        fields.hint("service_tier", &tiers, "this server has one tier")?;
        for name in REFUSED {
            fields.refuse(name, &[json!([])], "it is not available")?;
        }
        Self::read(fields, chat, Some(max_tokens), limits)
    }

    /// Parses the body of a request to count a prompt's tokens.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn parse_to_count<'a>(
        body: impl Into<JsonBody<'a>>,
        limits: &ParamLimits,
    ) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let mut chat = Map::new();
        fields.hand_on("model", &mut chat, "model")?;
        Self::read(fields, chat, None, limits)
    }

    /// Parses what both have: everything that determines the prompt, and hints.
    fn read(
        mut fields: Fields<'_>,
        mut chat: Map<String, Value>,
        max_tokens: Option<u32>,
        limits: &ParamLimits,
    ) -> Result<Self, ApiError> {
        fields.hint("speed", &["standard"], "this server has one speed")?;
        let system = fields.take("system")?;
        let messages = fields.list("messages")?.unwrap_or_default();
        let (messages, media_at) = chat_messages(system, messages)?;
        chat.insert("messages".into(), messages.into());
        read_tools(&mut fields, &mut chat)?;
        read_output_config(&mut fields, &mut chat)?;
        read_context_management(&mut fields)?;
        let shows_thinking = read_thinking(&mut fields, max_tokens)?;
        let meter = Rc::clone(fields.meter());
        let hints = fields.finish_request(&["cache_control"])?;
        let hints = hints.checked(limits.is_strict)?;
        let chat = ChatRequest::read(Fields::made(chat, &meter), limits);
        let chat = chat.map_err(ApiError::in_chat)?;
        let mut chat = chat.with_media_at(media_at);
        chat.params.hints.behind(hints);
        Ok(Self {
            chat,
            shows_thinking,
        })
    }
}
