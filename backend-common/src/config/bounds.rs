//! The bounds that a request must respect, from the engine's declaration.

use std::num::NonZeroU32;

use super::Capabilities;
use crate::error::{EngineError, ErrorKind, RequestField};
use crate::request::{GenerateRequest, Input, TokenId};

/// The bounds of a request, checked at the engine and, from the model's card, at the frontend.
pub(crate) struct Bounds<'a> {
    pub(crate) capabilities: &'a Capabilities,
    pub(crate) vocab_size: Option<NonZeroU32>,
    pub(crate) context_length_tokens: u32,
}

impl Bounds<'_> {
    pub(crate) fn check(&self, request: &GenerateRequest) -> Result<(), EngineError> {
        request.validate()?;
        self.capabilities.check(request)?;
        self.check_vocabulary(RequestField::StopTokenIds, &request.stop.stop_token_ids)?;
        self.check_vocabulary(RequestField::LogitBias, request.sampling.logit_bias.keys())?;
        match &request.input {
            Input::Tokens(tokens) => {
                self.check_vocabulary(RequestField::Prompt, tokens.iter())?;
                self.check_prompt_len(tokens.len())
            }
            Input::Embed(inputs) => self.check_inputs("input", inputs.iter().map(Vec::as_slice)),
            Input::Score(pairs) => {
                self.check_inputs("pair", pairs.iter().map(|pair| pair.token_ids.as_slice()))
            }
            Input::Text(_) | Input::Chat(_) => Ok(()),
        }
    }

    /// Inputs to embed or to score generate nothing: each may fill the context.
    fn check_inputs<'t>(
        &self,
        word: &str,
        inputs: impl Iterator<Item = &'t [TokenId]>,
    ) -> Result<(), EngineError> {
        for (place, input) in inputs.enumerate() {
            self.check_vocabulary(RequestField::Prompt, input)?;
            let (tokens, context) = (input.len(), self.context());
            if tokens > context {
                let message = format!(
                    "{word} {place} has {tokens} tokens, but the model's context holds {context}; shorten it"
                );
                return Err(too_long(message));
            }
        }
        Ok(())
    }

    /// Does not check the model's own end-of-sequence ids: no client sent them.
    fn check_vocabulary<'t>(
        &self,
        field: RequestField,
        tokens: impl IntoIterator<Item = &'t TokenId>,
    ) -> Result<(), EngineError> {
        let Some(vocab_size) = self.vocab_size else {
            return Ok(());
        };
        let mut tokens = tokens.into_iter();
        match tokens.find(|token| **token >= vocab_size.get()) {
            None => Ok(()),
            Some(token) => Err(EngineError::invalid_argument(
                field,
                format!(
                    "token id {token} is not in the vocabulary, which ends at {}",
                    vocab_size.get() - 1
                ),
            )),
        }
    }

    fn context(&self) -> usize {
        usize::try_from(self.context_length_tokens).unwrap_or(usize::MAX)
    }

    /// A prompt to generate from must leave room for one token.
    fn check_prompt_len(&self, prompt_tokens: usize) -> Result<(), EngineError> {
        let context = self.context();
        if prompt_tokens < context {
            return Ok(());
        }
        let message = format!(
            "the prompt has {prompt_tokens} tokens, but the model's context holds {context} with the answer; \
             shorten the prompt"
        );
        Err(too_long(message))
    }
}

fn too_long(message: String) -> EngineError {
    EngineError::new(ErrorKind::ContextLengthExceeded, message).with_at(RequestField::Prompt)
}
