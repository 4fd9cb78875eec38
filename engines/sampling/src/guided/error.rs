//! Why there is no guide, or no way on for one.

use genset_backend_common::{EngineError, ErrorKind, RequestField, TokenId};

/// Why a tokenizer cannot guide.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VocabularyError {
    /// The file is not what `tokenizer.json` files are.
    #[error("tokenizer.json cannot be read: {source}")]
    Malformed {
        /// What the JSON reader says.
        #[source]
        source: serde_json::Error,
    },
    /// The bytes of its tokens are not known for this kind.
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
    /// The vocabulary is larger, or has longer tokens, than a token trie holds.
    #[error("the vocabulary does not fit a token trie: {reason}")]
    TooLarge {
        /// What does not fit.
        reason: String,
    },
}

impl From<VocabularyError> for EngineError {
    fn from(error: VocabularyError) -> Self {
        Self::new(ErrorKind::Unsupported, error.to_string()).with_source(error)
    }
}

/// Why a guided sequence cannot go on. The request fails; the engine lives.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GuideError {
    /// No token continues the text: the vocabulary cannot spell what the grammar wants.
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
    /// A fault in the grammar engine. Also every later call on the same guide.
    #[error("the grammar engine failed: {reason}")]
    Failed {
        /// What it says.
        reason: String,
    },
}

/// The client's grammar is at fault where it is too complex or leads nowhere; all else is ours.
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
