//! [`Block`]: a JSON object somewhere in a request, read field by field, so that every error names its path.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// The unread fields of an object, and its position.
#[derive(Debug)]
pub(crate) struct Block {
    at: String,
    fields: Map<String, Value>,
}

impl Block {
    /// Takes a value that must be an object.
    pub(crate) fn new(at: String, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(fields) => Ok(Self { at, fields }),
            Value::Null
            | Value::Bool(_)
            | Value::Number(_)
            | Value::String(_)
            | Value::Array(_) => Err(ApiError::invalid(at, "expected an object")),
        }
    }

    /// The path of one of its fields.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}.{name}", self.at)
    }

    /// Takes a field; `null` counts as absent.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        let value = self.fields.shift_remove(name);
        value.filter(|value| !value.is_null())
    }

    /// Takes a string that may be absent.
    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(ApiError::invalid(self.path(name), "expected a string")),
        }
    }

    /// Takes a string that must be there.
    pub(crate) fn required_string(&mut self, name: &str) -> Result<String, ApiError> {
        let text = self.string(name)?;
        text.ok_or_else(|| ApiError::invalid(self.path(name), "expected a string"))
    }

    /// Takes a boolean; absent is `false`.
    pub(crate) fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(_) => Err(ApiError::invalid(self.path(name), "expected a boolean")),
        }
    }

    /// Takes an object that may be absent.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Value>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(object @ Value::Object(_)) => Ok(Some(object)),
            Some(_) => Err(ApiError::invalid(self.path(name), "expected an object")),
        }
    }

    /// Takes an object that must be there; `why` is said where it is not.
    pub(crate) fn required_object(&mut self, name: &str, why: &str) -> Result<Value, ApiError> {
        let object = self.object(name)?;
        object.ok_or_else(|| ApiError::invalid(self.path(name), why))
    }

    /// Refuses a field, unless it is absent or one of the `neutral` values, which ask for nothing.
    pub(crate) fn refuse(&mut self, name: &str, neutral: &[Value]) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !neutral.contains(&value) => Err(ApiError::unsupported(
                self.path(name),
                "it is not available",
            )),
            _ => Ok(()),
        }
    }

    /// The refusal of a field's value that is none of `available`.
    pub(crate) fn unavailable(&self, name: &str, got: &str, available: &str) -> ApiError {
        let why = format!("{got:?} is not available, only {available}");
        ApiError::unsupported(self.path(name), why)
    }

    /// Refuses unread fields, except the names in `ignored`.
    pub(crate) fn finish(mut self, ignored: &[&str]) -> Result<(), ApiError> {
        self.fields
            .retain(|name, value| !value.is_null() && !ignored.contains(&name.as_str()));
        match self.fields.keys().next() {
            None => Ok(()),
            Some(name) => {
                let why = "this server does not know it";
                Err(ApiError::unsupported(self.path(name), why))
            }
        }
    }
}
