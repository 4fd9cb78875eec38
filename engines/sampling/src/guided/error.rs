//! Why a guide could not be built, or could not continue.

use genset_backend_common::{EngineError, ErrorKind, RequestField, TokenId};

/// Why a tokenizer cannot be used for guided decoding.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VocabularyError {
    /// The file is not a valid `tokenizer.json`.
    #[error("tokenizer.json cannot be read: {source}")]
    Malformed {
        /// The JSON reader's error.
        #[source]
        source: serde_json::Error,
    },
    /// This kind of tokenizer does not define the bytes of its tokens.
    #[error(
        "tokenizer.json has the model '{model}' and the decoder '{decoder}', which guided decoding does not know"
    )]
    UnknownKind {
        /// `model.type`.
        model: String,
        /// `decoder.type`.
        decoder: String,
    },
    /// An end-of-sequence id is not in the vocabulary.
    #[error("the end-of-sequence token {token} is outside the vocabulary of {vocab_size}")]
    EosOutside {
        /// The id.
        token: TokenId,
        /// The vocabulary's size.
        vocab_size: usize,
    },
    /// The vocabulary is larger, or has longer tokens, than a token trie supports.
    #[error("the vocabulary does not fit a token trie: {reason}")]
    TooLarge {
        /// What exceeds the trie.
        reason: String,
    },
}

impl From<VocabularyError> for EngineError {
    fn from(error: VocabularyError) -> Self {
        Self::new(ErrorKind::Unsupported, error.to_string()).with_source(error)
    }
}

/// Why a guided sequence cannot continue. The request fails; the engine continues.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GuideError {
    /// No token continues the text: the vocabulary cannot spell what the grammar requires.
    #[error("the grammar has no token that may come next")]
    DeadEnd,
    /// The grammar needs more work for one token than its limits allow.
    #[error("the grammar is too complex to go on: {reason}")]
    TooComplex {
        /// llguidance's reason.
        reason: String,
    },
    /// A token that the mask does not allow was accepted.
    #[error("token {token} does not follow the grammar")]
    NotAllowed {
        /// The token.
        token: TokenId,
    },
    /// A fault in the grammar engine. Every later call on the same guide returns it too.
    #[error("the grammar engine failed: {reason}")]
    Failed {
        /// The engine's message.
        reason: String,
    },
}

/// A grammar that is too complex or a dead end is the client's fault; the rest is internal.
impl From<GuideError> for EngineError {
    fn from(error: GuideError) -> Self {
        let told = match &error {
            GuideError::DeadEnd | GuideError::TooComplex { .. } => {
                Self::invalid_argument(RequestField::Guided, &error)
            }
            GuideError::NotAllowed { .. } | GuideError::Failed { .. } => {
                Self::internal(format!("guided decoding: {error}"))
            }
        };
        told.with_source(error)
    }
}
