//! [`Line`]: a line of the output, both as written and as the run reads it back.
//!
//! An engine's answer may contain JSON that is not a valid value here, such as a number that does not fit a float. So only the
//! fields that count are parsed.

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

/// A line of the output.
#[derive(Debug)]
pub(super) struct Line {
    /// The JSON to note.
    pub(super) json: Box<RawValue>,
    /// Whether every worker was full or unreachable to the end, or lost the request. Another run may have an answer.
    pub(super) is_for_later: bool,
}

impl Line {
    /// A line with these fields.
    ///
    /// # Errors
    /// When they cannot be written as JSON.
    pub(super) fn try_new(fields: &impl Serialize, is_for_later: bool) -> serde_json::Result<Self> {
        Ok(Self {
            json: to_raw_value(fields)?,
            is_for_later,
        })
    }
}

/// The parsed fields of a line.
#[derive(Debug, Deserialize)]
pub(super) struct LineSummary<'a> {
    error: Option<IgnoredAny>,
    /// A text, or the answer to a request in OpenAI's format.
    #[serde(borrow)]
    response: Option<&'a RawValue>,
    tokens_in: Option<u64>,
    tokens_out: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct LineResponse<'a> {
    status_code: u64,
    #[serde(borrow)]
    body: Option<&'a RawValue>,
}

#[derive(Debug, Deserialize)]
struct LineBody<'a> {
    #[serde(borrow)]
    usage: Option<LineUsage<'a>>,
}

/// The token counts of an answer. Chat completions and embeddings have `prompt_tokens` and `completion_tokens`, responses and
/// messages the other two. Each is parsed by itself: an invalid count does not affect the others.
#[derive(Debug, Default, Deserialize)]
struct LineUsage<'a> {
    #[serde(borrow)]
    prompt_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    completion_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    output_tokens: Option<&'a RawValue>,
}

impl<'a> LineSummary<'a> {
    /// Parses a line.
    ///
    /// # Errors
    /// When it is not a line of the output.
    pub(super) fn read(line: &'a str) -> serde_json::Result<Self> {
        serde_json::from_str(line)
    }

    fn response(&self) -> Option<LineResponse<'a>> {
        serde_json::from_str(self.response?.get()).ok()
    }

    /// The status of the answer to a request in OpenAI's format.
    pub(super) fn status(&self) -> Option<u64> {
        Some(self.response()?.status_code)
    }

    /// Whether the line has an error in place of an answer.
    pub(super) fn is_failure(&self) -> bool {
        self.error.is_some() || self.status().is_some_and(|status| status >= 400)
    }

    /// The token counts of the prompt and of the answer.
    pub(super) fn tokens(&self) -> (u64, u64) {
        let body = self.response().and_then(|response| response.body);
        let body = body.and_then(|body| serde_json::from_str::<LineBody<'_>>(body.get()).ok());
        let usage = body.and_then(|body| body.usage).unwrap_or_default();
        let tokens_in = self.tokens_in.or_else(|| count(usage.prompt_tokens));
        let tokens_out = self.tokens_out.or_else(|| count(usage.completion_tokens));
        let tokens_in = tokens_in.or_else(|| count(usage.input_tokens));
        let tokens_out = tokens_out.or_else(|| count(usage.output_tokens));
        (tokens_in.unwrap_or(0), tokens_out.unwrap_or(0))
    }
}

/// The token count in a field; `None` if it is not a count.
fn count(field: Option<&RawValue>) -> Option<u64> {
    serde_json::from_str(field?.get()).ok()
}
