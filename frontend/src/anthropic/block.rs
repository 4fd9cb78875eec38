//! Text blocks in a Messages request.

use serde_json::Value;

pub(super) use crate::block::Block;
use crate::error::ApiError;
use crate::turns::join;

/// Takes a text value: a string, or a list of text blocks, joined as paragraphs.
pub(super) fn text(at: &str, value: Value) -> Result<String, ApiError> {
    text_beside(at, value, |block, kind| Err(no_block(&block, kind)))
}

/// Like [`text`]. Blocks of other types go to `read`, with the type; it returns their text, if they have any.
pub(super) fn text_beside(
    at: &str,
    value: Value,
    mut read: impl FnMut(Block, &str) -> Result<String, ApiError>,
) -> Result<String, ApiError> {
    let blocks = match value {
        Value::String(text) => return Ok(text),
        Value::Array(blocks) => blocks,
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            let problem = "expected a string or a list of text blocks";
            return Err(ApiError::invalid(at, problem));
        }
    };
    let mut joined = String::new();
    for (index, block) in blocks.into_iter().enumerate() {
        let mut block = Block::new(format!("{at}[{index}]"), block)?;
        match block.required_string("type")?.as_str() {
            "text" => join(&mut joined, &text_block(block)?),
            other => join(&mut joined, &read(block, other)?),
        }
    }
    Ok(joined)
}

/// Reads the rest of a text block.
pub(super) fn text_block(mut block: Block) -> Result<String, ApiError> {
    let text = block.required_string("text")?;
    block.refuse("citations", &[Value::Array(Vec::new())])?;
    block.finish(&["cache_control"])?;
    Ok(text)
}

/// The 400 for a block of an unsupported type.
pub(super) fn no_block(block: &Block, kind: &str) -> ApiError {
    let why = format!("blocks of type {kind:?} are not available here");
    ApiError::unsupported(block.path("type"), why)
}
