//! Tokenization without an answer: counts a prompt's tokens, and serves clients that tokenize and detokenize.

use std::sync::Arc;

use genset_backend_common::{Input, RequestField, TokenId};

use super::encode::{Plain, context_tokens};
use super::{Job, Room};
use crate::error::ApiError;
use crate::model::{ServedModel, TextFiles};
use crate::text::Detokenizer;
use crate::work::Owner;

/// The most tokens that are decoded between two checks whether the client has left.
const TOKENS_A_LOOK: usize = 1 << 12;

impl Job {
    /// The tokens of its first prompt; `None` if the engine tokenizes.
    #[must_use]
    pub fn prompt(&self) -> Option<&[TokenId]> {
        self.prompt_at(0)
    }

    /// The tokens of the prompt at `index`.
    pub(super) fn prompt_at(&self, index: usize) -> Option<&[TokenId]> {
        match self.inputs.get(index) {
            Some(Input::Tokens(tokens)) => Some(tokens),
            Some(Input::Text(_) | Input::Chat(_) | Input::Embed(_) | Input::Score(_)) | None => {
                None
            }
        }
    }
}

/// Tokenizes `prompt` like a completion's prompt.
///
/// # Errors
/// A 400 that names `prompt` or the model.
///
/// # Cancel safety
/// If the future is dropped, work that has not started never starts, and running work stops soon.
pub async fn tokenize_prompt(
    model: Arc<ServedModel>,
    prompt: String,
    add_special_tokens: bool,
    room: Room,
) -> Result<Vec<TokenId>, ApiError> {
    let bytes = prompt.len();
    let with_model = Arc::clone(&model);
    let work = move |owner: &Owner| {
        let _room = room.memory;
        let plain = Plain {
            for_answer: true,
            text: &prompt,
            add_special: add_special_tokens,
            salt: room.salt.as_deref(),
            param: &RequestField::Prompt.into(),
        };
        plain.encode(&with_model, text_of(&with_model)?, owner)
    };
    Ok(model.work.run(bytes, room.deadline, work).await?.ids)
}

/// Returns the text of `tokens`, including special ones.
///
/// # Errors
/// A 400 that names the model, or the first token that is not in its vocabulary.
///
/// # Cancel safety
/// As [`tokenize_prompt`].
pub async fn detokenize(
    model: Arc<ServedModel>,
    tokens: Vec<TokenId>,
    room: Room,
) -> Result<String, ApiError> {
    let context = context_tokens(&model);
    if tokens.len() > context {
        let problem = format!(
            "{} tokens are more than the model's context of {context} holds",
            tokens.len()
        );
        return Err(ApiError::invalid("tokens", problem));
    }
    let with_model = Arc::clone(&model);
    let bytes = tokens.len();
    let work = move |owner: &Owner| {
        let _room = room.memory;
        let tokenizer = &text_of(&with_model)?.tokenizer;
        for (part, tokens) in tokens.chunks(TOKENS_A_LOOK).enumerate() {
            owner.check()?;
            let is_unknown = |token: &TokenId| tokenizer.id_to_token(*token).is_none();
            if let Some(index) = tokens.iter().position(is_unknown) {
                let index = part * TOKENS_A_LOOK + index;
                let problem = "is not in the model's vocabulary";
                return Err(ApiError::invalid(format!("tokens[{index}]"), problem));
            }
        }
        let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), false);
        let mut text = String::new();
        for tokens in tokens.chunks(TOKENS_A_LOOK) {
            owner.check()?;
            for &token in tokens {
                detokenizer.push(token, &mut text);
            }
        }
        detokenizer.finish(&mut text);
        Ok(text)
    };
    // A token takes about as long as a byte of text.
    model.work.run(bytes, room.deadline, work).await
}

/// Each token's string in the vocabulary; empty if the id is not in it.
///
/// # Errors
/// A 400 that names the model.
pub fn token_strings(model: &ServedModel, tokens: &[TokenId]) -> Result<Vec<String>, ApiError> {
    let tokenizer = &text_of(model)?.tokenizer;
    let string = |token: &TokenId| tokenizer.id_to_token(*token).unwrap_or_default();
    Ok(tokens.iter().map(string).collect())
}

fn text_of(model: &ServedModel) -> Result<&TextFiles, ApiError> {
    model.text.as_deref().ok_or_else(|| no_tokenizer(model))
}

/// The 400 for a prompt that this server cannot tokenize: it has no tokenizer for the model, or the prompt has images or
/// audio.
pub(crate) fn no_tokenizer(model: &ServedModel) -> ApiError {
    let name = &model.card.name;
    if model.text.is_some() {
        let why = format!("only the engine of '{name}' counts the tokens of images and audio");
        return ApiError::unsupported(RequestField::Prompt, why);
    }
    ApiError::invalid(
        "model",
        format!("the engine of '{name}' tokenizes by itself; this server has no tokenizer for it"),
    )
}
