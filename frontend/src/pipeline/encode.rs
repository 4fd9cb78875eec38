//! A prompt's text to its tokens, within what the model's context holds and for as long as somebody waits.

use genset_backend_common::{EngineError, ErrorKind, RequestField, error::At};

use crate::error::{ApiError, Param};
use crate::model::{ServedModel, TextFiles};
use crate::text::{EncodeLimits, EncodedPrompt, TokenizerError};
use crate::work::Owner;

/// A text to tokenize.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain<'a> {
    pub(super) text: &'a str,
    /// Whether the tokenizer adds what the model expects around a plain prompt.
    pub(super) add_special: bool,
    /// Its tokens are known from texts with the same salt alone.
    pub(super) salt: Option<&'a str>,
    /// Whether an answer is to follow it in the model's context.
    pub(super) for_answer: bool,
    /// Where the client's request has it.
    pub(super) param: &'a Param,
}

impl Plain<'_> {
    /// Its tokens. One that cannot fit the model's context is refused before it is tokenized where its length says so, and
    /// else as soon as the tokens are too many.
    ///
    /// # Errors
    /// A 400 that names the field; an error that nobody sees once `owner` has left.
    pub(super) fn encode(
        self,
        model: &ServedModel,
        files: &TextFiles,
        owner: &Owner,
    ) -> Result<EncodedPrompt, ApiError> {
        let context = context_tokens(model);
        let tokenizer = &files.tokenizer;
        if let Some(longest) = tokenizer.longest_token_bytes()
            && self.text.len() > context.saturating_mul(longest)
        {
            return Err(self.too_long(self.text.len().div_ceil(longest.max(1)), context));
        }
        let limits = EncodeLimits {
            max_tokens: context,
            should_stop: &|| owner.has_left(),
            salt: self.salt,
        };
        let encoded = tokenizer.encode_prompt(self.text, self.add_special, &limits);
        encoded.map_err(|error| match error {
            TokenizerError::TooManyTokens { at_least, .. } => self.too_long(at_least, context),
            TokenizerError::Stopped => owner.check().err().unwrap_or_else(|| {
                let problem = "tokenizing stopped while somebody waited for it";
                EngineError::internal(problem).into()
            }),
            other @ (TokenizerError::Load { .. }
            | TokenizerError::UnsupportedDecoder { .. }
            | TokenizerError::VocabularyTooLarge { .. }
            | TokenizerError::Encode { .. }
            | TokenizerError::Decode { .. }
            | TokenizerError::TooLong { .. }
            | TokenizerError::Panicked { .. }) => {
                ApiError::invalid(self.param.clone(), format!("cannot be tokenized: {other}"))
            }
        })
    }

    /// As the model's card says it of tokens.
    fn too_long(self, at_least: usize, context: usize) -> ApiError {
        let (name, at) = match self.param {
            Param::Request(field) => ("the prompt", At::Request(*field)),
            Param::Chat(path) | Param::Path(path) => (path.as_str(), At::other(path)),
        };
        let with = if self.for_answer {
            " with the answer"
        } else {
            ""
        };
        let message = format!(
            "{name} has at least {at_least} tokens, but the model's context holds {context}{with}; shorten it"
        );
        EngineError::new(ErrorKind::ContextLengthExceeded, message)
            .with_at(at)
            .into()
    }
}

/// Refuses token ids that no context of the model's holds, before anything is made of them.
///
/// # Errors
/// A 400, as the model's card has it.
pub(super) fn refuse_too_many(tokens: usize, model: &ServedModel) -> Result<(), ApiError> {
    let context = context_tokens(model);
    if tokens <= context {
        return Ok(());
    }
    let message = format!(
        "the prompt has {tokens} tokens, but the model's context holds {context} with the answer; shorten the prompt"
    );
    let error = EngineError::new(ErrorKind::ContextLengthExceeded, message);
    Err(error.with_at(RequestField::Prompt).into())
}

/// How many tokens the model's context holds.
pub(super) fn context_tokens(model: &ServedModel) -> usize {
    usize::try_from(model.card.context_length_tokens).unwrap_or(usize::MAX)
}
