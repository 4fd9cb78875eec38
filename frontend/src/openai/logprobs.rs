//! Log probabilities: a request's options, and the `logprobs` of a choice.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::response::Api;
use crate::answer::{CandidateToken, TokenLogprobs};
use crate::error::ApiError;

/// The most candidates for each token, as in OpenAI's API. An engine may return fewer.
const MAX_TOP_LOGPROBS: u32 = 20;

/// The value for a probability of zero: JSON has no infinities, and OpenAI's API writes this.
const IMPOSSIBLE: f64 = -9999.0;

/// The log probabilities that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogprobOptions {
    /// The number of candidates for each token, besides the chosen one.
    pub top: u32,
    /// The field that asks for them.
    pub field: &'static str,
}

impl LogprobOptions {
    /// Parses a chat's `logprobs` and `top_logprobs`.
    pub(super) fn read_chat(fields: &mut Fields<'_>) -> Result<Option<Self>, ApiError> {
        let is_asked = fields.bool("logprobs")?.unwrap_or(false);
        let top = fields.u32("top_logprobs")?.unwrap_or(0);
        if top > 0 && !is_asked {
            let problem = "only allowed when 'logprobs' is true";
            return Err(ApiError::invalid("top_logprobs", problem));
        }
        let field = "top_logprobs";
        is_asked.then(|| Self::try_new(top, field)).transpose()
    }

    /// Parses a completion's `logprobs`.
    pub(super) fn read_completion(fields: &mut Fields<'_>) -> Result<Option<Self>, ApiError> {
        let top = fields.u32("logprobs")?;
        top.map(|top| Self::try_new(top, "logprobs")).transpose()
    }

    fn try_new(top: u32, field: &'static str) -> Result<Self, ApiError> {
        if top > MAX_TOP_LOGPROBS {
            let problem = format!("must be between 0 and {MAX_TOP_LOGPROBS}, got {top}");
            return Err(ApiError::invalid(field, problem));
        }
        Ok(Self { top, field })
    }

    /// Refuses what an engine with at most `max` candidates cannot return; `None` if it returns no log probabilities.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn check(&self, max: Option<u32>) -> Result<(), ApiError> {
        match max {
            None => Err(ApiError::unsupported(
                "logprobs",
                "this model's engine gives no log probabilities; leave the field out",
            )),
            Some(max) if self.top > max => Err(ApiError::invalid(
                self.field,
                format!(
                    "this model's engine gives at most {max} candidates, got {}",
                    self.top
                ),
            )),
            Some(_) => Ok(()),
        }
    }
}

/// The `logprobs` of a choice, or of a delta.
#[must_use]
pub fn logprobs_json(api: Api, rated: &[TokenLogprobs]) -> Value {
    match api {
        Api::Chat => json!({
            "content": rated.iter().map(chat_token).collect::<Vec<_>>(),
            "refusal": null,
        }),
        Api::Completions => json!({
            "tokens": rated.iter().map(|token| completion_name(&token.chosen)).collect::<Vec<_>>(),
            "token_logprobs": rated.iter().map(|token| number(&token.chosen)).collect::<Vec<_>>(),
            "top_logprobs": rated.iter().map(completion_top).collect::<Vec<_>>(),
            "text_offset": rated.iter().map(|token| token.text_offset).collect::<Vec<_>>(),
        }),
    }
}

/// A token in the `content` of a chat's `logprobs`.
pub(crate) fn chat_token(token: &TokenLogprobs) -> Value {
    let mut fields = chat_candidate(&token.chosen);
    fields["top_logprobs"] = token.top.iter().map(chat_candidate).collect();
    fields
}

fn chat_candidate(candidate: &CandidateToken) -> Value {
    json!({
        "token": name(candidate, ""),
        "logprob": number(candidate),
        "bytes": candidate.bytes,
    })
}

/// The candidates by text, always including the chosen token.
fn completion_top(token: &TokenLogprobs) -> Value {
    let mut top = Map::new();
    for candidate in token.top.iter().chain([&token.chosen]) {
        // Of tokens with the same text, the most probable counts: the first.
        top.entry(completion_name(candidate))
            .or_insert_with(|| number(candidate).into());
    }
    Value::Object(top)
}

fn completion_name(candidate: &CandidateToken) -> String {
    name(candidate, "bytes:")
}

/// The token's text; if its bytes are not UTF-8, `mark` and the bytes as escapes.
fn name(candidate: &CandidateToken, mark: &str) -> String {
    if let Ok(text) = std::str::from_utf8(&candidate.bytes) {
        return text.to_owned();
    }
    let mut name = mark.to_owned();
    for byte in &candidate.bytes {
        // Writing to a string cannot fail.
        let _ = write!(name, "\\x{byte:02x}");
    }
    name
}

/// The log probability as the shortest decimal number for the `f32`: -0.1, not the `f64` nearest to that `f32`.
fn number(candidate: &CandidateToken) -> f64 {
    let shortest = candidate.logprob.to_string().parse();
    let number = shortest.unwrap_or(IMPOSSIBLE);
    if number.is_finite() {
        // Turns negative zero into zero.
        number + 0.0
    } else {
        IMPOSSIBLE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(bytes: &[u8], logprob: f32) -> CandidateToken {
        CandidateToken {
            bytes: bytes.to_vec(),
            logprob,
        }
    }

    #[test]
    fn half_a_code_point_is_named_by_its_bytes() {
        let half = candidate(b"\xf0\x9f", -0.1);
        let rated = [TokenLogprobs {
            top: vec![candidate(b"a", -0.25)],
            chosen: half,
            text_offset: 3,
        }];
        assert_eq!(
            logprobs_json(Api::Completions, &rated),
            json!({
                "tokens": ["bytes:\\xf0\\x9f"],
                "token_logprobs": [-0.1],
                "top_logprobs": [{"a": -0.25, "bytes:\\xf0\\x9f": -0.1}],
                "text_offset": [3],
            })
        );
        let chat = logprobs_json(Api::Chat, &rated);
        assert_eq!(
            chat["content"][0],
            json!({
                "token": "\\xf0\\x9f",
                "logprob": -0.1,
                "bytes": [240, 159],
                "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}],
            })
        );
    }

    #[test]
    fn what_json_has_no_number_for_is_impossible() {
        for logprob in [f32::NEG_INFINITY, f32::INFINITY, f32::NAN] {
            assert_eq!(
                number(&candidate(b"a", logprob)).to_bits(),
                IMPOSSIBLE.to_bits()
            );
        }
        assert_eq!(json!(number(&candidate(b"a", -1e-7))).to_string(), "-1e-7");
        assert_eq!(json!(number(&candidate(b"a", -0.0))).to_string(), "0.0");
    }

    #[test]
    fn of_tokens_that_look_the_same_the_first_counts() {
        let same = TokenLogprobs {
            chosen: candidate(b"a", -3.0),
            top: vec![candidate(b"a", -1.0), candidate(b"b", -2.0)],
            text_offset: 0,
        };
        assert_eq!(completion_top(&same), json!({"a": -1.0, "b": -2.0}));
    }
}
