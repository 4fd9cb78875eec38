//! Constraints on answers: `response_format`, and the `guided_*` fields beyond OpenAI's.

use std::collections::BTreeSet;

use genset_backend_common::{GuidedDecoding, config::GuidedKind};
use serde_json::{Value, json};

use super::fields::Fields;
use crate::error::ApiError;
use crate::json::{Meter, value_bytes};

/// A constraint on the answer, and the field that asks for it.
#[derive(Debug, Clone, PartialEq)]
pub struct GuidedOptions {
    /// The constraint.
    pub decoding: GuidedDecoding,
    /// The field, with its path.
    pub field: String,
    /// The approximate memory of the constraint.
    pub(crate) bytes: usize,
}

impl GuidedOptions {
    fn new(decoding: GuidedDecoding, field: String) -> Self {
        Self {
            bytes: guided_bytes(&decoding),
            decoding,
            field,
        }
    }

    /// Parses the `response_format` of a chat; `None` for plain text.
    pub(super) fn read_response_format(fields: &mut Fields<'_>) -> Result<Option<Self>, ApiError> {
        let Some(mut format) = fields.object("response_format")? else {
            return Ok(None);
        };
        let kind = format.string("type")?;
        let decoding = match kind.as_deref() {
            Some("text") => None,
            Some("json_object") => Some(GuidedDecoding::JsonObject),
            Some("json_schema") => Some(GuidedDecoding::JsonSchema(read_schema(&mut format)?)),
            _ => {
                let problem = "expected \"text\", \"json_object\" or \"json_schema\"";
                return Err(ApiError::invalid("response_format.type", problem));
            }
        };
        format.finish(&[])?;
        Ok(decoding.map(|decoding| Self::new(decoding, "response_format".into())))
    }

    /// Parses the `guided_*` fields of a request or of an extension object in it.
    pub(super) fn read_extensions(fields: &mut Fields<'_>) -> Result<Option<Self>, ApiError> {
        let mut found = None;
        for (name, read) in READERS {
            if let Some(value) = fields.take(name)? {
                let field = fields.full_name(name);
                let decoding = read(&field, value, fields.meter())?;
                join(&mut found, Some(Self::new(decoding, field)))?;
            }
        }
        Ok(found)
    }

    /// Returns the constraint, if the engine supports it.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn check(self, declared: &BTreeSet<GuidedKind>) -> Result<GuidedDecoding, ApiError> {
        if declared.contains(&self.decoding.kind()) {
            return Ok(self.decoding);
        }
        // A JSON schema can express "any object" too.
        if self.decoding == GuidedDecoding::JsonObject && declared.contains(&GuidedKind::JsonSchema)
        {
            return Ok(GuidedDecoding::JsonSchema(json!({"type": "object"})));
        }
        let why = "this model's engine does not support this kind of guided decoding; leave the field out";
        Err(ApiError::unsupported(self.field, why))
    }
}

/// The approximate memory of a constraint.
pub(crate) fn guided_bytes(decoding: &GuidedDecoding) -> usize {
    match decoding {
        GuidedDecoding::JsonObject => 0,
        GuidedDecoding::JsonSchema(schema) => value_bytes(schema),
        GuidedDecoding::Regex(text) | GuidedDecoding::Grammar(text) => text.len(),
        GuidedDecoding::Choice(texts) => {
            let bytes = |text: &String| size_of::<String>() + text.len();
            texts.iter().map(bytes).sum()
        }
    }
}

/// Takes `other` unless there is a constraint already.
///
/// # Errors
/// A 400 that names the later of two.
pub(super) fn join(
    found: &mut Option<GuidedOptions>,
    other: Option<GuidedOptions>,
) -> Result<(), ApiError> {
    match (&*found, other) {
        (_, None) => Ok(()),
        (None, other) => {
            *found = other;
            Ok(())
        }
        (Some(first), Some(second)) => {
            let problem = format!(
                "'{}' binds the answer already; leave one of them out",
                first.field
            );
            Err(ApiError::invalid(second.field, problem))
        }
    }
}

/// The schema in a `response_format`. Its name and description are for people.
fn read_schema(format: &mut Fields<'_>) -> Result<Value, ApiError> {
    let inner = format.object("json_schema")?;
    let mut inner = inner.ok_or_else(|| {
        let problem = "expected an object with a name and a schema";
        ApiError::invalid("response_format.json_schema", problem)
    })?;
    if inner.string("name")?.is_none_or(|name| name.is_empty()) {
        return Err(ApiError::invalid(
            inner.full_name("name"),
            "expected a name",
        ));
    }
    inner.string("description")?;
    inner.bool("strict")?;
    let schema = inner.take("schema")?;
    let schema = schema
        .ok_or_else(|| ApiError::invalid(inner.full_name("schema"), "you must provide a schema"))?;
    check_schema(&inner.full_name("schema"), &schema)?;
    inner.finish(&[])?;
    Ok(schema)
}

type Reader = fn(&str, Value, &Meter) -> Result<GuidedDecoding, ApiError>;

const READERS: [(&str, Reader); 4] = [
    ("guided_json", |field, value, meter| {
        let schema = match value {
            Value::String(text) => meter.value_in_text(field, &text)?.map_err(|error| {
                ApiError::invalid(field, format!("the text is not JSON: {error}"))
            })?,
            other => other,
        };
        check_schema(field, &schema)?;
        Ok(GuidedDecoding::JsonSchema(schema))
    }),
    ("guided_regex", |field, value, _| {
        text(field, value).map(GuidedDecoding::Regex)
    }),
    ("guided_choice", |field, value, _| {
        let Value::Array(choices) = value else {
            return Err(ApiError::invalid(field, "expected a list of strings"));
        };
        if choices.is_empty() {
            return Err(ApiError::invalid(field, "must hold at least one choice"));
        }
        let choices = choices.into_iter().map(|choice| text(field, choice));
        choices
            .collect::<Result<_, _>>()
            .map(GuidedDecoding::Choice)
    }),
    ("guided_grammar", |field, value, _| {
        text(field, value).map(GuidedDecoding::Grammar)
    }),
];

fn text(field: &str, value: Value) -> Result<String, ApiError> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(text),
        _ => Err(ApiError::invalid(field, "expected text that is not empty")),
    }
}

/// A schema is an object, or `true` for anything at all. `false` allows nothing, which no answer can satisfy.
fn check_schema(field: &str, schema: &Value) -> Result<(), ApiError> {
    match schema {
        Value::Object(_) | Value::Bool(true) => Ok(()),
        _ => Err(ApiError::invalid(
            field,
            "expected a JSON schema: an object",
        )),
    }
}
