//! Rewrites references (`$ref`) of a JSON schema that is embedded in another.
//!
//! `#` and `#/...` are resolved from the root of the document, not from the enclosing schema.

use serde_json::Value;

/// How to interpret a value.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// A schema, or a list of schemas.
    Schema,
    /// Schemas by name; the names are the author's, not keywords.
    Named,
}

/// Rewrites `schema` for embedding at `place`, a reference such as `#/$defs/tool_0`, so that it keeps its meaning.
pub(super) fn move_to(place: &str, schema: &mut Value) {
    if let Value::Object(keywords) = schema {
        // It would replace the document as the root of the references.
        keywords.shift_remove("$id");
    }
    // No recursion: clients choose the depth of their schemas.
    let mut open = vec![(Kind::Schema, schema)];
    while let Some((kind, value)) = open.pop() {
        match value {
            Value::Array(items) => open.extend(items.iter_mut().map(|item| (Kind::Schema, item))),
            Value::Object(entries) => {
                for (name, value) in entries {
                    let inner = match kind {
                        Kind::Named => Some(Kind::Schema),
                        Kind::Schema if name == "$ref" => {
                            lead(place, value);
                            None
                        }
                        Kind::Schema => kind_behind(name),
                    };
                    if let Some(inner) = inner {
                        open.push((inner, value));
                    }
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
}

/// The kind of a keyword's value; `None` for data. Unknown keywords may contain schemas.
fn kind_behind(keyword: &str) -> Option<Kind> {
    match keyword {
        "const" | "default" | "enum" | "examples" => None,
        "$defs" | "definitions" | "dependencies" | "dependentSchemas" | "patternProperties"
        | "properties" => Some(Kind::Named),
        _ => Some(Kind::Schema),
    }
}

fn lead(place: &str, reference: &mut Value) {
    let Value::String(text) = reference else {
        return;
    };
    let moved = match text.strip_prefix('#') {
        Some("" | "/") => place.to_owned(),
        Some(pointer) if pointer.starts_with('/') => format!("{place}{pointer}"),
        // An anchor, or another document.
        Some(_) | None => return,
    };
    *text = moved;
}
