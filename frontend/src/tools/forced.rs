//! Calls that guided decoding enforces, for `tool_choice` `required` or a named tool.
//!
//! The engine is constrained to a JSON schema of ours, so the output is JSON whatever the model's dialect.

mod references;

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::ToolSchemas;
use super::json::{JsonMarks, JsonParser, Shape};
use crate::markup::{Deltas, MarkupParser};

/// A list of calls and nothing else.
static LIST: JsonMarks = JsonMarks {
    starts: &[],
    ends: &[],
    ignored: &[],
    shape: Shape::Object,
    is_bare: false,
};

/// The schema of the arguments of `tool`, an element of a request's `tools`.
#[must_use]
pub fn arguments_schema(tool: &Value) -> Value {
    match tool.pointer("/function/parameters") {
        Some(Value::Object(schema)) if !schema.is_empty() => Value::Object(schema.clone()),
        _ => json!({"type": "object", "properties": {}}),
    }
}

/// The schema of a list of at least one call to any of `tools`.
///
/// Each tool's schema is a whole entry of `$defs`, and its references are rewritten to point there: references to the
/// document's root, such as `#`, would otherwise mean the list.
#[must_use]
pub fn calls_schema<'a>(tools: impl IntoIterator<Item = &'a Value>, is_parallel: bool) -> Value {
    let mut definitions = Map::new();
    let mut calls = Vec::new();
    for (index, tool) in tools.into_iter().enumerate() {
        let definition = format!("tool_{index}");
        let place = format!("#/$defs/{definition}");
        let mut schema = arguments_schema(tool);
        references::move_to(&place, &mut schema);
        definitions.insert(definition, schema);
        let name = tool.pointer("/function/name").unwrap_or(&Value::Null);
        calls.push(json!({
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": place}},
            "required": ["name", "parameters"],
            "additionalProperties": false,
        }));
    }
    let mut schema = json!({"type": "array", "minItems": 1, "items": {"anyOf": calls}});
    if !is_parallel {
        schema["maxItems"] = 1.into();
    }
    schema["$defs"] = definitions.into();
    schema
}

/// A parser for output of [`calls_schema`].
#[must_use]
pub fn calls_parser(tools: Arc<ToolSchemas>) -> Box<dyn MarkupParser> {
    Box::new(JsonParser::inside(&LIST, tools))
}

/// A parser for output of [`arguments_schema`] of the tool `name`: all text is its arguments.
#[must_use]
pub fn arguments_parser(name: String) -> Box<dyn MarkupParser> {
    Box::new(ArgumentsParser {
        name,
        has_begun: false,
    })
}

struct ArgumentsParser {
    name: String,
    has_begun: bool,
}

impl MarkupParser for ArgumentsParser {
    fn push(&mut self, text: &str, out: &mut Deltas) {
        if text.is_empty() {
            return;
        }
        if !std::mem::replace(&mut self.has_begun, true) {
            out.tool_call(&self.name, "");
        }
        out.arguments(text);
    }

    fn finish(&mut self, _out: &mut Deltas) {}
}
