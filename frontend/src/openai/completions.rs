//! The request of `/v1/completions`.

use genset_backend_common::TokenId;
use serde_json::{Value, json};

use super::common::{CommonParams, IGNORED, RequestLimits, token_ids};
use super::fields::Fields;
use super::logprobs::LogprobOptions;
use crate::error::ApiError;

/// Tokens generated when the request sets no limit, as in OpenAI's API.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// A completion request, checked but for what the model decides.
///
/// # Source
/// <https://platform.openai.com/docs/api-reference/completions/create>
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    /// What it shares with chat completions.
    pub params: CommonParams,
    /// The prompts, at least one.
    pub prompts: Vec<Prompt>,
    /// Whether an answer begins with its prompt.
    pub echo: bool,
    /// What comes behind each answer.
    pub suffix: Option<String>,
}

/// A prompt of a completion request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Text to tokenize.
    Text(String),
    /// Token ids, used as they are.
    Tokens(Vec<TokenId>),
}

impl CompletionRequest {
    /// Reads a request body.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn parse(body: &[u8], limits: &RequestLimits) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let mut params = CommonParams::read(&mut fields, limits, Some(DEFAULT_MAX_TOKENS))?;
        let prompt = fields
            .take("prompt")
            .ok_or_else(|| ApiError::invalid("prompt", "you must provide a prompt"))?;
        let prompts = read_prompts(prompt, limits)?;
        params.logprobs = LogprobOptions::read_completion(&mut fields)?;
        let echo = fields.bool("echo")?.unwrap_or(false);
        if echo && params.logprobs.is_some() {
            let why = "log probabilities of the prompt are not available; leave out 'logprobs'";
            return Err(ApiError::unsupported("echo", why));
        }
        let suffix = fields.string("suffix")?.filter(|text| !text.is_empty());
        let n = u64::from(params.n);
        fields.refuse(
            "best_of",
            &[json!(n)],
            "only a value equal to 'n' is available",
        )?;
        fields.finish(IGNORED)?;
        Ok(Self {
            params,
            prompts,
            echo,
            suffix,
        })
    }
}

fn read_prompts(prompt: Value, limits: &RequestLimits) -> Result<Vec<Prompt>, ApiError> {
    let list = match prompt {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        Value::Array(list) if list.first().is_some_and(Value::is_number) => {
            return Ok(vec![Prompt::Tokens(token_ids("prompt", &list)?)]);
        }
        Value::Array(list) if !list.is_empty() => list,
        _ => {
            let problem =
                "expected a string, a list of strings, a list of token ids or a list of such lists";
            return Err(ApiError::invalid("prompt", problem));
        }
    };
    if list.len() > limits.max_prompts {
        return Err(ApiError::invalid(
            "prompt",
            format!("at most {} prompts, got {}", limits.max_prompts, list.len()),
        ));
    }
    list.into_iter()
        .enumerate()
        .map(|(index, prompt)| read_prompt(&format!("prompt[{index}]"), prompt))
        .collect()
}

fn read_prompt(name: &str, prompt: Value) -> Result<Prompt, ApiError> {
    match prompt {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(ids) if !ids.is_empty() => Ok(Prompt::Tokens(token_ids(name, &ids)?)),
        _ => Err(ApiError::invalid(
            name,
            "expected a string or a list of token ids, as the others",
        )),
    }
}
