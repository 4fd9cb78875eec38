//! Tokens for their own sake: counted before an answer begins, shown to clients who ask for them, and turned back.

use std::sync::Arc;

use genset_backend_common::{Input, TokenId};

use super::{Job, off_async_threads};
use crate::error::ApiError;
use crate::model::{ServedModel, TextFiles};

impl Job {
    /// The tokens of its first prompt; `None` where the engine tokenizes.
    #[must_use]
    pub fn prompt(&self) -> Option<&[TokenId]> {
        match self.inputs.first() {
            Some(Input::Tokens(tokens)) => Some(tokens),
            Some(Input::Text(_) | Input::Chat(_) | Input::Embed(_)) | None => None,
        }
    }
}

/// The tokens of `prompt`, as a completion's prompt would have them.
///
/// # Errors
/// A 400 that names `prompt` or the model.
pub async fn tokenize_prompt(
    model: Arc<ServedModel>,
    prompt: String,
    add_special_tokens: bool,
) -> Result<Vec<TokenId>, ApiError> {
    off_async_threads(prompt.len(), move || {
        super::tokenize(text_of(&model)?, &prompt, add_special_tokens, "prompt")
    })
    .await
}

/// The text of `tokens`, special ones included.
///
/// # Errors
/// A 400 that names the model, or the first token that is not in its vocabulary.
pub async fn detokenize(model: Arc<ServedModel>, tokens: Vec<TokenId>) -> Result<String, ApiError> {
    // A token takes about as long as a byte of text.
    off_async_threads(tokens.len(), move || {
        let tokenizer = &text_of(&model)?.tokenizer;
        let is_unknown = |token: &TokenId| tokenizer.id_to_token(*token).is_none();
        if let Some(index) = tokens.iter().position(is_unknown) {
            let problem = "is not in the model's vocabulary";
            return Err(ApiError::invalid(format!("tokens[{index}]"), problem));
        }
        let text = tokenizer.decode_all(&tokens, false);
        text.map_err(|error| ApiError::invalid("tokens", format!("cannot be decoded: {error}")))
    })
    .await
}

/// Each token as it stands in the vocabulary; empty where there is none.
///
/// # Errors
/// A 400 that names the model.
pub fn token_strings(model: &ServedModel, tokens: &[TokenId]) -> Result<Vec<String>, ApiError> {
    let tokenizer = &text_of(model)?.tokenizer;
    let string = |token: &TokenId| tokenizer.id_to_token(*token).unwrap_or_default();
    Ok(tokens.iter().map(string).collect())
}

fn text_of(model: &ServedModel) -> Result<&TextFiles, ApiError> {
    model.text.as_ref().ok_or_else(|| no_tokenizer(model))
}

/// The 400 of a model that this server has no tokenizer for.
pub(crate) fn no_tokenizer(model: &ServedModel) -> ApiError {
    let name = &model.card.name;
    ApiError::invalid(
        "model",
        format!("the engine of '{name}' tokenizes by itself; this server has no tokenizer for it"),
    )
}
