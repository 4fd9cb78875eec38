//! Reads JSON from clients without using many times its size.
//!
//! A value takes 72 bytes here, however short its text, and its content takes more. So a body is not parsed into values as a
//! whole: its object is split into the texts of its fields, each is parsed into its own type, and a [`Meter`] counts the
//! values made on the way. Only the APIs' requests are read through it.

mod meter;

use std::rc::Rc;

use http::StatusCode;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use crate::budget::{MemoryBudget, MemoryShare};
use crate::error::ApiError;
pub(crate) use meter::{Meter, not_token_ids, value_bytes};

/// The most fields of an object that is read field by field: several times the most that any API has.
const MAX_FIELDS: usize = 256;

/// A request's raw body, and the meter of what is made from it.
#[derive(Debug)]
pub struct JsonBody<'a> {
    bytes: &'a [u8],
    meter: Rc<Meter>,
}

impl<'a, T: AsRef<[u8]> + ?Sized> From<&'a T> for JsonBody<'a> {
    /// A body that is charged to no account.
    fn from(body: &'a T) -> Self {
        let bytes = body.as_ref();
        let account = MemoryBudget::new(usize::MAX).share();
        let meter = Rc::new(Meter::new(bytes.len(), account));
        Self { bytes, meter }
    }
}

impl<'a> JsonBody<'a> {
    pub(crate) fn new(bytes: &'a [u8], meter: &Rc<Meter>) -> Self {
        let meter = Rc::clone(meter);
        Self { bytes, meter }
    }

    pub(crate) fn meter(&self) -> &Rc<Meter> {
        &self.meter
    }

    pub(crate) fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The texts of its fields; of duplicates, the last.
    ///
    /// # Errors
    /// A 400 that says where the JSON is invalid, or what it is instead of an object.
    pub(crate) fn fields(&self) -> Result<Vec<(String, &'a str)>, ApiError> {
        let bad_request = |message| ApiError::new(StatusCode::BAD_REQUEST, message);
        let text = std::str::from_utf8(self.bytes).map_err(|error| {
            let at = error.valid_up_to();
            bad_request(format!(
                "The request body is not valid JSON: it is not UTF-8 from byte {at} on."
            ))
        })?;
        if let Some(fields) = split_object(text) {
            return check_count(fields, "The request body");
        }
        Err(bad_request(match serde_json::from_str(text) {
            Err(error) => format!("The request body is not valid JSON: {error}."),
            Ok(IgnoredAny) if text.trim_start().starts_with('{') => {
                "The request body is not valid JSON: the name of a field is not text.".into()
            }
            Ok(IgnoredAny) => format!(
                "The request body must be a JSON object, got {}.",
                describe(
                    &sketch(text).unwrap_or_else(|| serde_json::from_str(text).unwrap_or_default())
                )
            ),
        }))
    }
}

/// Parses a request with `work` from a body on the account of `share`, which then holds what was made.
///
/// # Errors
/// The errors of `work` and of [`Meter`].
pub(crate) fn metered<T>(
    body: &[u8],
    body_bytes: usize,
    share: MemoryShare,
    work: impl FnOnce(JsonBody<'_>) -> Result<T, ApiError>,
) -> Result<(T, MemoryShare), ApiError> {
    let meter = Rc::new(Meter::new(body_bytes, share));
    let read = work(JsonBody::new(body, &meter));
    Ok((read?, meter.settle()))
}

fn check_count<T>(fields: Vec<T>, what: &str) -> Result<Vec<T>, ApiError> {
    if fields.len() > MAX_FIELDS {
        let message = format!("{what} has more than {MAX_FIELDS} fields.");
        return Err(ApiError::new(StatusCode::BAD_REQUEST, message));
    }
    Ok(fields)
}

/// The fields of an object whose text is known to be JSON.
///
/// # Errors
/// A 400 that names the object.
pub(crate) fn fields_of<'a>(name: &str, text: &'a str) -> Result<Vec<(String, &'a str)>, ApiError> {
    let fields = split_object(text);
    let fields = fields
        .ok_or_else(|| ApiError::invalid(name, "the name of one of its fields is not text"))?;
    check_count(fields, &format!("'{name}'"))
}

/// The fields of an object, each name once, with the text of its last value; at most one more than [`MAX_FIELDS`]. `None` if
/// the text is not a JSON object.
fn split_object(text: &str) -> Option<Vec<(String, &str)>> {
    let mut fields: Vec<(String, &str)> = Vec::new();
    let mut rest = trim(text).strip_prefix('{')?;
    let mut is_first = true;
    loop {
        rest = trim(rest);
        if is_first && let Some(end) = rest.strip_prefix('}') {
            return trim(end).is_empty().then_some(fields);
        }
        is_first = false;
        let (name, _, after) = next::<String>(rest)?;
        let (IgnoredAny, value, after) = next(trim(after).strip_prefix(':')?)?;
        if let Some(field) = fields.iter_mut().find(|(known, _)| *known == name) {
            field.1 = value;
        } else if fields.len() <= MAX_FIELDS {
            fields.push((name, value));
        }
        rest = trim(after);
        if let Some(end) = rest.strip_prefix('}') {
            return trim(end).is_empty().then_some(fields);
        }
        rest = rest.strip_prefix(',')?;
    }
}

/// The texts of a list's items. The list must be valid JSON.
pub(crate) fn items(list: &str) -> impl Iterator<Item = &str> {
    let mut rest = trim(list).strip_prefix('[').unwrap_or_default();
    std::iter::from_fn(move || {
        let (IgnoredAny, item, after) = next(rest)?;
        rest = trim(after).strip_prefix(',').unwrap_or_default();
        Some(item)
    })
}

/// The first value of a text, its own text, and the text after it.
fn next<'a, T: Deserialize<'a>>(text: &'a str) -> Option<(T, &'a str, &'a str)> {
    let text = trim(text);
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<T>();
    let value = values.next()?.ok()?;
    let (own, behind) = text.split_at_checked(values.byte_offset())?;
    Some((value, own, behind))
}

fn trim(text: &str) -> &str {
    text.trim_start_matches([' ', '\n', '\r', '\t'])
}

pub(crate) fn is_null(text: &str) -> bool {
    text == "null"
}

pub(crate) fn is_list(text: &str) -> bool {
    text.starts_with('[')
}

pub(crate) fn is_object(text: &str) -> bool {
    text.starts_with('{')
}

/// A stub for a list or an object of which only the type matters.
pub(crate) fn sketch(text: &str) -> Option<Value> {
    match trim(text).as_bytes().first() {
        Some(b'[') => Some(Value::Array(Vec::new())),
        Some(b'{') => Some(Value::Object(Map::new())),
        _ => None,
    }
}

/// A value in an error message: its type, and the value itself if it is short.
pub(crate) fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(value) => format!("the boolean {value}"),
        Value::Number(number) => format!("the number {number}"),
        Value::String(text) if text.len() <= 40 => format!("the string {text:?}"),
        Value::String(_) => "a string".into(),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}

/// The 400 for a field whose text cannot become a value: too deep, a number too large, half a surrogate pair.
pub(crate) fn unreadable(name: &str, error: &serde_json::Error) -> ApiError {
    // The position is relative to the field.
    let problem = error.to_string();
    let problem = problem.split(" at line ").next().unwrap_or_default();
    let message = format!("The request body is not valid JSON: {problem} in '{name}'.");
    ApiError {
        param: Some(name.into()),
        ..ApiError::new(StatusCode::BAD_REQUEST, message)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 20, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::btree_map("[a-c\"\\\\]{0,2}", inner, 0..5)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn an_object_is_split_as_it_is_read(value in value(), is_pretty: bool) {
            let text = if is_pretty {
                serde_json::to_string_pretty(&value).unwrap()
            } else {
                value.to_string()
            };
            let read: Value = serde_json::from_str(&text).unwrap();
            let split = split_object(&text).map(|fields| {
                let made = |(name, text): (String, &str)| (name, serde_json::from_str(text).unwrap());
                Value::Object(fields.into_iter().map(made).collect::<Map<_, Value>>())
            });
            prop_assert_eq!(split, read.is_object().then(|| read.clone()));
            if let Value::Array(list) = read {
                let split: Vec<Value> = items(&text).map(|item| serde_json::from_str(item).unwrap()).collect();
                prop_assert_eq!(split, list);
            }
        }

        #[test]
        fn what_is_not_json_is_not_split(text in "[\\{\\}\\[\\]\",:0-9a ]{0,12}") {
            let is_object = serde_json::from_str::<Map<String, Value>>(&text).is_ok();
            prop_assert_eq!(split_object(&text).is_some(), is_object, "{}", text);
            prop_assert_eq!(JsonBody::from(text.as_bytes()).fields().is_ok(), is_object);
        }
    }

    #[test]
    fn of_fields_with_one_name_the_last_counts() {
        let fields = JsonBody::from(br#" {"a": 1, "b" : [2] ,"a":{} } "#).fields();
        assert_eq!(fields.unwrap(), [("a".into(), "{}"), ("b".into(), "[2]")]);
    }

    #[test]
    fn a_crowd_of_fields_is_refused() {
        let fields: Map<String, Value> = (0..257).map(|at| (at.to_string(), json!(0))).collect();
        let body = Value::Object(fields).to_string();
        let error = JsonBody::from(body.as_bytes()).fields().unwrap_err();
        assert!(error.to_string().contains("256 fields"), "{error}");
        let same = format!("{{{}\"a\":0}}", "\"a\":0,".repeat(1000));
        assert_eq!(JsonBody::from(same.as_bytes()).fields().unwrap().len(), 1);
    }
}
