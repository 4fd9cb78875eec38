//! Tokenizes a prompt's text, within the model's context, as long as somebody waits for it.

use genset_backend_common::{EngineError, ErrorKind, RequestField, error::At};

use crate::error::{ApiError, Param};
use crate::model::{ServedModel, TextFiles};
use crate::text::{EncodeLimits, EncodedPrompt, TokenizerError};
use crate::work::Owner;

/// A text to tokenize.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain<'a> {
    pub(super) text: &'a str,
    /// Whether the tokenizer adds the special tokens that the model expects around a plain prompt.
    pub(super) add_special: bool,
    /// Cached tokens are reused only from texts with this salt.
    pub(super) salt: Option<&'a str>,
    /// Whether an answer in the model's context follows it.
    pub(super) for_answer: bool,
    /// Its position in the client's request.
    pub(super) param: &'a Param,
}

impl Plain<'_> {
    /// Tokenizes it. A text that cannot fit the model's context is refused before tokenization if its length shows that,
    /// otherwise as soon as there are too many tokens.
    ///
    /// # Errors
    /// A 400 that names the field; after `owner` has left, an error that nobody sees.
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

    /// The same error as the model card's for tokens.
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

/// Refuses more token ids than the model's context holds, before they are processed.
///
/// # Errors
/// A 400, the same as the model card's.
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

/// The tokens that the model's context holds.
pub(super) fn context_tokens(model: &ServedModel) -> usize {
    usize::try_from(model.card.context_length_tokens).unwrap_or(usize::MAX)
}
