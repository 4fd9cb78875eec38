//! Objects of short texts, such as `metadata`: what a client notes on something that is kept, or repeated in its answer.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// The most entries, and the most letters of a name and of a text: those of OpenAI's `metadata`.
const MOST: (usize, usize, usize) = (16, 64, 512);

/// The entries of such an object.
///
/// # Errors
/// A 400 that names the field, `field`.
pub(crate) fn short_texts<'a>(
    field: &str,
    value: &'a Value,
) -> Result<&'a Map<String, Value>, ApiError> {
    let (most, letters_of_name, letters) = MOST;
    let problem = match value {
        Value::Object(values) if values.len() > most => format!("may have {most} entries at most"),
        Value::Object(values) => {
            let is_one = |(name, value): (&String, &Value)| {
                let is_text = value.as_str().is_some_and(|text| is_short(text, letters));
                is_text && is_short(name, letters_of_name)
            };
            if values.iter().all(is_one) {
                return Ok(values);
            }
            format!(
                "expected texts of at most {letters} letters, under names of at most {letters_of_name}"
            )
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            "expected an object of strings".into()
        }
    };
    Err(ApiError::invalid(field, problem))
}

/// Whether a text has no more than so many letters.
pub(crate) fn is_short(text: &str, letters: usize) -> bool {
    text.chars().nth(letters).is_none()
}
