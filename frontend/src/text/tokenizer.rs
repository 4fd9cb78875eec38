//! Prompt text to token ids, and what each token id stands for.
//!
//! [`TextTokenizer`] wraps a `tokenizer.json` of the `tokenizers` crate. It is shared by
//! [`Arc`](std::sync::Arc): the preprocessor encodes prompts with it, every
//! [`Detokenizer`](super::Detokenizer) reads its table of decoded pieces, and log-probabilities ask it
//! for the text of single tokens. With a [cache](TextTokenizer::with_prefix_cache) a conversation's
//! history is not tokenized again with every turn; nothing else in it changes. It is not the place for chat formatting (see
//! [`template`](super::template)) or for limits on the prompt's length, which belong to validation.

use std::fmt;

use tokenizers::Tokenizer;

use super::detokenize::pieces::{PieceTable, Position};
use super::prefix_cache::PrefixCache;

/// Why a tokenizer could not be loaded, or could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The bytes are not a tokenizer that the `tokenizers` crate can load.
    #[error("cannot load the tokenizer")]
    Load {
        /// What the `tokenizers` crate said.
        #[source]
        source: tokenizers::Error,
    },
    /// The tokenizer loads, but its decoder cannot be run safely.
    #[error("unsupported decoder: {reason}")]
    UnsupportedDecoder {
        /// What is wrong with it.
        reason: String,
    },
    /// The vocabulary's ids or texts do not fit the decoding table.
    #[error("the vocabulary is too large: {what}")]
    VocabularyTooLarge {
        /// Which limit it exceeds.
        what: String,
    },
    /// A text could not be encoded.
    #[error("cannot tokenize the text")]
    Encode {
        /// What the `tokenizers` crate said.
        #[source]
        source: tokenizers::Error,
    },
    /// Token ids could not be decoded.
    #[error("cannot decode the tokens")]
    Decode {
        /// What the `tokenizers` crate said.
        #[source]
        source: tokenizers::Error,
    },
}

/// A loaded tokenizer, with the text of every token prepared for incremental decoding.
///
/// # Examples
///
/// ```
/// use genset_frontend::text::TextTokenizer;
///
/// let json = br###"{
///     "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
///     "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null,
///     "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": false },
///     "model": { "type": "WordLevel", "vocab": { "[UNK]": 0, "good": 1, "day": 2 }, "unk_token": "[UNK]" }
/// }"###;
/// let tokenizer = TextTokenizer::from_bytes(json)?;
/// assert_eq!(tokenizer.encode("good day", false)?, [1, 2]);
/// assert_eq!(tokenizer.decode_all(&[1, 2], false)?, "good day");
/// # Ok::<(), genset_frontend::text::TokenizerError>(())
/// ```
pub struct TextTokenizer {
    inner: Tokenizer,
    pieces: PieceTable,
    vocab_size: usize,
    prefixes: Option<PrefixCache>,
}

/// A prompt's tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// All of them.
    pub ids: Vec<u32>,
    /// How many of them were known from other prompts.
    pub cached_tokens: usize,
}

impl TextTokenizer {
    /// Loads a `tokenizer.json` and prepares the decoding table, which adds some tens of milliseconds
    /// for a vocabulary of 150,000 tokens.
    ///
    /// Truncation and padding written in the file are dropped: they are training settings, and would
    /// silently cut or fill a prompt.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Load`] when the file is malformed, [`TokenizerError::UnsupportedDecoder`] or
    /// [`TokenizerError::VocabularyTooLarge`] when its tokens cannot be decoded one at a time.
    pub fn from_bytes(json: &[u8]) -> Result<Self, TokenizerError> {
        let load = |source| TokenizerError::Load { source };
        let mut inner = Tokenizer::from_bytes(json).map_err(load)?;
        inner.with_truncation(None).map_err(load)?;
        inner.with_padding(None);
        let pieces = PieceTable::try_new(&inner)?;
        let vocab_size = inner.get_vocab_size(true);
        Ok(Self {
            inner,
            pieces,
            vocab_size,
            prefixes: None,
        })
    }

    /// With a cache of at most so many bytes for [`encode_prompt`](Self::encode_prompt); 0 for none. There is none either
    /// where it could not be exact, such as for a tokenizer without special tokens.
    #[must_use]
    pub fn with_prefix_cache(mut self, max_bytes: usize) -> Self {
        self.prefixes = PrefixCache::try_new(&self.inner, max_bytes);
        self
    }

    /// The token ids of `text`. With `add_special_tokens` the tokenizer's post-processor adds what the
    /// model expects around a plain prompt (such as a BOS token); text from a chat template usually
    /// holds those already.
    ///
    /// Time grows with the text: one or two milliseconds for each 10 KB, if the words are new to the
    /// tokenizer's cache. Keep long texts off async threads.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Encode`] when the model has no token for a part of the text and no unknown
    /// token either, or a pattern of the pre-tokenizer gives up.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        self.inner
            .encode_fast(text, add_special_tokens)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|source| TokenizerError::Encode { source })
    }

    /// The same tokens as [`encode`](Self::encode). What is known from other prompts, up to a special token, is not
    /// tokenized again: time grows with the rest. Prompts with `add_special_tokens` do without the cache.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode).
    pub fn encode_prompt(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<EncodedPrompt, TokenizerError> {
        match &self.prefixes {
            Some(prefixes) if !add_special_tokens => {
                prefixes.encode(text, |part| self.encode(part, false))
            }
            Some(_) | None => Ok(EncodedPrompt {
                ids: self.encode(text, add_special_tokens)?,
                cached_tokens: 0,
            }),
        }
    }

    /// Decodes a whole sequence at once: the reference that a [`Detokenizer`](super::Detokenizer)'s
    /// outputs add up to. Ids unknown to the vocabulary are skipped.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`] when a pattern of the decoder gives up.
    pub fn decode_all(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        // Some decoders of the `tokenizers` crate count on there being at least one token.
        let visible = |&id: &u32| self.pieces.is_visible(id, skip_special);
        if !ids.iter().any(visible) {
            return Ok(String::new());
        }
        self.inner
            .decode(ids, skip_special)
            .map_err(|source| TokenizerError::Decode { source })
    }

    /// The id of a token given as it stands in the vocabulary, such as `<|im_end|>` or `Ġthe`.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token as it stands in the vocabulary, which need not be what it decodes to.
    #[must_use]
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The bytes that this token adds to a text, when it is not the text's first token; empty for an
    /// unknown id. They may be part of a code point.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces
            .get(id, Position::Later)
            .map_or(&[], |piece| piece.as_bytes())
    }

    /// The text that this token adds, for log-probabilities: [`token_bytes`](Self::token_bytes), with
    /// U+FFFD for what is not a whole code point. Concatenating these does not give the decoded text.
    #[must_use]
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.token_bytes(id)).into_owned()
    }

    /// Whether the vocabulary marks this token as special, so that decoding may skip it.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }

    /// The number of tokens, added ones included. With gaps in the ids, the largest id is not below it.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The decoded pieces of all tokens.
    pub(super) fn pieces(&self) -> &PieceTable {
        &self.pieces
    }
}

impl fmt::Debug for TextTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextTokenizer")
            .field("vocab_size", &self.vocab_size)
            .field("decoding", &self.pieces.plan())
            .field("has_prefix_cache", &self.prefixes.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::text::detokenize::fixtures;

    #[test]
    fn is_shared_between_threads() {
        fn shared<T: Send + Sync + 'static>() {}
        shared::<Arc<TextTokenizer>>();
    }

    #[test]
    fn encodes_and_decodes() {
        let tokenizer = fixtures::byte_level();
        let text = "the quick brown 🦊, שלום";
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.decode_all(&ids, false).unwrap(), text);
        assert_eq!(tokenizer.encode("", false).unwrap(), [] as [u32; 0]);
    }

    #[test]
    fn special_tokens_are_found_in_text_and_skipped_on_request() {
        let tokenizer = fixtures::byte_level();
        let eos = tokenizer.token_id("<|eos|>").unwrap();
        assert!(tokenizer.is_special(eos));
        assert_eq!(tokenizer.id_to_token(eos).unwrap(), "<|eos|>");
        let ids = tokenizer.encode("the<|eos|>", false).unwrap();
        assert_eq!(ids.last(), Some(&eos));
        assert_eq!(tokenizer.decode_all(&ids, true).unwrap(), "the");
        assert_eq!(tokenizer.decode_all(&ids, false).unwrap(), "the<|eos|>");
        assert_eq!(tokenizer.decode_all(&[eos], true).unwrap(), "");
    }

    #[test]
    fn token_text_is_what_the_token_adds() {
        let byte_level = fixtures::byte_level();
        let the = byte_level.token_id("Ġthe").unwrap();
        assert_eq!(byte_level.token_text(the), " the");
        let lead_byte = byte_level.token_id("ð").unwrap();
        assert_eq!(byte_level.token_bytes(lead_byte), [0xf0]);
        assert_eq!(byte_level.token_text(lead_byte), "\u{fffd}");
        assert_eq!(byte_level.token_text(u32::MAX), "");

        let sentence_piece = fixtures::sentence_piece();
        let byte = sentence_piece.token_id("<0xE2>").unwrap();
        assert_eq!(sentence_piece.token_bytes(byte), [0xe2]);
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_dropped() {
        let mut json = fixtures::byte_level_json();
        json["truncation"] = serde_json::json!({
            "direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0
        });
        json["padding"] = serde_json::json!({
            "strategy": { "Fixed": 64 }, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "!"
        });
        let tokenizer = TextTokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        let text = "the quick brown fox";
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.decode_all(&ids, false).unwrap(), text);
    }

    #[test]
    fn known_prefixes_are_not_tokenized_again() {
        let json = fixtures::byte_level_json().to_string();
        let plain = TextTokenizer::from_bytes(json.as_bytes()).unwrap();
        let cached = TextTokenizer::from_bytes(json.as_bytes()).unwrap();
        let cached = cached.with_prefix_cache(1 << 20);
        let known = format!("<|bos|>{}<|eos|>", "the quick brown fox ".repeat(20));
        for (rest, cached_tokens) in [
            ("one", 0),
            ("two", plain.encode(&known, false).unwrap().len()),
        ] {
            let text = format!("{known}{rest}");
            let prompt = cached.encode_prompt(&text, false).unwrap();
            assert_eq!(prompt.ids, plain.encode(&text, false).unwrap());
            assert_eq!(prompt.cached_tokens, cached_tokens);
        }
        for max_bytes in [0, 1 << 20] {
            let tokenizer = TextTokenizer::from_bytes(json.as_bytes()).unwrap();
            let tokenizer = tokenizer.with_prefix_cache(max_bytes);
            for _ in 0..2 {
                let prompt = tokenizer.encode_prompt(&known, true).unwrap();
                assert_eq!(prompt.ids, plain.encode(&known, true).unwrap());
                assert_eq!(prompt.cached_tokens, 0);
            }
        }
    }

    #[test]
    fn malformed_files_are_errors() {
        let error = TextTokenizer::from_bytes(b"{}").unwrap_err();
        assert!(matches!(error, TokenizerError::Load { .. }), "{error:?}");
        let error = fixtures::with_decoder(serde_json::json!(
            { "type": "Strip", "content": " ", "start": 0, "stop": 1 }
        ))
        .unwrap_err();
        assert!(matches!(error, TokenizerError::UnsupportedDecoder { .. }));
        let mut sparse = fixtures::byte_level_json();
        sparse["model"]["vocab"]["far away"] = u32::MAX.into();
        let error = TextTokenizer::from_bytes(sparse.to_string().as_bytes()).unwrap_err();
        assert!(matches!(error, TokenizerError::VocabularyTooLarge { .. }));
    }
}
