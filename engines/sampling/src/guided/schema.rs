//! What a JSON schema may cost, counted before llguidance sees it. Not whether it is one: that llguidance says.

mod expansion;

use std::collections::HashSet;

use serde_json::{Deserializer, Map, Value};

use super::compile::check_bytes;
use super::limits::GuideLimits;

/// Recursive as deep as references lead: it runs on a large stack.
///
/// # Errors
/// The limit that `schema` is over.
pub(super) fn check(limits: &GuideLimits, schema: &Value) -> Result<(), String> {
    check_size(limits, schema)?;
    let mut budget = limits.expansion;
    expansion::check(limits, schema, &mut budget)
}

/// As [`check`], for the schemas within a grammar in Lark, `%json {...}`, together.
///
/// # Errors
/// The limit that one of them is over, or all together.
pub(super) fn check_lark(limits: &GuideLimits, text: &str) -> Result<(), String> {
    let mut budget = limits.expansion;
    for (at, keyword) in text.match_indices("%json") {
        // As llguidance reads it. What is no JSON is an error there, or stands in a text or a comment.
        let rest = &text[at + keyword.len()..];
        let mut values = Deserializer::from_str(rest).into_iter::<Value>();
        if let Some(Ok(schema)) = values.next() {
            check_size(limits, &schema)?;
            expansion::check(limits, &schema, &mut budget)?;
        }
    }
    Ok(())
}

/// Nesting and size, without recursion: this is what keeps everything after it from running deep.
fn check_size(limits: &GuideLimits, schema: &Value) -> Result<(), String> {
    let (mut bytes, mut patterns, mut objects) = (0_usize, 0_usize, 0_usize);
    let mut references = HashSet::new();
    let mut open = vec![(schema, 1_usize)];
    while let Some((value, depth)) = open.pop() {
        if depth > limits.depth {
            return Err(format!(
                "the schema is nested deeper than {} levels",
                limits.depth
            ));
        }
        match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => bytes += 4,
            Value::String(text) => bytes += text.len() + 3,
            Value::Array(items) => {
                bytes += 2;
                open.extend(items.iter().map(|item| (item, depth + 1)));
            }
            Value::Object(entries) => {
                bytes += 2 + entries.keys().map(|key| key.len() + 4).sum::<usize>();
                patterns += pattern_bytes(entries);
                objects += 1;
                references.extend(entries.get("$ref").and_then(Value::as_str));
                open.extend(entries.values().map(|entry| (entry, depth + 1)));
            }
        }
        check_bytes("the schema", bytes, limits.source_bytes)?;
        check_bytes("its patterns", patterns, limits.expression_bytes)?;
        check_count("objects", objects, limits.objects)?;
        check_count("different references", references.len(), limits.references)?;
    }
    Ok(())
}

fn pattern_bytes(schema: &Map<String, Value>) -> usize {
    let pattern = schema
        .get("pattern")
        .and_then(Value::as_str)
        .map_or(0, str::len);
    let properties = schema.get("patternProperties").and_then(Value::as_object);
    pattern + properties.map_or(0, |properties| properties.keys().map(String::len).sum())
}

fn check_count(what: &str, count: usize, limit: usize) -> Result<(), String> {
    if count > limit {
        return Err(format!("the schema has more than {limit} {what}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
