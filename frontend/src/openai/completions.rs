//! The request of `/v1/completions`.

use genset_backend_common::TokenId;
use serde_json::json;

use super::common::{CommonParams, IGNORED, ParamLimits};
use super::fields::Fields;
use super::logprobs::LogprobOptions;
use super::prompts::read_prompts;
use crate::error::ApiError;
use crate::json::JsonBody;

/// The token limit if the request sets none, as in OpenAI's API.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// A validated completion request. Checks that depend on the model come later.
///
/// # Source
/// <https://platform.openai.com/docs/api-reference/completions/create>
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    /// The fields shared with chat completions.
    pub params: CommonParams,
    /// The prompts, at least one.
    pub prompts: Vec<Prompt>,
    /// Whether an answer begins with its prompt.
    pub echo: bool,
    /// The text after each answer.
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
    /// Parses a request body.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn parse<'a>(
        body: impl Into<JsonBody<'a>>,
        limits: &ParamLimits,
    ) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let mut params = CommonParams::read(&mut fields, limits, Some(DEFAULT_MAX_TOKENS))?;
        let prompts = read_prompts(&mut fields, "prompt", limits.max_prompts)?
            .ok_or_else(|| ApiError::invalid("prompt", "you must provide a prompt"))?;
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
        params.hints = fields.finish_request(IGNORED)?.checked(limits.is_strict)?;
        Ok(Self {
            params,
            prompts,
            echo,
            suffix,
        })
    }
}
