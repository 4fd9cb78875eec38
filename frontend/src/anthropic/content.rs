//! Converts messages with content blocks into chat messages: joins turns of one role, and makes tool results messages
//! of their own.

use serde_json::{Value, json};

use super::block::{Block, no_block, text, text_beside, text_block};
use crate::error::ApiError;
use crate::openai::check_shown;
use crate::turns::{Turns, join};

/// Fields of calls and results that have no meaning for a model.
const IGNORED: [&str; 3] = ["cache_control", "caller", "toolset_name"];

/// How a line for Anthropic's accounts begins.
const BILLING: &str = "x-anthropic-billing-header:";

/// Returns the chat messages, and the positions of their images.
///
/// # Errors
/// A 400 that names the message and block.
pub(super) fn chat_messages(
    system: Option<Value>,
    messages: Vec<Value>,
) -> Result<(Vec<Value>, Vec<String>), ApiError> {
    if messages.is_empty() {
        let problem = "must hold at least one message";
        return Err(ApiError::invalid("messages", problem));
    }
    let mut turns = Turns::default();
    if let Some(system) = system {
        let system = text("system", system)?;
        let system = without_billing(&system);
        if !system.is_empty() {
            turns.system(system);
        }
    }
    for (index, message) in messages.into_iter().enumerate() {
        read_message(format!("messages[{index}]"), message, &mut turns)?;
    }
    if turns.is_assistants() {
        let why =
            "the client cannot begin the answer here; the last message must not be the assistant's";
        return Err(ApiError::unsupported("messages", why));
    }
    Ok(turns.into_messages())
}

/// Leaves out the first line of Claude Code's instructions, which is for Anthropic's accounts. It differs in every request: no
/// prompt would begin with the cached prefix of an earlier one.
fn without_billing(system: &str) -> &str {
    match system.strip_prefix(BILLING) {
        None => system,
        Some(line) => line
            .split_once('\n')
            .map_or("", |(_, rest)| rest.trim_start_matches('\n')),
    }
}

fn read_message(at: String, message: Value, turns: &mut Turns) -> Result<(), ApiError> {
    let mut message = Block::new(at, message)?;
    let role = message.required_string("role")?;
    let at = message.path("content");
    if role == "system" {
        return read_system(message, turns);
    }
    let content = match message.take("content") {
        Some(Value::String(text)) => vec![json!({"type": "text", "text": text})],
        Some(Value::Array(blocks)) => blocks,
        _ => {
            let problem = "expected a string or a list of blocks";
            return Err(ApiError::invalid(at, problem));
        }
    };
    let read = match role.as_str() {
        "user" if content.is_empty() => {
            return Err(ApiError::invalid(at, "must hold at least one block"));
        }
        "user" => read_user_block,
        "assistant" => read_assistant_block,
        _ => {
            let problem = format!("expected \"user\", \"assistant\" or \"system\", got {role:?}");
            return Err(ApiError::invalid(message.path("role"), problem));
        }
    };
    message.finish(&[])?;
    for (index, block) in content.into_iter().enumerate() {
        read(Block::new(format!("{at}[{index}]"), block)?, turns)?;
    }
    Ok(())
}

/// Instructions from here on.
fn read_system(mut message: Block, turns: &mut Turns) -> Result<(), ApiError> {
    let at = message.path("content");
    let content = message.take("content").unwrap_or_default();
    turns.system(&text(&at, content)?);
    message.finish(&[])
}

fn read_user_block(mut block: Block, turns: &mut Turns) -> Result<(), ApiError> {
    match block.required_string("type")?.as_str() {
        "text" => join(turns.user(), &text_block(block)?),
        "image" => {
            let (at, part) = read_image(block)?;
            turns.show(part, at);
        }
        "document" => join(turns.user(), &read_document(block)?),
        "tool_result" => read_result(block, turns)?,
        other => return Err(no_block(&block, other)),
    }
    Ok(())
}

/// An image as a part of a chat, and its position.
fn read_image(mut block: Block) -> Result<(String, Value), ApiError> {
    let at = block.path("source");
    let source = block.required_object("source", "expected an object")?;
    let mut source = Block::new(at.clone(), source)?;
    let url = match source.required_string("type")?.as_str() {
        "base64" => {
            let media_type = source.required_string("media_type")?;
            format!(
                "data:{media_type};base64,{}",
                source.required_string("data")?
            )
        }
        "url" => source.required_string("url")?,
        other => {
            let why =
                format!("sources of type {other:?} are not available, only \"base64\" and \"url\"");
            return Err(ApiError::unsupported(source.path("type"), why));
        }
    };
    source.finish(&[])?;
    block.finish(&IGNORED)?;
    let part = json!({"type": "image_url", "image_url": {"url": url}});
    check_shown(&at, &part)?;
    Ok((at, part))
}

/// A document of text: its title, its context and what it says, as paragraphs.
fn read_document(mut block: Block) -> Result<String, ApiError> {
    let mut document = String::new();
    for name in ["title", "context"] {
        join(&mut document, &block.string(name)?.unwrap_or_default());
    }
    let at = block.path("source");
    let source = block.required_object("source", "expected an object")?;
    let mut source = Block::new(at, source)?;
    match source.required_string("type")?.as_str() {
        "text" => {
            let media_type = source.required_string("media_type")?;
            if media_type != "text/plain" {
                return Err(source.unavailable("media_type", &media_type, "\"text/plain\""));
            }
            join(&mut document, &source.required_string("data")?);
        }
        "content" => {
            let at = source.path("content");
            let content = source.take("content").unwrap_or_default();
            join(&mut document, &text(&at, content)?);
        }
        other => {
            let why = format!(
                "documents with a source of type {other:?}, such as PDF files, are not available, only \"text\" and \"content\""
            );
            return Err(ApiError::unsupported(source.path("type"), why));
        }
    }
    source.finish(&[])?;
    block.refuse("citations", &[json!({"enabled": false})])?;
    block.finish(&IGNORED)?;
    Ok(document)
}

fn read_result(mut block: Block, turns: &mut Turns) -> Result<(), ApiError> {
    let id = block.required_string("tool_use_id")?;
    let at = block.path("content");
    let mut images = Vec::new();
    let content = block.take("content").map(|content| {
        text_beside(&at, content, |block, kind| match kind {
            "image" => {
                let (at, part) = read_image(block)?;
                images.push((part, at));
                Ok(String::new())
            }
            "document" => read_document(block),
            _ => Err(no_block(&block, kind)),
        })
    });
    let mut content = content.transpose()?.unwrap_or_default();
    // A chat has no field for it; the model reads it as text.
    if block.flag("is_error")? {
        content.insert_str(0, "Error: ");
    }
    block.finish(&IGNORED)?;
    turns.result(&id, &content, images);
    Ok(())
}

fn read_assistant_block(mut block: Block, turns: &mut Turns) -> Result<(), ApiError> {
    let turn = turns.assistant();
    match block.required_string("type")?.as_str() {
        "text" => join(&mut turn.text, &text_block(block)?),
        "thinking" => {
            join(&mut turn.thinking, &block.required_string("thinking")?);
            block.finish(&["signature", "cache_control"])?;
        }
        "tool_use" => turn.calls.push(read_call(block)?),
        other => return Err(no_block(&block, other)),
    }
    Ok(())
}

fn read_call(mut block: Block) -> Result<Value, ApiError> {
    let (id, name) = (block.required_string("id")?, block.required_string("name")?);
    let input = block.required_object("input", "expected an object")?;
    block.finish(&IGNORED)?;
    let function = json!({"name": name, "arguments": input.to_string()});
    Ok(json!({"id": id, "type": "function", "function": function}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_line_for_accounts_is_left_out() {
        let line = "x-anthropic-billing-header: cc_version=2.1; cch=eb6c6;";
        for (system, expected) in [
            (
                format!("{line}\n\nBe brief.\nBe kind."),
                "Be brief.\nBe kind.",
            ),
            (format!("{line}\nBe brief."), "Be brief."),
            (line.to_owned(), ""),
            ("Be brief.".to_owned(), "Be brief."),
        ] {
            assert_eq!(without_billing(&system), expected, "{system}");
        }
        let later = format!("Be brief.\n{line}");
        assert_eq!(without_billing(&later), later);
    }
}
