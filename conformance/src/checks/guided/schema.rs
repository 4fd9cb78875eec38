//! JSON schemas for guided decoding, and a validator for the part of JSON Schema that they use.

use serde_json::{Value, json};

/// Twenty schemas with short texts.
pub(super) fn examples() -> Vec<Value> {
    let word = json!({ "type": "string", "minLength": 1, "maxLength": 8 });
    let digit = json!({ "type": "integer", "minimum": 0, "maximum": 9 });
    let object = |properties: Value| {
        let names: Vec<&String> = properties
            .as_object()
            .map(|p| p.keys().collect())
            .unwrap_or_default();
        json!({ "type": "object", "required": names, "additionalProperties": false, "properties": properties })
    };
    vec![
        json!({ "type": "boolean" }),
        json!({ "type": "null" }),
        digit.clone(),
        json!({ "type": "integer", "minimum": -5, "maximum": 20 }),
        json!({ "type": "number" }),
        word.clone(),
        json!({ "const": "fixed" }),
        json!({ "enum": ["red", "green", "blue"] }),
        json!({ "enum": [1, "two", null] }),
        json!({ "anyOf": [digit, { "type": "boolean" }] }),
        json!({ "type": "array", "items": { "type": "boolean" }, "minItems": 2, "maxItems": 2 }),
        json!({ "type": "array", "items": digit, "minItems": 1, "maxItems": 4 }),
        json!({ "type": "array", "items": word, "maxItems": 2 }),
        object(json!({ "name": word })),
        object(json!({ "name": word, "age": { "type": "integer", "minimum": 0, "maximum": 120 } })),
        object(json!({ "ok": { "type": "boolean" }, "code": digit, "note": word })),
        object(json!({ "colour": { "enum": ["red", "blue"] } })),
        object(json!({ "inner": object(json!({ "deep": { "type": "boolean" } })) })),
        object(
            json!({ "list": { "type": "array", "items": digit, "minItems": 1, "maxItems": 3 } }),
        ),
        json!({
            "type": "array", "minItems": 1, "maxItems": 2,
            "items": object(json!({ "id": digit, "flag": { "type": "boolean" } })),
        }),
    ]
}

/// Whether `value` validates against `schema`.
pub(super) fn validates(schema: &Value, value: &Value) -> bool {
    let list = |key: &str| schema.get(key).and_then(Value::as_array);
    has_type(schema, value)
        && schema.get("const").is_none_or(|only| only == value)
        && list("enum").is_none_or(|values| values.contains(value))
        && list("anyOf").is_none_or(|any| any.iter().any(|schema| validates(schema, value)))
        && is_between(schema, "minimum", "maximum", value.as_f64())
        && is_between(
            schema,
            "minLength",
            "maxLength",
            value.as_str().map(|text| count(text.chars().count())),
        )
        && is_between(
            schema,
            "minItems",
            "maxItems",
            value.as_array().map(|items| count(items.len())),
        )
        && items_validate(schema, value)
        && properties_validate(schema, value)
}

fn has_type(schema: &Value, value: &Value) -> bool {
    match schema.get("type").and_then(Value::as_str) {
        None => true,
        Some("null") => value.is_null(),
        Some("boolean") => value.is_boolean(),
        // Also -0, which is no `i64`.
        Some("integer") => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        Some("number") => value.is_number(),
        Some("string") => value.is_string(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        Some(_) => false,
    }
}

fn count(len: usize) -> f64 {
    f64::from(u32::try_from(len).unwrap_or(u32::MAX))
}

fn is_between(schema: &Value, least: &str, most: &str, size: Option<f64>) -> bool {
    let bound = |key: &str| schema.get(key).and_then(Value::as_f64);
    size.is_none_or(|size| {
        bound(least).is_none_or(|least| size >= least)
            && bound(most).is_none_or(|most| size <= most)
    })
}

fn items_validate(schema: &Value, value: &Value) -> bool {
    let (Some(schema), Some(items)) = (schema.get("items"), value.as_array()) else {
        return true;
    };
    items.iter().all(|item| validates(schema, item))
}

fn properties_validate(schema: &Value, value: &Value) -> bool {
    let (Some(properties), Some(entries)) = (
        schema.get("properties").and_then(Value::as_object),
        value.as_object(),
    ) else {
        return true;
    };
    let required = schema.get("required").and_then(Value::as_array);
    let has_all = required.is_none_or(|names| {
        names
            .iter()
            .filter_map(Value::as_str)
            .all(|name| entries.contains_key(name))
    });
    let is_closed = schema.get("additionalProperties") == Some(&Value::Bool(false));
    has_all
        && entries
            .iter()
            .all(|(name, entry)| match properties.get(name) {
                Some(property) => validates(property, entry),
                None => !is_closed,
            })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_integer_has_no_fraction_however_it_is_written() {
        let digit = json!({ "type": "integer", "minimum": 0, "maximum": 9 });
        let is_digit = |text: &str| validates(&digit, &serde_json::from_str(text).unwrap());
        for text in ["0", "-0", "9", "9.0"] {
            assert!(is_digit(text), "{text}");
        }
        for text in ["0.5", "-1", "10", "\"1\""] {
            assert!(!is_digit(text), "{text}");
        }
    }
}
