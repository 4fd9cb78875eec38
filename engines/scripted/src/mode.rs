//! [`Mode`]: text in and text out, or tokens in and tokens out. All differences between the two are here.

use std::fmt;
use std::sync::Arc;

use genset_backend_common::{
    Capabilities, EngineError, ErrorKind, GenerateRequest, RequestField, TokenId,
};

use crate::conversation::Conversation;
use crate::play::Piece;
use crate::ratings::{MAX_LOGPROBS, Ratings};
use crate::script::{Body, Reply, ReplyError, Script, Split, Values};
use crate::vocabulary::Vocabulary;

/// The context length in text mode: words of the prompt plus chunks of the answer.
pub const TEXT_CONTEXT_LENGTH: u32 = 1 << 20;

/// What the engine takes and returns.
#[derive(Clone)]
pub(crate) enum Mode {
    /// Text and chat messages in, text out; a chunk counts as a token.
    Text,
    /// Token ids in and out.
    Tokens {
        vocabulary: Arc<dyn Vocabulary>,
        context_length_tokens: u32,
    },
}

impl Mode {
    pub(crate) fn capabilities(&self) -> Capabilities {
        let can = match self {
            Self::Text => Capabilities::text(),
            Self::Tokens { vocabulary, .. } => Capabilities {
                max_logprobs: Some(MAX_LOGPROBS.min(vocabulary.size())),
                ..Capabilities::tokens()
            },
        };
        // There is one possible answer, whatever the temperature.
        can.with_point_mass_sampling().with_virtual_time()
    }

    pub(crate) fn context_length_tokens(&self) -> u32 {
        match self {
            Self::Text => TEXT_CONTEXT_LENGTH,
            Self::Tokens {
                context_length_tokens,
                ..
            } => *context_length_tokens,
        }
    }

    /// The vocabulary size; 0 in text mode.
    pub(crate) fn vocab_size(&self) -> u32 {
        match self {
            Self::Text => 0,
            Self::Tokens { vocabulary, .. } => vocabulary.size(),
        }
    }

    /// Refuses a script that asks for something the mode cannot do.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the reply and its key.
    pub(crate) fn check(&self, script: &Script) -> Result<(), EngineError> {
        for reply in &script.replies {
            let checked = match self {
                Self::Text if !reply.logprobs.is_empty() => Err(ReplyError::new(
                    "logprobs",
                    "text has no tokens to rate; name a model folder",
                )),
                Self::Text => Ok(()),
                Self::Tokens { vocabulary, .. } => refuse_messages(reply)
                    .and_then(|()| Ratings::try_new(reply, 0, &**vocabulary).map(drop)),
            };
            checked.map_err(|error| error.at(reply.place))?;
        }
        Ok(())
    }

    /// Reads the parts of a request that the script sees.
    ///
    /// # Errors
    /// `Unsupported` for input that the mode does not take; the vocabulary's error if decoding fails.
    pub(crate) fn read(
        &self,
        request: &GenerateRequest,
        script: &Script,
    ) -> Result<Conversation, EngineError> {
        match self {
            Self::Text if !request.stop.stop_token_ids.is_empty() => Err(EngineError::unsupported(
                RequestField::StopTokenIds,
                "this engine gives text, not tokens",
            )),
            Self::Text => Conversation::of_text(request),
            Self::Tokens { vocabulary, .. } => {
                Conversation::of_tokens(request, &**vocabulary, &script.marks)
            }
        }
    }

    /// How many tokens the context leaves for the answer.
    ///
    /// # Errors
    /// `ContextLengthExceeded` when it leaves none.
    pub(crate) fn room(&self, prompt_tokens: u32) -> Result<u32, EngineError> {
        let context = self.context_length_tokens();
        match context.saturating_sub(prompt_tokens) {
            0 => {
                let message = format!(
                    "the prompt counts as {prompt_tokens} tokens, but the context holds {context} with the answer; \
                     shorten the prompt"
                );
                Err(EngineError::new(ErrorKind::ContextLengthExceeded, message)
                    .with_at(RequestField::Prompt))
            }
            room => Ok(room),
        }
    }

    /// The pieces of a reply.
    ///
    /// # Errors
    /// The vocabulary's error if encoding fails.
    pub(crate) fn pieces_of(
        &self,
        body: &Body,
        values: &Values<'_>,
    ) -> Result<Vec<Piece>, EngineError> {
        match (self, body) {
            (Self::Tokens { vocabulary, .. }, Body::Text(text, Split::Natural)) => {
                let tokens = vocabulary.encode(&text.fill(values))?;
                Ok(tokens
                    .into_iter()
                    .map(|token| Piece::Tokens(vec![token]))
                    .collect())
            }
            (Self::Tokens { .. } | Self::Text, Body::Text(..) | Body::Chunks(_)) => {
                self.pieces(body.chunks(values))
            }
        }
    }

    /// One piece for each chunk that is not empty.
    ///
    /// # Errors
    /// The vocabulary's error if encoding fails.
    pub(crate) fn pieces(&self, chunks: Vec<String>) -> Result<Vec<Piece>, EngineError> {
        let Self::Tokens { vocabulary, .. } = self else {
            return Ok(chunks.into_iter().map(Piece::Text).collect());
        };
        let mut pieces = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let tokens: Vec<TokenId> = vocabulary.encode(&chunk)?;
            if !tokens.is_empty() {
                pieces.push(Piece::Tokens(tokens));
            }
        }
        Ok(pieces)
    }

    /// The log probabilities of a reply, if the request asked for them.
    ///
    /// # Errors
    /// The vocabulary's error if encoding fails.
    pub(crate) fn ratings(
        &self,
        reply: &Reply,
        asked: Option<u32>,
    ) -> Result<Option<Ratings>, EngineError> {
        match (self, asked) {
            (Self::Text, Some(_)) => Err(EngineError::unsupported(
                RequestField::Logprobs,
                "this engine gives text, not tokens",
            )),
            (Self::Text | Self::Tokens { .. }, None) => Ok(None),
            (Self::Tokens { vocabulary, .. }, Some(top)) => {
                let ratings = Ratings::try_new(reply, top, &**vocabulary);
                Ok(Some(ratings.map_err(|error| error.at(reply.place))?))
            }
        }
    }
}

/// Refuses conditions on messages: a prompt of tokens shows neither roles nor the number of messages.
fn refuse_messages(reply: &Reply) -> Result<(), ReplyError> {
    let why = "a prompt of tokens does not tell; leave the model folder out";
    if reply.matcher.needs_messages() {
        return Err(ReplyError::new("match.last_role", why));
    }
    let names_count = |template: &crate::script::Template| template.names_message_count();
    if reply.body.templates().iter().any(names_count) {
        return Err(ReplyError::new("{{n_messages}}", why));
    }
    Ok(())
}

impl fmt::Debug for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text => f.write_str("Text"),
            Self::Tokens {
                context_length_tokens,
                ..
            } => f
                .debug_struct("Tokens")
                .field("context_length_tokens", context_length_tokens)
                .finish_non_exhaustive(),
        }
    }
}
