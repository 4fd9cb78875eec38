//! The cost of a JSON schema, estimated before llguidance sees it. llguidance itself decides whether it is valid.

mod expansion;

use std::collections::HashSet;

use serde_json::{Deserializer, Map, Value};

use super::bounds;
use super::compile::check_bytes;
use super::limits::GuideLimits;

/// Checks `schema`. It recurses as deep as references lead, so it needs a large stack.
///
/// # Errors
/// The limit that `schema` exceeds.
pub(super) fn check(limits: &GuideLimits, schema: &Value) -> Result<(), String> {
    check_size(limits, schema)?;
    let mut budget = limits.expansion;
    expansion::check(limits, schema, &mut budget)
}

/// As [`check`], for all the schemas in a Lark grammar, `%json {...}`, together.
///
/// # Errors
/// The limit that one of them exceeds, or all of them together; the errors of [`bounds::fit`].
pub(super) fn check_lark(limits: &GuideLimits, text: &str) -> Result<(), String> {
    let mut budget = limits.expansion;
    for (at, keyword) in text.match_indices("%json") {
        // As llguidance reads it. Text that is not JSON is an error there, or is part of a string or a comment.
        let rest = &text[at + keyword.len()..];
        let mut values = Deserializer::from_str(rest).into_iter::<Value>();
        if let Some(Ok(mut schema)) = values.next() {
            check_size(limits, &schema)?;
            expansion::check(limits, &schema, &mut budget)?;
            bounds::fit(&mut schema)?;
        }
    }
    Ok(())
}

/// Checks nesting and size without recursion. This bounds the recursion of all later steps.
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
