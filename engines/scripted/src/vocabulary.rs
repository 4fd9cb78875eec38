//! [`Vocabulary`]: the engine's interface to a tokenizer, so that it depends on none.

use genset_backend_common::{EngineError, TokenId};

/// Converts text to token ids and back, for an engine that takes and returns tokens. Implement it with the tokenizer that the
/// frontend uses for the model; with another one the two will not agree.
///
/// The calls run on async threads and must not block; tokenizing a few kilobytes is fine.
///
/// # Examples
/// ```
/// use genset_backend_common::{EngineError, TokenId};
/// use genset_engine_scripted::Vocabulary;
///
/// /// One token a byte.
/// struct Bytes;
///
/// impl Vocabulary for Bytes {
///     fn size(&self) -> u32 {
///         256
///     }
///
///     fn encode(&self, text: &str) -> Result<Vec<TokenId>, EngineError> {
///         Ok(text.bytes().map(TokenId::from).collect())
///     }
///
///     fn decode(&self, tokens: &[TokenId]) -> Result<String, EngineError> {
///         let bytes: Vec<u8> = tokens.iter().filter_map(|token| u8::try_from(*token).ok()).collect();
///         Ok(String::from_utf8_lossy(&bytes).into_owned())
///     }
/// }
///
/// assert_eq!(Bytes.decode(&Bytes.encode("é")?)?, "é");
/// # Ok::<(), EngineError>(())
/// ```
pub trait Vocabulary: Send + Sync + 'static {
    /// The vocabulary size, at least 1. Token ids are below it.
    fn size(&self) -> u32;

    /// Encodes a reply's text. Adds no tokens around it; names of special tokens in the text become those tokens.
    ///
    /// # Errors
    /// The tokenizer's error; it becomes the request's error.
    fn encode(&self, text: &str) -> Result<Vec<TokenId>, EngineError>;

    /// Decodes a prompt, including special tokens: the script's `[prompt]` uses them to find messages.
    ///
    /// # Errors
    /// The tokenizer's error; it becomes the request's error.
    fn decode(&self, tokens: &[TokenId]) -> Result<String, EngineError>;
}
