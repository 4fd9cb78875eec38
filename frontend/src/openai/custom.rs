//! Custom tools, which take any text. Models know functions: each sees one whose only argument, `input`, is the text.
//! [`Splitter`](crate::markup::Splitter) gets it back from the arguments of a call.

use serde_json::{Map, Value, json};

use super::tools::check_tool_name;
use crate::block::Block;
use crate::error::ApiError;

/// Checks a custom tool. Returns its name and description.
///
/// # Errors
/// A 400 that names the field; one if the tool's input must follow a grammar.
pub(crate) fn read_custom(mut tool: Block) -> Result<Map<String, Value>, ApiError> {
    let mut custom = Map::new();
    let name = tool.required_string("name")?;
    check_tool_name(&tool.path("name"), Some(&json!(name)))?;
    custom.insert("name".into(), name.into());
    if let Some(description) = tool.string("description")? {
        custom.insert("description".into(), description.into());
    }
    if let Some(format) = tool.object("format")? {
        let mut format = Block::new(tool.path("format"), format)?;
        let kind = format.required_string("type")?;
        if kind != "text" {
            let why = format!(
                "{kind:?} is not available, only \"text\": nothing would hold the model to it"
            );
            return Err(ApiError::unsupported(format.path("type"), why));
        }
        format.finish(&[])?;
    }
    tool.finish(&[])?;
    Ok(custom)
}

/// The function that the model sees of a custom tool with this name and description.
pub(super) fn as_function(mut custom: Map<String, Value>) -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": false,
    });
    custom.insert("parameters".into(), parameters);
    json!({"type": "function", "function": custom})
}

/// Makes a custom tool's call the function's.
///
/// # Errors
/// A 400 that names the field.
pub(super) fn as_function_call(at: &str, call: &mut Map<String, Value>) -> Result<(), ApiError> {
    let at = format!("{at}.custom");
    let Some(Value::Object(mut custom)) = call.shift_remove("custom") else {
        let problem = "expected an object with name and input";
        return Err(ApiError::invalid(at, problem));
    };
    let mut text = |name: &str| match custom.shift_remove(name) {
        Some(Value::String(text)) => Ok(text),
        _ => {
            let at = format!("{at}.{name}");
            Err(ApiError::invalid(at, "expected a string"))
        }
    };
    let (name, input) = (text("name")?, text("input")?);
    let function = json!({"name": name, "arguments": {"input": input}});
    call.insert("type".into(), "function".into());
    call.insert("function".into(), function);
    Ok(())
}
