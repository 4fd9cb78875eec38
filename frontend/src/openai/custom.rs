//! Custom tools, which take any text. Models know functions: each sees one whose only argument, `input`, is the text.
//! [`Splitter`](crate::markup::Splitter) gets it back from the arguments of a call.

use serde_json::{Map, Value, json};

use super::tools::check_tool_name;
use crate::block::Block;
use crate::error::ApiError;

/// Why a tool's grammar has no effect but that the model sees it.
pub(crate) const GRAMMAR_IS_SHOWN: &str =
    "nothing holds the model to a grammar; leave it out, or describe the input";

/// Checks a custom tool. Returns its name and description, which includes the grammar of its input, and the path of that.
///
/// # Errors
/// A 400 that names the field.
pub(crate) fn read_custom(
    mut tool: Block,
) -> Result<(Map<String, Value>, Option<String>), ApiError> {
    let mut grammar_at = None;
    let mut custom = Map::new();
    let name = tool.required_string("name")?;
    check_tool_name(&tool.path("name"), Some(&json!(name)))?;
    custom.insert("name".into(), name.into());
    let mut description = tool.string("description")?;
    if let Some(format) = tool.object("format")? {
        let mut format = Block::new(tool.path("format"), format)?;
        match format.required_string("type")?.as_str() {
            "text" => format.finish(&[])?,
            "grammar" => {
                grammar_at = Some(tool.path("format"));
                let grammar = read_grammar(format)?;
                let text = description.take().unwrap_or_default();
                description = Some(format!("{text}\n\n{grammar}").trim_start().to_owned());
            }
            other => {
                return Err(format.unavailable("type", other, "\"text\" and \"grammar\""));
            }
        }
    }
    if let Some(description) = description {
        custom.insert("description".into(), description.into());
    }
    tool.finish(&[])?;
    Ok((custom, grammar_at))
}

/// What the model is told of a grammar. A chat's format has an object of its own for it.
fn read_grammar(mut format: Block) -> Result<String, ApiError> {
    let mut grammar = match format.object("grammar")? {
        Some(grammar) => {
            let grammar = Block::new(format.path("grammar"), grammar)?;
            format.finish(&[])?;
            grammar
        }
        None => format,
    };
    let syntax = grammar.required_string("syntax")?;
    if !matches!(syntax.as_str(), "lark" | "regex") {
        let problem = format!("expected \"lark\" or \"regex\", got {syntax:?}");
        return Err(ApiError::invalid(grammar.path("syntax"), problem));
    }
    let definition = grammar.required_string("definition")?;
    grammar.finish(&[])?;
    Ok(format!(
        "The text is given as the string `input`, and matches this {syntax} grammar:\n{definition}"
    ))
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
