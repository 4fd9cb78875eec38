//! [`Vocabulary`]: the port through which the engine reaches a tokenizer, so that it depends on none.

use genset_backend_common::{EngineError, TokenId};

/// Text to token ids and back, for an engine that takes and gives tokens. Whoever builds the engine implements it with
/// the tokenizer that the frontend uses for the model, or the two will not agree.
///
/// The calls are made on async threads, so they must not block; tokenizing a few kilobytes is no blocking.
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
    /// Token ids are below this; at least 1.
    fn size(&self) -> u32;

    /// The tokens of a reply's text. Nothing is added around it; names of special tokens in it become those tokens.
    ///
    /// # Errors
    /// What the tokenizer refuses; it becomes the request's error.
    fn encode(&self, text: &str) -> Result<Vec<TokenId>, EngineError>;

    /// The text of a prompt, special tokens included: the script's `[prompt]` finds messages by them.
    ///
    /// # Errors
    /// What the tokenizer refuses; it becomes the request's error.
    fn decode(&self, tokens: &[TokenId]) -> Result<String, EngineError>;
}
