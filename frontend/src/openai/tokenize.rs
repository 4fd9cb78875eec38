//! `/tokenize` and `/detokenize`, which OpenAI's API does not have; the fields are vLLM's.

use genset_backend_common::TokenId;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::chat::ChatRequest;
use super::common::ParamLimits;
use super::fields::Fields;
use super::response::json_text;
use crate::error::ApiError;
use crate::json::JsonBody;

/// The fields of a chat that determine its prompt.
const CHAT_FIELDS: [&str; 4] = [
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "chat_template_kwargs",
];

/// A request to `/tokenize`.
///
/// # Source
/// <https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html#tokenizer-api>
#[derive(Debug, Clone, PartialEq)]
pub struct TokenizeRequest {
    /// The model's name or alias.
    pub model: String,
    /// What to tokenize.
    pub input: TokenizeInput,
    /// Whether to return the tokens also as strings of the vocabulary.
    pub return_token_strs: bool,
}

/// The input of a [`TokenizeRequest`].
#[derive(Debug, Clone, PartialEq)]
pub enum TokenizeInput {
    /// Text, as a completion's prompt.
    Prompt {
        /// The text.
        text: String,
        /// Whether the tokenizer adds the special tokens that the model expects around a prompt.
        add_special_tokens: bool,
    },
    /// Messages of a chat, rendered with the model's template.
    Chat(Box<ChatRequest>),
}

impl TokenizeRequest {
    /// Parses a request body.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn parse<'a>(
        body: impl Into<JsonBody<'a>>,
        limits: &ParamLimits,
    ) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.model()?;
        let return_token_strs = fields.bool("return_token_strs")?.unwrap_or(false);
        let input = match (fields.string("prompt")?, fields.take("messages")?) {
            (Some(text), None) => TokenizeInput::Prompt {
                text,
                add_special_tokens: fields.bool("add_special_tokens")?.unwrap_or(true),
            },
            (None, Some(messages)) => {
                let chat = read_chat(&mut fields, &model, messages, limits)?;
                TokenizeInput::Chat(Box::new(chat))
            }
            _ => {
                let problem = "give either 'prompt' or 'messages'";
                return Err(ApiError::invalid("prompt", problem));
            }
        };
        fields.finish(&[])?;
        Ok(Self {
            model,
            input,
            return_token_strs,
        })
    }
}

/// Parses the chat whose prompt is tokenized.
fn read_chat(
    fields: &mut Fields<'_>,
    model: &str,
    messages: Value,
    limits: &ParamLimits,
) -> Result<ChatRequest, ApiError> {
    let no = [json!(false)];
    let why = "the chat template writes the special tokens";
    fields.refuse("add_special_tokens", &no, why)?;
    fields.refuse("continue_final_message", &no, "it is not available")?;
    fields.refuse("chat_template", &[], "only the model's own is available")?;
    let mut chat = Map::new();
    chat.insert("model".into(), model.into());
    chat.insert("messages".into(), messages);
    for name in CHAT_FIELDS {
        fields.hand_on(name, &mut chat, name)?;
    }
    ChatRequest::read(Fields::made(chat, fields.meter()), limits)
}

/// The body of a `/tokenize` response, for a model with a context of `context_tokens`.
///
/// # Examples
/// ```
/// use genset_frontend::openai::tokenize_json;
///
/// let body = tokenize_json(2048, &[7], Some(&["a".into()]));
/// assert_eq!(body, r#"{"count":1,"max_model_len":2048,"tokens":[7],"token_strs":["a"]}"#);
/// ```
#[must_use]
pub fn tokenize_json(
    context_tokens: u32,
    tokens: &[TokenId],
    strings: Option<&[String]>,
) -> String {
    let body = Tokens {
        count: tokens.len(),
        max_model_len: context_tokens,
        tokens,
        token_strs: strings,
    };
    json_text(&body)
}

/// The body of a `/detokenize` response.
pub(crate) fn detokenize_json(prompt: &str) -> String {
    json_text(&Detokenized { prompt })
}

#[derive(Serialize)]
struct Detokenized<'a> {
    prompt: &'a str,
}

/// Serialized directly: as JSON values it would take many times the memory.
#[derive(Serialize)]
struct Tokens<'a> {
    count: usize,
    max_model_len: u32,
    tokens: &'a [TokenId],
    token_strs: Option<&'a [String]>,
}

/// A request to `/detokenize`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetokenizeRequest {
    /// The model's name or alias.
    pub model: String,
    /// The tokens.
    pub tokens: Vec<TokenId>,
}

impl DetokenizeRequest {
    /// Parses a request body.
    ///
    /// # Errors
    /// A 400 that names the field.
    pub fn parse<'a>(body: impl Into<JsonBody<'a>>) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.model()?;
        let tokens = fields.token_ids("tokens")?;
        let tokens =
            tokens.ok_or_else(|| ApiError::invalid("tokens", "expected a list of token ids"))?;
        fields.finish(&[])?;
        Ok(Self { model, tokens })
    }
}
