//! The request of `/v1/responses`.

use std::rc::Rc;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::input::{FindItem, InputItems, read_input};
use super::item::{Item, Speaker};
use super::response::Repeated;
use super::tools::read_tools;
use crate::block::Block;
use crate::error::ApiError;
use crate::json::{JsonBody, Meter, value_bytes};
use crate::openai::{ChatRequest, Fields, Hints, ParamLimits};
use crate::turns::Turns;

/// Fields with the same name in a chat request.
const SAME: [&str; 11] = [
    "model",
    "stream",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "service_tier",
    "prompt_cache_key",
    "user",
    "cache_salt",
    "genset",
    "nvext",
];

/// Fields that are accepted and have no effect here; `docs/guide/other-apis.md` lists them.
const IGNORED: [&str; 6] = [
    "access_programs",
    "client_metadata",
    "safety_identifier",
    "prompt_cache_options",
    "prompt_cache_retention",
    "max_tool_calls",
];

/// Fields that the API has and this server does not support, and their neutral values, which are accepted.
fn refused() -> [(&'static str, Vec<Value>); 6] {
    [
        ("background", vec![json!(false)]),
        ("conversation", vec![]),
        ("context_management", vec![json!([])]),
        ("prompt", vec![]),
        ("moderation", vec![]),
        ("image", vec![]),
    ]
}

/// The fields of a request to count a prompt's tokens.
const COUNTED: [&str; 11] = [
    "conversation",
    "input",
    "instructions",
    "model",
    "parallel_tool_calls",
    "previous_response_id",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
    "truncation",
];

/// The valid values of `include`. The first is supported; the second adds nothing here, because reasoning is never encrypted.
const INCLUDES: [&str; 2] = [
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
];

/// A validated request for a response. Checks that depend on the model and the store come later.
///
/// # Source
/// <https://platform.openai.com/docs/api-reference/responses/create>
#[derive(Debug, Clone)]
pub struct ResponsesRequest {
    /// The response to continue.
    pub previous_response_id: Option<String>,
    /// Whether to store the response, so that later ones can continue it.
    pub store: bool,
    /// Whether it is streamed.
    pub is_stream: bool,
    /// The new items.
    pub input: Vec<Arc<Item>>,
    /// The memory of the new items that are not in the body, in bytes.
    found_bytes: usize,
    /// The fields that the response repeats.
    pub repeated: Repeated,
    /// Whether a conversation that is too long is truncated at its beginning.
    pub truncates: bool,
    hints: Hints,
    instructions: Option<String>,
    /// The fields of the chat request, without its messages.
    chat: Map<String, Value>,
}

impl ResponsesRequest {
    /// Parses a request body. `find` finds the items that are given by their ids.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn parse<'a>(body: impl Into<JsonBody<'a>>, find: FindItem<'_>) -> Result<Self, ApiError> {
        let fields = Fields::parse(body)?;
        let repeated = Repeated::copy_of(&fields)?;
        Self::read(fields, repeated, find)
    }

    fn read(
        mut fields: Fields<'_>,
        mut repeated: Repeated,
        find: FindItem<'_>,
    ) -> Result<Self, ApiError> {
        let mut chat = Map::new();
        for name in SAME {
            fields.hand_on(name, &mut chat, name)?;
        }
        let is_stream = chat.get("stream") == Some(&json!(true));
        fields.hand_on("max_output_tokens", &mut chat, "max_completion_tokens")?;
        read_logprobs(&mut fields, &mut chat, &mut repeated)?;
        read_text(&mut fields, &mut chat)?;
        read_reasoning(&mut fields, &mut chat)?;
        repeated.namespaces = read_tools(&mut fields, &mut chat)?;
        read_stream_options(&mut fields, is_stream)?;
        // Only repeated in the response.
        drop(fields.take("metadata")?);
        for (name, neutral) in refused() {
            fields.refuse(name, &neutral, "it is not available")?;
        }
        let previous_response_id = fields.string("previous_response_id")?;
        let store = fields.bool("store")?.unwrap_or(true);
        let InputItems { items, found_bytes } = read_input(fields.take("input")?, find)?;
        let mut request = Self {
            previous_response_id,
            store,
            is_stream,
            input: items,
            found_bytes,
            repeated,
            truncates: read_truncation(&mut fields)?,
            hints: Hints::default(),
            instructions: fields.string("instructions")?,
            chat,
        };
        request.hints = fields.finish_request(&IGNORED)?;
        Ok(request)
    }

    /// Parses the body of a request to count a prompt's tokens: like [`Self::parse`], without the fields that affect only the
    /// answer.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn parse_to_count<'a>(
        body: impl Into<JsonBody<'a>>,
        find: FindItem<'_>,
    ) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        fields.refuse("personality", &[], "it is not available")?;
        fields.refuse_all_but(&COUNTED)?;
        Self::read(fields, Repeated::default(), find)
    }

    /// Returns the chat request: the items in `history`, then its own input, without the first `skipped` items; system
    /// messages always stay. Instructions come first and apply to this request only.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub(crate) fn take_chat(
        &mut self,
        history: &[Arc<Item>],
        skipped: usize,
        meter: &Rc<Meter>,
        limits: &ParamLimits,
    ) -> Result<ChatRequest, ApiError> {
        let hints = self.hints.clone().checked(limits.is_strict)?;
        let mut turns = Turns::default();
        if let Some(instructions) = &self.instructions {
            turns.system(instructions);
        }
        let items = self.conversation(history).enumerate();
        let is_system = |item: &Item| item.speaker() == Some(Speaker::System);
        let kept = items.filter(|(index, item)| *index >= skipped || is_system(item));
        kept.for_each(|(_, item)| item.add_to(&mut turns));
        // A chat that may be truncated is built several times.
        let mut chat = match self.truncates {
            true => self.chat.clone(),
            false => std::mem::take(&mut self.chat),
        };
        let (messages, media_at) = turns.into_messages();
        chat.insert("messages".into(), messages.into());
        let chat = ChatRequest::read(Fields::made(chat, meter), limits);
        let chat = chat.map_err(ApiError::in_chat)?;
        // The chat's limit on tools holds for them.
        self.repeated.complete_functions();
        let mut chat = chat.with_media_at(media_at);
        chat.params.hints.behind(hints);
        Ok(chat)
    }

    /// Its approximate memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let chat: usize = self.chat.values().map(value_bytes).sum();
        let input: usize = self.input.iter().map(|item| item.bytes()).sum();
        let instructions = self.instructions.as_ref().map_or(0, String::len);
        self.repeated.bytes() + input + chat + instructions
    }

    /// The memory of its items that are not in its body, in bytes.
    pub(crate) fn found_bytes(&self) -> usize {
        self.found_bytes
    }

    /// The numbers of first items that a conversation may drop, in ascending order: the rest must begin with a user message.
    pub(crate) fn cuts(&self, history: &[Arc<Item>]) -> Vec<usize> {
        let items = self.conversation(history).enumerate().skip(1);
        let of_user = items.filter(|(_, item)| item.speaker() == Some(Speaker::User));
        of_user.map(|(index, _)| index).collect()
    }

    fn conversation<'a>(&'a self, history: &'a [Arc<Item>]) -> impl Iterator<Item = &'a Item> {
        history.iter().chain(&self.input).map(Arc::as_ref)
    }
}

/// Parses `truncation`: what happens to a conversation that exceeds the model's context.
fn read_truncation(fields: &mut Fields<'_>) -> Result<bool, ApiError> {
    match fields.string("truncation")?.as_deref() {
        None | Some("disabled") => Ok(false),
        Some("auto") => Ok(true),
        Some(other) => {
            let problem = format!("expected \"auto\" or \"disabled\", got {other:?}");
            Err(ApiError::invalid("truncation", problem))
        }
    }
}

/// Parses `include` and `top_logprobs`: log probabilities are returned if either asks for them.
fn read_logprobs(
    fields: &mut Fields<'_>,
    chat: &mut Map<String, Value>,
    repeated: &mut Repeated,
) -> Result<(), ApiError> {
    let [logprobs, _] = INCLUDES;
    let mut has_ignored = false;
    for (index, include) in fields
        .list("include")?
        .unwrap_or_default()
        .iter()
        .enumerate()
    {
        match include.as_str() {
            Some(include) if include == logprobs => repeated.has_logprobs = true,
            // Named once: a body has room for half a million of them, a header has not.
            Some(include) if INCLUDES.contains(&include) => {
                if !std::mem::replace(&mut has_ignored, true) {
                    fields.ignore(&format!("include[{index}]"));
                }
            }
            Some(other) => {
                let why = format!("{other:?} is not available");
                return Err(ApiError::unsupported(format!("include[{index}]"), why));
            }
            None => {
                let at = format!("include[{index}]");
                return Err(ApiError::invalid(at, "expected a string"));
            }
        }
    }
    let top = fields.u32("top_logprobs")?.unwrap_or(0);
    repeated.has_logprobs |= top > 0;
    if repeated.has_logprobs {
        chat.insert("logprobs".into(), json!(true));
        chat.insert("top_logprobs".into(), top.into());
    }
    Ok(())
}

/// Parses `text`: the answer's format.
fn read_text(fields: &mut Fields<'_>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let Some(mut text) = fields.object("text")? else {
        return Ok(());
    };
    text.hint("verbosity", &["medium"], "only \"medium\" is available")?;
    if let Some(format) = text.take("format")? {
        let mut format = Block::new("text.format".into(), format)?;
        let format = match format.required_string("type")?.as_str() {
            "json_schema" => {
                let mut named = Map::new();
                for name in ["name", "description", "schema", "strict"] {
                    if let Some(value) = format.take(name) {
                        named.insert(name.into(), value);
                    }
                }
                format.finish(&[])?;
                json!({"type": "json_schema", "json_schema": named})
            }
            kind @ ("text" | "json_object") => {
                let format_of_chat = json!({"type": kind});
                format.finish(&[])?;
                format_of_chat
            }
            other => {
                let problem =
                    format!("expected \"text\", \"json_object\" or \"json_schema\", got {other:?}");
                return Err(ApiError::invalid("text.format.type", problem));
            }
        };
        chat.insert("response_format".into(), format);
    }
    text.finish(&[])
}

/// Parses `reasoning`: the reasoning effort. There are no summaries; the reasoning itself is returned.
fn read_reasoning(fields: &mut Fields<'_>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let Some(mut reasoning) = fields.object("reasoning")? else {
        return Ok(());
    };
    reasoning.hand_on("effort", chat, "reasoning_effort")?;
    let why = "the chat template decides which reasoning the model sees again";
    reasoning.refuse("context", &[json!("auto")], why)?;
    let standard = [json!("standard")];
    reasoning.refuse("mode", &standard, "only \"standard\" is available")?;
    reasoning.finish(&["summary", "generate_summary"])
}

fn read_stream_options(fields: &mut Fields<'_>, is_stream: bool) -> Result<(), ApiError> {
    let Some(mut options) = fields.object("stream_options")? else {
        return Ok(());
    };
    if !is_stream {
        let problem = "only allowed when 'stream' is true";
        return Err(ApiError::invalid("stream_options", problem));
    }
    if options.bool("include_obfuscation")?.is_some() {
        options.ignore("include_obfuscation");
    }
    options.finish(&[])
}
