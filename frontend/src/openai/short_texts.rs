//! Objects with short string values, such as `metadata`: notes of a client on a stored object or an answer.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// The most entries, and the most characters of a name and of a value, as for OpenAI's `metadata`.
const MOST: (usize, usize, usize) = (16, 64, 512);

/// Parses such an object.
///
/// # Errors
/// A 400 that names the field, `field`.
pub(crate) fn short_texts<'a>(
    field: &str,
    value: &'a Value,
) -> Result<&'a Map<String, Value>, ApiError> {
    short_values(field, value, "texts", Value::is_string)
}

/// Checks an object of options that this server does not read: short strings, numbers and booleans.
///
/// # Errors
/// As [`short_texts`].
pub(crate) fn check_options(field: &str, value: &Value) -> Result<(), ApiError> {
    let kinds = "texts, numbers or booleans";
    let is_plain = |value: &Value| !value.is_object() && !value.is_array();
    short_values(field, value, kinds, is_plain).map(drop)
}

fn short_values<'a>(
    field: &str,
    value: &'a Value,
    kinds: &str,
    is_one: fn(&Value) -> bool,
) -> Result<&'a Map<String, Value>, ApiError> {
    let (most, letters_of_name, letters) = MOST;
    let invalid = |problem: String| Err(ApiError::invalid(field, problem));
    let Some(values) = value.as_object() else {
        return invalid(format!("expected an object of {kinds}"));
    };
    if values.len() > most {
        return invalid(format!("may have {most} entries at most"));
    }
    let is_short_one = |(name, value): (&String, &Value)| {
        let is_long = value.as_str().is_some_and(|text| !is_short(text, letters));
        is_one(value) && !is_long && is_short(name, letters_of_name)
    };
    if values.iter().all(is_short_one) {
        return Ok(values);
    }
    invalid(format!(
        "expected {kinds}, a text of at most {letters} letters, under names of at most {letters_of_name}"
    ))
}

/// Whether a text has at most `letters` characters.
pub(crate) fn is_short(text: &str, letters: usize) -> bool {
    text.chars().nth(letters).is_none()
}
