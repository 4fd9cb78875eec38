//! `/v1/score`: parses requests and writes responses.

use serde::Serialize;
use serde_json::Value;

use super::fields::Fields;
use super::hints::Hints;
use super::response::{json_text, prompt_usage};
use super::text_pairs::{TextList, TextPairs};
use crate::error::ApiError;
use crate::json::JsonBody;

/// A request to score pairs of texts.
///
/// # Source
/// vLLM's Score API, <https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html#score-api>
///
/// # Examples
/// ```
/// use genset_frontend::openai::ScoreRequest;
///
/// let body = br#"{"model": "m", "text_1": "what is a cat?", "text_2": ["an animal", "a car"]}"#;
/// let request = ScoreRequest::parse(body, 1024)?;
/// assert_eq!(request.pairs.second().texts().len(), 2);
/// let error = ScoreRequest::parse(body, 1).unwrap_err();
/// assert_eq!(error.param, Some("text_2".into()));
/// # Ok::<(), genset_frontend::ApiError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScoreRequest {
    /// The model's name or alias.
    pub model: String,
    /// The texts.
    pub pairs: TextPairs,
    /// Its fields that have no effect here.
    pub hints: Hints,
}

impl ScoreRequest {
    /// Parses a request body with at most `max_pairs` pairs.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn parse<'a>(body: impl Into<JsonBody<'a>>, max_pairs: usize) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.model()?;
        let first = TextList::read(&mut fields, "text_1", max_pairs)?;
        let second = TextList::read(&mut fields, "text_2", max_pairs)?;
        let hints = fields.finish_request(&["user"])?;
        Ok(Self {
            model,
            pairs: TextPairs::try_new(first, second)?,
            hints,
        })
    }
}

/// The response's body.
///
/// # Examples
/// ```
/// use genset_frontend::openai::scores_json;
///
/// let body = scores_json("score-1", 7, "m", &[0.5, -1.25], 9);
/// assert!(body.contains(r#"{"index":1,"object":"score","score":-1.25}"#));
/// ```
#[must_use]
pub fn scores_json(
    id: &str,
    created: u64,
    model: &str,
    scores: &[f32],
    prompt_tokens: u32,
) -> String {
    let item = |(index, score): (usize, &f32)| Item {
        index,
        object: "score",
        score: *score,
    };
    let body = Body {
        id,
        object: "list",
        created,
        model,
        data: scores.iter().enumerate().map(item).collect(),
        usage: prompt_usage(prompt_tokens),
    };
    json_text(&body)
}

#[derive(Serialize)]
struct Body<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    data: Vec<Item>,
    usage: Value,
}

#[derive(Serialize)]
struct Item {
    index: usize,
    object: &'static str,
    score: f32,
}
