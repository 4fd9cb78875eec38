//! Reading a JSON object field by field, so that every error names its field and nothing is dropped in silence.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// The fields of a request that were not read yet.
///
/// # Examples
/// ```
/// use genset_frontend::openai::Fields;
///
/// let mut fields = Fields::parse(br#"{"n": 2, "tpyo": 1}"#)?;
/// assert_eq!(fields.u32("n")?, Some(2));
/// let error = fields.finish(&[]).unwrap_err();
/// assert_eq!(error.param.as_deref(), Some("tpyo"));
/// # Ok::<(), genset_frontend::ApiError>(())
/// ```
#[derive(Debug)]
pub struct Fields {
    object: Map<String, Value>,
    prefix: &'static str,
}

impl From<Map<String, Value>> for Fields {
    fn from(object: Map<String, Value>) -> Self {
        Self { object, prefix: "" }
    }
}

impl Fields {
    /// Takes a body that must be a JSON object.
    ///
    /// # Errors
    /// A 400 that says where the JSON breaks, or what it is instead of an object.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let bad_request = |message| ApiError::new(http::StatusCode::BAD_REQUEST, message);
        let value: Value = serde_json::from_slice(body).map_err(|error| {
            bad_request(format!("The request body is not valid JSON: {error}."))
        })?;
        match value {
            Value::Object(object) => Ok(object.into()),
            other => Err(bad_request(format!(
                "The request body must be a JSON object, got {}.",
                describe(&other)
            ))),
        }
    }

    /// Takes a field that must be an object; its own fields are read the same way. `prefix` is put before their names.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn object(&mut self, name: &str, prefix: &'static str) -> Result<Option<Self>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Self { object, prefix })),
            Some(other) => Err(self.wrong_type(name, "an object", &other)),
        }
    }

    /// Looks at a field and leaves it to be read.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.object.get(name)
    }

    /// Takes a field as it is; `null` counts as absent.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.object
            .shift_remove(name)
            .filter(|value| !value.is_null())
    }

    /// Takes a string.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong_type(name, "a string", &other)),
        }
    }

    /// Takes a boolean.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong_type(name, "a boolean", &other)),
        }
    }

    /// Takes a number that fits `f32`.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn f32(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        #[expect(
            clippy::cast_possible_truncation,
            reason = "what does not fit becomes infinite and is refused"
        )]
        match value.as_f64().map(|number| number as f32) {
            Some(number) if number.is_finite() => Ok(Some(number)),
            _ => Err(self.wrong_type(name, "a number", &value)),
        }
    }

    /// Takes an integer from 0 to `u32::MAX`.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn u32(&mut self, name: &str) -> Result<Option<u32>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match value.as_u64().and_then(|number| u32::try_from(number).ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong_type(name, "an integer between 0 and 4294967295", &value)),
        }
    }

    /// Takes an integer of 64 bits, with or without sign.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn i64(&mut self, name: &str) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match value.as_i64() {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong_type(name, "an integer of 64 bits", &value)),
        }
    }

    /// Takes a list.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(self.wrong_type(name, "a list", &other)),
        }
    }

    /// The 400 for a field of the wrong type.
    #[must_use]
    pub fn wrong_type(&self, name: &str, expected: &str, got: &Value) -> ApiError {
        ApiError::invalid(
            self.full_name(name),
            format!("expected {expected}, got {}", describe(got)),
        )
    }

    /// The name of a field as the client finds it.
    #[must_use]
    pub fn full_name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Refuses a field that is there and not one of the values that ask for nothing.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn refuse(&mut self, name: &str, neutral: &[Value], why: &str) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !neutral.contains(&value) => {
                Err(ApiError::unsupported(self.full_name(name), why))
            }
            _ => Ok(()),
        }
    }

    /// Refuses whatever was not read, but for the names in `ignored`.
    ///
    /// # Errors
    /// A 400 that names the first unknown field.
    pub fn finish(mut self, ignored: &[&str]) -> Result<(), ApiError> {
        self.object
            .retain(|name, value| !value.is_null() && !ignored.contains(&name.as_str()));
        match self.object.keys().next() {
            None => Ok(()),
            Some(name) => {
                let name = self.full_name(name);
                let message = format!("Unrecognized request argument supplied: {name}.");
                let base = ApiError::new(http::StatusCode::BAD_REQUEST, message);
                Err(ApiError {
                    param: Some(name),
                    code: Some("unknown_parameter"),
                    ..base
                })
            }
        }
    }
}

/// A value in an error message: its kind, and the value itself when it is short.
fn describe(value: &Value) -> String {
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
