//! The `input` of a request as items.

use std::sync::Arc;

use serde_json::{Value, json};

use super::item::{Item, Shown, Speaker, new_id};
use crate::block::Block;
use crate::error::{ApiError, shown};
use crate::openai::check_shown;

/// Finds an item of a stored response's answer by its id.
pub type FindItem<'a> = &'a dyn Fn(&str) -> Option<Arc<Item>>;

/// The items of a request.
#[derive(Debug, Default)]
pub(super) struct InputItems {
    pub(super) items: Vec<Arc<Item>>,
    /// The memory of the items that were found by their ids, in bytes.
    pub(super) found_bytes: usize,
}

/// Parses `input`: a text, which is a user message, or a list of items. `find` finds those that are given by their ids.
///
/// # Errors
/// A 400 that names the item and its field.
pub(super) fn read_input(input: Option<Value>, find: FindItem<'_>) -> Result<InputItems, ApiError> {
    let mut read = InputItems::default();
    match input {
        Some(Value::String(text)) => {
            read.items.push(Arc::new(Item::Message {
                id: new_id("msg"),
                speaker: Speaker::User,
                parts: vec![text],
                shown: Vec::new(),
            }));
            Ok(read)
        }
        Some(Value::Array(items)) if !items.is_empty() => {
            for (index, item) in items.into_iter().enumerate() {
                read.add(format!("input[{index}]"), item, find)?;
            }
            Ok(read)
        }
        Some(Value::Array(_)) => Err(ApiError::invalid("input", "must hold at least one item")),
        Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_)) => Err(
            ApiError::invalid("input", "expected a string or a list of items"),
        ),
        None => Err(ApiError::invalid("input", "you must provide an input")),
    }
}

impl InputItems {
    fn add(&mut self, at: String, item: Value, find: FindItem<'_>) -> Result<(), ApiError> {
        let mut item = Block::new(at, item)?;
        // What Codex says to OpenAI about each item.
        drop(item.take("internal_chat_message_metadata_passthrough"));
        // A message may omit its type.
        let kind = item.string("type")?;
        let read: fn(Block) -> Result<Item, ApiError> = match kind.as_deref() {
            None | Some("message") => read_message,
            Some("function_call") => |item| read_call(item, false),
            Some("function_call_output") => |item| read_output(item, false),
            Some("custom_tool_call") => |item| read_call(item, true),
            Some("custom_tool_call_output") => |item| read_output(item, true),
            Some("reasoning") => read_reasoning,
            Some("item_reference") => {
                let found = read_reference(item, find)?;
                self.found_bytes += found.bytes();
                self.items.push(found);
                return Ok(());
            }
            Some(other) => {
                let why = format!(
                    "items of type {other:?} are not available, only \"message\", \"function_call\", \
                     \"function_call_output\", \"custom_tool_call\", \"custom_tool_call_output\", \"reasoning\" \
                     and \"item_reference\""
                );
                return Err(ApiError::unsupported(item.path("type"), why));
            }
        };
        self.items.push(Arc::new(read(item)?));
        Ok(())
    }
}

/// The item that a reference names.
fn read_reference(mut item: Block, find: FindItem<'_>) -> Result<Arc<Item>, ApiError> {
    let id = item.required_string("id")?;
    let at = item.path("id");
    item.finish(&[])?;
    find(&id).ok_or_else(|| {
        let id = shown(&id);
        let problem = format!(
            "no response that this server keeps has the item '{id}'; send the item itself instead"
        );
        ApiError::invalid(at, problem)
    })
}

/// The item's own id, or a new one.
fn id(item: &mut Block, prefix: &str) -> Result<String, ApiError> {
    Ok(item.string("id")?.unwrap_or_else(|| new_id(prefix)))
}

fn read_message(mut item: Block) -> Result<Item, ApiError> {
    let speaker = match item.required_string("role")?.as_str() {
        "user" => Speaker::User,
        "assistant" => Speaker::Assistant,
        "system" | "developer" => Speaker::System,
        other => {
            let problem = format!(
                "expected \"user\", \"assistant\", \"system\" or \"developer\", got {other:?}"
            );
            return Err(ApiError::invalid(item.path("role"), problem));
        }
    };
    let at = item.path("content");
    let (parts, shown) = match item.take("content") {
        Some(Value::String(text)) => (vec![text], Vec::new()),
        Some(Value::Array(parts)) if !parts.is_empty() && speaker == Speaker::User => {
            read_users_parts(&at, parts)?
        }
        Some(Value::Array(parts)) if !parts.is_empty() => (read_parts(&at, parts)?, Vec::new()),
        _ => {
            let problem = "expected a string or a list of parts";
            return Err(ApiError::invalid(at, problem));
        }
    };
    let id = id(&mut item, "msg")?;
    item.finish(&["status", "phase"])?;
    Ok(Item::Message {
        id,
        speaker,
        parts,
        shown,
    })
}

/// Texts, and the media between them.
fn read_users_parts(at: &str, parts: Vec<Value>) -> Result<(Vec<String>, Vec<Shown>), ApiError> {
    let (mut texts, mut shown) = (Vec::new(), Vec::new());
    for (index, part) in parts.into_iter().enumerate() {
        let at = format!("{at}[{index}]");
        let part = match part["type"].as_str() {
            Some("input_image") => read_image(at.clone(), part)?,
            Some("input_audio") => read_audio(at.clone(), part)?,
            _ => {
                texts.push(read_part(at, part)?);
                continue;
            }
        };
        let medium = Shown {
            after: texts.len(),
            at,
            part,
        };
        check_shown(&medium.at, &medium.in_chat())?;
        shown.push(medium);
    }
    Ok((texts, shown))
}

fn read_image(at: String, part: Value) -> Result<Value, ApiError> {
    let mut part = Block::new(at, part)?;
    part.refuse("file_id", &[])?;
    let url = part.required_string("image_url")?;
    let detail = part.string("detail")?.unwrap_or_else(|| "auto".into());
    part.finish(&["type", "prompt_cache_breakpoint"])?;
    Ok(json!({"type": "input_image", "image_url": url, "detail": detail}))
}

fn read_audio(at: String, part: Value) -> Result<Value, ApiError> {
    let mut part = Block::new(at, part)?;
    let audio = part.object("input_audio")?.unwrap_or_default();
    let mut audio = Block::new(part.path("input_audio"), audio)?;
    let (data, format) = (
        audio.required_string("data")?,
        audio.required_string("format")?,
    );
    audio.finish(&[])?;
    part.finish(&["type"])?;
    Ok(json!({"type": "input_audio", "input_audio": {"data": data, "format": format}}))
}

fn read_parts(at: &str, parts: Vec<Value>) -> Result<Vec<String>, ApiError> {
    let parts = parts.into_iter().enumerate();
    let parts = parts.map(|(index, part)| read_part(format!("{at}[{index}]"), part));
    parts.collect()
}

/// The text of a part.
fn read_part(at: String, part: Value) -> Result<String, ApiError> {
    let mut part = Block::new(at, part)?;
    let (field, ignored): (_, &[&str]) = match part.required_string("type")?.as_str() {
        "input_text" | "text" => ("text", &["prompt_cache_breakpoint"]),
        "output_text" => ("text", &["annotations", "logprobs"]),
        "refusal" => ("refusal", &[]),
        other => {
            let why = format!("parts of type {other:?} are not available here, only text");
            return Err(ApiError::unsupported(part.path("type"), why));
        }
    };
    let text = part.required_string(field)?;
    part.finish(ignored)?;
    Ok(text)
}

fn read_call(mut item: Block, is_custom: bool) -> Result<Item, ApiError> {
    let (text, prefix) = match is_custom {
        true => ("input", "ctc"),
        false => ("arguments", "fc"),
    };
    let call = Item::Call {
        call_id: item.required_string("call_id")?,
        // Only functions are in namespaces.
        namespace: match is_custom {
            true => None,
            false => item.string("namespace")?,
        },
        name: item.required_string("name")?,
        arguments: item.required_string(text)?,
        id: id(&mut item, prefix)?,
        is_custom,
    };
    item.finish(&["status"])?;
    Ok(call)
}

fn read_output(mut item: Block, is_custom: bool) -> Result<Item, ApiError> {
    let at = item.path("output");
    let (output, shown) = match item.take("output") {
        Some(Value::String(text)) => (text, Vec::new()),
        Some(Value::Array(parts)) => {
            let (texts, shown) = read_users_parts(&at, parts)?;
            (texts.concat(), shown)
        }
        _ => {
            let problem = "expected a string or a list of parts";
            return Err(ApiError::invalid(at, problem));
        }
    };
    let call = Item::CallOutput {
        call_id: item.required_string("call_id")?,
        output,
        shown,
        id: id(&mut item, if is_custom { "ctco" } else { "fco" })?,
        is_custom,
    };
    // Codex names the tool again.
    let ignored: &[&str] = match is_custom {
        true => &["status", "name"],
        false => &["status"],
    };
    item.finish(ignored)?;
    Ok(call)
}

/// Accepts the reasoning in `content`, as this server returns it; it never creates summaries or encrypted reasoning.
fn read_reasoning(mut item: Block) -> Result<Item, ApiError> {
    let mut text = String::new();
    let at = item.path("content");
    if let Some(content) = item.take("content") {
        let Value::Array(parts) = content else {
            return Err(ApiError::invalid(at, "expected a list of parts"));
        };
        for (index, part) in parts.into_iter().enumerate() {
            let mut part = Block::new(format!("{at}[{index}]"), part)?;
            text.push_str(&part.required_string("text")?);
            part.finish(&["type"])?;
        }
    }
    let id = id(&mut item, "rs")?;
    item.finish(&["status", "summary", "encrypted_content"])?;
    Ok(Item::Reasoning { id, text })
}
