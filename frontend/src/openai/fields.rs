//! Reads a JSON object field by field, so that every error names its field and no field is dropped silently.

use std::cell::RefCell;
use std::rc::Rc;

use genset_backend_common::TokenId;
use serde_json::{Map, Value};

use super::hints::Hints;
use crate::error::ApiError;
use crate::json::{self, JsonBody, Meter, describe, sketch};

/// Only values up to this length are compared with neutral values.
const SHORT_BYTES: usize = 64;

/// The unread fields of a request. A field is parsed when it is taken; a field that is never taken is never parsed.
///
/// # Examples
/// ```
/// use genset_frontend::openai::Fields;
///
/// let mut fields = Fields::parse(br#"{"n": 2, "tpyo": 1}"#)?;
/// assert_eq!(fields.u32("n")?, Some(2));
/// let error = fields.finish(&[]).unwrap_err();
/// assert_eq!(error.param, Some("tpyo".into()));
/// # Ok::<(), genset_frontend::ApiError>(())
/// ```
#[derive(Debug)]
pub struct Fields<'a> {
    fields: Vec<(String, Field<'a>)>,
    /// What stands before the fields' names in the client's request.
    prefix: String,
    meter: Rc<Meter>,
    /// The hints of the whole request.
    hints: Rc<RefCell<Hints>>,
}

#[derive(Debug)]
enum Field<'a> {
    /// Raw JSON.
    Text(&'a str),
    /// A field of a chat, converted from another API's request.
    Made(Value),
}

impl Field<'_> {
    fn is_null(&self) -> bool {
        match self {
            Self::Text(text) => json::is_null(text),
            Self::Made(value) => value.is_null(),
        }
    }
}

impl<'a> Fields<'a> {
    /// Takes a body that must be a JSON object.
    ///
    /// # Errors
    /// A 400 that says where the JSON is invalid, or what it is instead of an object.
    pub fn parse(body: impl Into<JsonBody<'a>>) -> Result<Self, ApiError> {
        let body = body.into();
        Ok(Self::of(body.fields()?, body.meter()))
    }

    /// The fields of a chat, converted from another API's request.
    pub(crate) fn made(fields: Map<String, Value>, meter: &Rc<Meter>) -> Self {
        let made = |(name, value)| (name, Field::Made(value));
        Self {
            fields: fields.into_iter().map(made).collect(),
            prefix: String::new(),
            meter: Rc::clone(meter),
            hints: Rc::default(),
        }
    }

    fn of(fields: Vec<(String, &'a str)>, meter: &Rc<Meter>) -> Self {
        let text = |(name, text)| (name, Field::Text(text));
        Self {
            fields: fields.into_iter().map(text).collect(),
            prefix: String::new(),
            meter: Rc::clone(meter),
            hints: Rc::default(),
        }
    }

    /// The meter of what is made from the request.
    pub(crate) fn meter(&self) -> &Rc<Meter> {
        &self.meter
    }

    fn remove(&mut self, name: &str) -> Option<Field<'a>> {
        let at = self.fields.iter().position(|(known, _)| known == name)?;
        let (_, field) = self.fields.remove(at);
        (!field.is_null()).then_some(field)
    }

    fn make(&self, name: &str, field: Field<'a>) -> Result<Value, ApiError> {
        match field {
            Field::Text(text) => self.meter.value(&self.full_name(name), text),
            Field::Made(value) => Ok(value),
        }
    }

    /// Takes a field that must be an object; its own fields are read the same way, as a part of the same request. Error messages
    /// name them with their path.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn object(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        let inner = match self.remove(name) {
            None => return Ok(None),
            Some(Field::Text(text)) if json::is_object(text) => {
                Self::of(json::fields_of(&self.full_name(name), text)?, &self.meter)
            }
            Some(Field::Made(Value::Object(fields))) => Self::made(fields, &self.meter),
            Some(other) => return Err(self.not_that(name, "an object", other)),
        };
        Ok(Some(Self {
            prefix: format!("{}.", self.full_name(name)),
            hints: Rc::clone(&self.hints),
            ..inner
        }))
    }

    /// Copies a field's value and leaves the field unread.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn copy(&self, name: &str) -> Result<Option<Value>, ApiError> {
        let found = self.fields.iter().find(|(known, _)| known == name);
        let value = found.map(|(_, field)| match field {
            Field::Text(text) => self.meter.value(&self.full_name(name), text),
            Field::Made(value) => Ok(value.clone()),
        });
        Ok(value.transpose()?.filter(|value| !value.is_null()))
    }

    /// Takes a field of any type; `null` counts as absent.
    ///
    /// # Errors
    /// A 400 that names the field if it is too large or cannot be read; a 503 if there is no memory for it.
    pub fn take(&mut self, name: &str) -> Result<Option<Value>, ApiError> {
        let field = self.remove(name);
        field.map(|field| self.make(name, field)).transpose()
    }

    /// Moves a field of any type into a chat, under its name there.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub(crate) fn hand_on(
        &mut self,
        name: &str,
        chat: &mut Map<String, Value>,
        name_there: &str,
    ) -> Result<(), ApiError> {
        if let Some(value) = self.take(name)? {
            chat.insert(name_there.into(), value);
        }
        Ok(())
    }

    /// Takes a field that must not be a list or an object; those are refused without parsing.
    fn scalar(&mut self, name: &str) -> Result<Option<Value>, ApiError> {
        let field = self.remove(name);
        let value = field.map(|field| match field {
            Field::Text(text) => match sketch(text) {
                Some(sketch) => Ok(sketch),
                None => self.make(name, Field::Text(text)),
            },
            Field::Made(value) => Ok(value),
        });
        value.transpose()
    }

    /// Takes a scalar by `read`, which returns `None` for what is not `expected`.
    fn typed<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&mut Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(mut value) = self.scalar(name)? else {
            return Ok(None);
        };
        match read(&mut value) {
            Some(read) => Ok(Some(read)),
            None => Err(self.wrong_type(name, expected, &value)),
        }
    }

    /// Takes a string.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.typed(name, "a string", |value| match value {
            Value::String(text) => Some(std::mem::take(text)),
            _ => None,
        })
    }

    /// Takes the model's name, which must be there.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub(super) fn model(&mut self) -> Result<String, ApiError> {
        let model = self.string("model")?;
        model.ok_or_else(|| ApiError::invalid("model", "you must provide a model"))
    }

    /// Takes a boolean.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "a boolean", |value| value.as_bool())
    }

    /// Takes a number that fits `f32`.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn f32(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "what does not fit becomes infinite and is refused"
        )]
        let number = |value: &mut Value| value.as_f64().map(|number| number as f32);
        self.typed(name, "a number", |value| {
            number(value).filter(|number| number.is_finite())
        })
    }

    /// Takes an integer from 0 to `u32::MAX`.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn u32(&mut self, name: &str) -> Result<Option<u32>, ApiError> {
        self.typed(name, "an integer between 0 and 4294967295", |value| {
            u32::try_from(value.as_u64()?).ok()
        })
    }

    /// Takes a signed integer of 64 bits.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn i64(&mut self, name: &str) -> Result<Option<i64>, ApiError> {
        self.typed(name, "an integer of 64 bits", |value| value.as_i64())
    }

    /// Takes the bits of a 64-bit integer, signed or unsigned.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn bits64(&mut self, name: &str) -> Result<Option<u64>, ApiError> {
        self.typed(name, "an integer of 64 bits", |value| {
            let signed = value.as_i64().map(i64::cast_unsigned);
            signed.or_else(|| value.as_u64())
        })
    }

    /// Takes a list.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.remove(name) {
            None => Ok(None),
            Some(Field::Text(text)) if !json::is_list(text) => {
                Err(self.not_that(name, "a list", Field::Text(text)))
            }
            Some(field) => match self.make(name, field)? {
                Value::Array(list) => Ok(Some(list)),
                other => Err(self.wrong_type(name, "a list", &other)),
            },
        }
    }

    /// Takes a list of token ids.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub(super) fn token_ids(&mut self, name: &str) -> Result<Option<Vec<TokenId>>, ApiError> {
        match self.remove(name) {
            None => Ok(None),
            Some(Field::Text(text)) if json::is_list(text) => {
                self.meter.token_ids(&self.full_name(name), text).map(Some)
            }
            Some(Field::Made(list @ Value::Array(_))) => serde_json::from_value(list)
                .map(Some)
                .map_err(|_| json::not_token_ids(&self.full_name(name))),
            Some(other) => Err(self.not_that(name, "a list", other)),
        }
    }

    /// Takes the raw JSON of a field; only for requests that come as a body.
    ///
    /// # Errors
    /// A 400 that names the field if it was already parsed.
    pub(super) fn text(&mut self, name: &str) -> Result<Option<&'a str>, ApiError> {
        match self.remove(name) {
            None => Ok(None),
            Some(Field::Text(text)) => Ok(Some(text)),
            Some(made @ Field::Made(_)) => Err(self.not_that(name, "JSON of the body", made)),
        }
    }

    /// The 400 for a field of the wrong type. Does not parse what is in a list or an object.
    fn not_that(&self, name: &str, expected: &str, got: Field<'a>) -> ApiError {
        let got = match got {
            Field::Text(text) => {
                sketch(text).map_or_else(|| self.make(name, Field::Text(text)), Ok)
            }
            Field::Made(value) => Ok(value),
        };
        got.map_or_else(|error| error, |got| self.wrong_type(name, expected, &got))
    }

    /// The 400 for a field of the wrong type.
    #[must_use]
    pub fn wrong_type(&self, name: &str, expected: &str, got: &Value) -> ApiError {
        ApiError::invalid(
            self.full_name(name),
            format!("expected {expected}, got {}", describe(got)),
        )
    }

    /// The name of a field with its prefix, as the client sees it.
    #[must_use]
    pub fn full_name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Refuses a field, unless it is absent or one of the `neutral` values, which ask for nothing.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn refuse(&mut self, name: &str, neutral: &[Value], why: &str) -> Result<(), ApiError> {
        let is_neutral = match self.remove(name) {
            None => true,
            // All neutral values are short.
            Some(Field::Text(text)) => {
                text.len() <= SHORT_BYTES
                    && serde_json::from_str(text).is_ok_and(|value| neutral.contains(&value))
            }
            Some(Field::Made(value)) => neutral.contains(&value),
        };
        if is_neutral {
            return Ok(());
        }
        Err(ApiError::unsupported(self.full_name(name), why))
    }

    /// Takes a string that has no effect here and whose absence cannot make an answer wrong. Values in `neutral` ask for
    /// nothing.
    ///
    /// # Errors
    /// A 400 that names the field if it is not a string.
    pub(crate) fn hint(
        &mut self,
        name: &str,
        neutral: &[&str],
        why: &'static str,
    ) -> Result<(), ApiError> {
        match self.string(name)? {
            Some(value) if !neutral.contains(&value.as_str()) => self.accept(name, why),
            Some(_) | None => Ok(()),
        }
    }

    /// Records what was read and has no effect, and whose absence cannot make an answer wrong.
    ///
    /// # Errors
    /// A 400 that names it if the server is known to be strict.
    pub(crate) fn accept(&self, name: &str, why: &'static str) -> Result<(), ApiError> {
        self.hints.borrow_mut().accept(self.full_name(name), why)
    }

    /// Records a field that was read and has no effect.
    pub(crate) fn ignore(&self, name: &str) {
        self.hints.borrow_mut().ignore(self.full_name(name));
    }

    /// Refuses unread fields, except the names in `ignored`, which are hints.
    ///
    /// # Errors
    /// A 400 that names the first unknown field.
    pub fn finish(self, ignored: &[&str]) -> Result<(), ApiError> {
        self.refuse_all_but(ignored)?;
        let there = self.fields.iter().filter(|(_, field)| !field.is_null());
        there.for_each(|(name, _)| self.ignore(name));
        Ok(())
    }

    /// Like [`Self::finish`], for the whole request; returns its hints.
    ///
    /// # Errors
    /// A 400 that names the first unknown field.
    pub(crate) fn finish_request(self, ignored: &[&str]) -> Result<Hints, ApiError> {
        let hints = Rc::clone(&self.hints);
        self.finish(ignored)?;
        Ok(hints.take())
    }

    /// Like [`Self::finish`], for fields that are read later.
    ///
    /// # Errors
    /// A 400 that names the first field that is not in `known`.
    pub(crate) fn refuse_all_but(&self, known: &[&str]) -> Result<(), ApiError> {
        let unknown = self
            .fields
            .iter()
            .find(|(name, field)| !field.is_null() && !known.contains(&name.as_str()));
        let Some((name, _)) = unknown else {
            return Ok(());
        };
        Err(ApiError::unknown(self.full_name(name)))
    }
}
