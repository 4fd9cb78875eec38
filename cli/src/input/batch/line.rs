//! [`Line`]: a line of the output, as it is written, and what the run reads of it.
//!
//! An answer of an engine's may hold JSON that is no value here, such as a number that no float holds. So of a line only those
//! fields are read that count.

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

/// A line of the output.
#[derive(Debug)]
pub(super) struct Line {
    /// What is noted.
    pub(super) json: Box<RawValue>,
    /// To the end every worker was full or away, or lost the request, so another run may have an answer.
    pub(super) is_for_later: bool,
}

impl Line {
    /// A line of these fields.
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

/// What counts of a line.
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

/// Chat completions and embeddings name them as the first and the third, responses and messages as the others.
/// Each is read by itself: one that is no count leaves the others.
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
    /// Reads a line.
    ///
    /// # Errors
    /// When it is none of the output.
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

    /// Whether it says why there is no answer.
    pub(super) fn is_failure(&self) -> bool {
        self.error.is_some() || self.status().is_some_and(|status| status >= 400)
    }

    /// The tokens of the prompt and those of the answer.
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

/// The number of tokens that a field has; `None` where it is no such number.
fn count(field: Option<&RawValue>) -> Option<u64> {
    serde_json::from_str(field?.get()).ok()
}
