//! Messages of content blocks as a chat's messages: turns of one role joined, results of tools messages of their own.

use serde_json::{Map, Value, json};

use super::block::{Block, join, no_block, text, text_block};
use crate::error::ApiError;

/// Fields of calls and results that say nothing to a model.
const IGNORED: [&str; 3] = ["cache_control", "caller", "toolset_name"];

/// A chat's message in the making.
#[derive(Debug, PartialEq)]
enum Turn {
    User(String),
    Assistant {
        text: String,
        thinking: String,
        calls: Vec<Value>,
    },
    Result {
        id: String,
        text: String,
    },
}

/// The chat's messages.
///
/// # Errors
/// A 400 that names the message and block.
pub(super) fn chat_messages(
    system: Option<Value>,
    messages: Vec<Value>,
) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        let problem = "must hold at least one message";
        return Err(ApiError::invalid("messages", problem));
    }
    let mut turns = Vec::new();
    for (index, message) in messages.into_iter().enumerate() {
        read_message(format!("messages[{index}]"), message, &mut turns)?;
    }
    if let Some(Turn::Assistant { .. }) = turns.last() {
        let why =
            "an answer cannot be begun by the client here; the last message must be the user's";
        return Err(ApiError::unsupported("messages", why));
    }
    let system = system.map(|system| text("system", system)).transpose()?;
    let system = system.filter(|system| !system.is_empty());
    let system = system.map(|text| json!({"role": "system", "content": text}));
    let turns = turns.into_iter().map(Turn::into_message);
    Ok(system.into_iter().chain(turns).collect())
}

fn read_message(at: String, message: Value, turns: &mut Vec<Turn>) -> Result<(), ApiError> {
    let mut message = Block::new(at, message)?;
    let role = message.required_string("role")?;
    let at = message.path("content");
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
            let problem = "expected \"user\" or \"assistant\"; instructions go into 'system'";
            return Err(ApiError::invalid(message.path("role"), problem));
        }
    };
    message.finish(&[])?;
    for (index, block) in content.into_iter().enumerate() {
        read(Block::new(format!("{at}[{index}]"), block)?, turns)?;
    }
    Ok(())
}

fn read_user_block(mut block: Block, turns: &mut Vec<Turn>) -> Result<(), ApiError> {
    match block.required_string("type")?.as_str() {
        "text" => {
            let more = text_block(block)?;
            match turns.last_mut() {
                Some(Turn::User(text)) => join(text, &more),
                _ => turns.push(Turn::User(more)),
            }
        }
        "tool_result" => turns.push(read_result(block)?),
        other => return Err(no_block(&block, other)),
    }
    Ok(())
}

fn read_result(mut block: Block) -> Result<Turn, ApiError> {
    let id = block.required_string("tool_use_id")?;
    let at = block.path("content");
    let content = block.take("content").map(|content| text(&at, content));
    let mut content = content.transpose()?.unwrap_or_default();
    // A chat has no field for it; the model is told in words.
    if block.flag("is_error")? {
        content.insert_str(0, "Error: ");
    }
    block.finish(&IGNORED)?;
    Ok(Turn::Result { id, text: content })
}

fn read_assistant_block(mut block: Block, turns: &mut Vec<Turn>) -> Result<(), ApiError> {
    if !matches!(turns.last(), Some(Turn::Assistant { .. })) {
        turns.push(Turn::Assistant {
            text: String::new(),
            thinking: String::new(),
            calls: Vec::new(),
        });
    }
    let Some(Turn::Assistant {
        text,
        thinking,
        calls,
    }) = turns.last_mut()
    else {
        return Ok(());
    };
    match block.required_string("type")?.as_str() {
        "text" => join(text, &text_block(block)?),
        "thinking" => {
            join(thinking, &block.required_string("thinking")?);
            block.finish(&["signature"])?;
        }
        "tool_use" => calls.push(read_call(block)?),
        other => return Err(no_block(&block, other)),
    }
    Ok(())
}

fn read_call(mut block: Block) -> Result<Value, ApiError> {
    let (id, name) = (block.required_string("id")?, block.required_string("name")?);
    let input = block.object("input")?;
    let input =
        input.ok_or_else(|| ApiError::invalid(block.path("input"), "expected an object"))?;
    block.finish(&IGNORED)?;
    let function = json!({"name": name, "arguments": input.to_string()});
    Ok(json!({"id": id, "type": "function", "function": function}))
}

impl Turn {
    fn into_message(self) -> Value {
        match self {
            Self::User(text) => json!({"role": "user", "content": text}),
            Self::Result { id, text } => {
                json!({"role": "tool", "tool_call_id": id, "content": text})
            }
            Self::Assistant {
                text,
                thinking,
                calls,
            } => {
                let mut message = Map::new();
                message.insert("role".into(), "assistant".into());
                message.insert("content".into(), text.into());
                // Templates take a key for its presence.
                if !thinking.is_empty() {
                    message.insert("reasoning_content".into(), thinking.into());
                }
                if !calls.is_empty() {
                    message.insert("tool_calls".into(), calls.into());
                }
                Value::Object(message)
            }
        }
    }
}
