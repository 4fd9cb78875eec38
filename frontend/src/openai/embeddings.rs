//! `/v1/embeddings`: parses requests and writes responses.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::Value;

use super::completions::Prompt;
use super::fields::Fields;
use super::hints::Hints;
use super::prompts::read_prompts;
use super::response::{json_text, prompt_usage};
use crate::error::ApiError;
use crate::json::JsonBody;

/// A validated embeddings request. Checks that depend on the model come later.
///
/// # Source
/// <https://platform.openai.com/docs/api-reference/embeddings/create>
///
/// # Examples
/// ```
/// use genset_frontend::openai::{EmbeddingRequest, EncodingFormat, Prompt};
///
/// let body = br#"{"model": "m", "input": ["one", "two"], "encoding_format": "base64"}"#;
/// let request = EmbeddingRequest::parse(body, 2048)?;
/// assert_eq!(request.inputs[1], Prompt::Text("two".into()));
/// assert_eq!(request.encoding, EncodingFormat::Base64);
/// let error = EmbeddingRequest::parse(body, 1).unwrap_err();
/// assert_eq!(error.param, Some("input".into()));
/// # Ok::<(), genset_frontend::ApiError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbeddingRequest {
    /// The model's name or alias.
    pub model: String,
    /// The inputs, at least one.
    pub inputs: Vec<Prompt>,
    /// How the numbers are written.
    pub encoding: EncodingFormat,
    /// The length to which the embeddings are cut, at least 1; `None` for the model's own.
    pub dimensions: Option<u32>,
    /// Its fields that have no effect here.
    pub hints: Hints,
}

/// How an embedding is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EncodingFormat {
    /// A list of numbers.
    #[default]
    Float,
    /// Base64 of little-endian `f32`.
    Base64,
}

impl EmbeddingRequest {
    /// Parses a request body with at most `max_inputs` inputs.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn parse<'a>(body: impl Into<JsonBody<'a>>, max_inputs: usize) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.model()?;
        let inputs = read_prompts(&mut fields, "input", max_inputs)?;
        let inputs =
            inputs.ok_or_else(|| ApiError::invalid("input", "you must provide an input"))?;
        refuse_empty(&inputs)?;
        let encoding = read_encoding(&mut fields)?;
        let dimensions = fields.u32("dimensions")?;
        if dimensions == Some(0) {
            return Err(ApiError::invalid("dimensions", "must be at least 1"));
        }
        Ok(Self {
            model,
            inputs,
            encoding,
            dimensions,
            hints: fields.finish_request(&["user"])?,
        })
    }
}

fn read_encoding(fields: &mut Fields<'_>) -> Result<EncodingFormat, ApiError> {
    match fields.string("encoding_format")?.as_deref() {
        None | Some("float") => Ok(EncodingFormat::Float),
        Some("base64") => Ok(EncodingFormat::Base64),
        Some(other) => Err(ApiError::invalid(
            "encoding_format",
            format!("expected \"float\" or \"base64\", got {other:?}"),
        )),
    }
}

fn refuse_empty(inputs: &[Prompt]) -> Result<(), ApiError> {
    let is_empty = |input: &Prompt| matches!(input, Prompt::Text(text) if text.is_empty());
    match inputs.iter().position(is_empty) {
        None => Ok(()),
        Some(_) if inputs.len() == 1 => Err(ApiError::invalid("input", "must not be empty")),
        Some(at) => Err(ApiError::invalid(
            format!("input[{at}]"),
            "must not be empty",
        )),
    }
}

/// The response's body. Numbers are written as `f32`, never widened.
///
/// # Examples
/// ```
/// use genset_frontend::openai::{EncodingFormat, embeddings_json};
///
/// let body = embeddings_json("m", &[vec![1.0, -0.1]], EncodingFormat::Base64, 3);
/// assert!(body.contains(r#""embedding":"AACAP83MzL0=""#));
/// let body = embeddings_json("m", &[vec![1.0, -0.1]], EncodingFormat::Float, 3);
/// assert!(body.contains(r#""embedding":[1.0,-0.1]"#));
/// ```
#[must_use]
pub fn embeddings_json(
    model: &str,
    embeddings: &[Vec<f32>],
    encoding: EncodingFormat,
    prompt_tokens: u32,
) -> String {
    let item = |(index, numbers): (usize, _)| Item {
        object: "embedding",
        index,
        embedding: match encoding {
            EncodingFormat::Float => Numbers::Float(numbers),
            EncodingFormat::Base64 => Numbers::Base64(base64_of(numbers)),
        },
    };
    let body = Body {
        object: "list",
        data: embeddings
            .iter()
            .map(Vec::as_slice)
            .enumerate()
            .map(item)
            .collect(),
        model,
        usage: prompt_usage(prompt_tokens),
    };
    json_text(&body)
}

fn base64_of(numbers: &[f32]) -> String {
    let bytes: Vec<u8> = numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    STANDARD.encode(bytes)
}

#[derive(Serialize)]
struct Body<'a> {
    object: &'static str,
    data: Vec<Item<'a>>,
    model: &'a str,
    usage: Value,
}

#[derive(Serialize)]
struct Item<'a> {
    object: &'static str,
    index: usize,
    embedding: Numbers<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Numbers<'a> {
    Float(&'a [f32]),
    Base64(String),
}
