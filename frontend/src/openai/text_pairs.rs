//! [`TextPairs`]: the texts of a request that are scored in pairs, with their names in the request.

use std::sync::Arc;

use super::common::at_most;
use super::fields::Fields;
use crate::error::ApiError;
use crate::json::{Meter, fields_of, is_list, is_null, is_object, items};

/// One or several texts of a field. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextList {
    field: &'static str,
    texts: Arc<Vec<String>>,
    /// Whether the client wrote a list.
    is_list: bool,
}

impl TextList {
    /// A list of one text.
    ///
    /// # Errors
    /// A 400 that names the field if the text is empty.
    pub fn of_one(field: &'static str, text: String) -> Result<Self, ApiError> {
        Self::try_new(field, vec![text], false)
    }

    fn try_new(field: &'static str, texts: Vec<String>, is_list: bool) -> Result<Self, ApiError> {
        let list = Self {
            field,
            texts: Arc::new(texts),
            is_list,
        };
        match list.texts.iter().position(String::is_empty) {
            None => Ok(list),
            Some(empty) => Err(ApiError::invalid(list.name(empty), "must not be empty")),
        }
    }

    /// Takes a field with a text or a list of at most `max` texts. A text may be an object with the one field `text`.
    ///
    /// # Errors
    /// A 400 that names the text.
    pub(super) fn read(
        fields: &mut Fields<'_>,
        field: &'static str,
        max: usize,
    ) -> Result<Self, ApiError> {
        let Some(json) = fields.text(field)? else {
            let problem = format!("you must provide {field}");
            return Err(ApiError::invalid(field, problem));
        };
        let meter = fields.meter();
        if json.starts_with('"') {
            return Self::of_one(field, meter.text(field, json)?);
        }
        if !is_list(json) || items(json).next().is_none() {
            let problem = "expected a text or a list of at least one";
            return Err(ApiError::invalid(field, problem));
        }
        at_most(field, max, items(json).count(), plural(field))?;
        let texts = items(json)
            .enumerate()
            .map(|(index, item)| read_text(&format!("{field}[{index}]"), item, meter));
        Self::try_new(field, texts.collect::<Result<_, _>>()?, true)
    }

    /// The texts, at least one, none of them empty.
    #[must_use]
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// The name of the text at `index` in the client's request.
    #[must_use]
    pub fn name(&self, index: usize) -> String {
        if self.is_list {
            format!("{}[{index}]", self.field)
        } else {
            self.field.to_owned()
        }
    }

    /// The bytes of all texts.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let text = |text: &String| size_of::<String>() + text.len();
        self.texts.iter().map(text).sum()
    }
}

fn plural(field: &str) -> &str {
    if field.ends_with('s') { field } else { "texts" }
}

/// Parses a string, or an object with the one field `text`; other fields may be `null`, as everywhere.
fn read_text(name: &str, json: &str, meter: &Meter) -> Result<String, ApiError> {
    if json.starts_with('"') {
        return meter.text(name, json);
    }
    if !is_object(json) {
        let problem = "expected a text or an object with a text, such as {\"text\": \"...\"}";
        return Err(ApiError::invalid(name, problem));
    }
    let mut text = None;
    for (key, value) in fields_of(name, json)? {
        let full = format!("{name}.{key}");
        if key != "text" && is_null(value) {
            continue;
        }
        if key != "text" {
            return Err(ApiError::unsupported(
                full,
                "a document has only the field 'text'; put all content into it",
            ));
        }
        text = Some(meter.text(&full, value)?);
    }
    text.ok_or_else(|| ApiError::invalid(format!("{name}.text"), "you must provide a text"))
}

/// Pairs of texts to score: one text with each of several, or two lists of equal length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextPairs {
    first: TextList,
    second: TextList,
}

impl TextPairs {
    /// The pairs of `first` with `second`.
    ///
    /// # Errors
    /// A 400 that names the second field, unless there is one first text or as many as second texts.
    pub fn try_new(first: TextList, second: TextList) -> Result<Self, ApiError> {
        let (ones, others) = (first.texts.len(), second.texts.len());
        if ones != 1 && ones != others {
            let problem = format!(
                "expected {ones} texts, as {} has, or one text there for all of these; got {others}",
                first.field
            );
            return Err(ApiError::invalid(second.field, problem));
        }
        Ok(Self { first, second })
    }

    /// The first texts of the pairs: one for all pairs, or one for each.
    #[must_use]
    pub fn first(&self) -> &TextList {
        &self.first
    }

    /// The second texts, one for each pair.
    #[must_use]
    pub fn second(&self) -> &TextList {
        &self.second
    }
}
