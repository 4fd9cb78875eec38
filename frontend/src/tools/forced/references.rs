//! References (`$ref`) of a JSON schema that becomes a part of another.
//!
//! `#` and `#/...` are resolved from the root of the document, not from the schema that they stand in.

use serde_json::Value;

/// How a value is read.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// A schema, or a list of schemas.
    Schema,
    /// Schemas by names, which are the author's and no keywords.
    Named,
}

/// Makes `schema` mean at `place`, a reference such as `#/$defs/tool_0`, what it means as a document of its own.
pub(super) fn move_to(place: &str, schema: &mut Value) {
    if let Value::Object(keywords) = schema {
        // It would be the root of the references, in place of the document's.
        keywords.shift_remove("$id");
    }
    // No recursion: a client says how deep its schema is.
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

/// What stands behind a keyword; `None` for data. Keywords that are not known may have schemas in them.
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
