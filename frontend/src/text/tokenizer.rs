//! Turns prompt text into token ids, and token ids into what they stand for.
//!
//! [`TextTokenizer`] wraps a `tokenizer.json` of the `tokenizers` crate. It is shared by [`Arc`](std::sync::Arc): the
//! preprocessor encodes prompts with it, every [`Detokenizer`](super::Detokenizer) reads its table of decoded pieces, and
//! logprobs get the text of single tokens from it. With a [cache](TextTokenizer::with_cache), a conversation's history is
//! not tokenized again in every turn; all else is immutable. Chat formatting is in [`template`](super::template);
//! validation limits the prompt's length.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tokenizers::{NormalizedString, Normalizer, Tokenizer};

use super::bounded::{BoundedEncoder, WHOLE_BYTES};
use super::detokenize::pieces::{PieceTable, Position};
use super::growth;
use super::longest;
use super::pair_template::PairTemplate;
use super::prefix_cache::PrefixCache;

/// Why a tokenizer could not be loaded, or could not encode or decode.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The bytes are not a tokenizer that the `tokenizers` crate can load.
    #[error("cannot load the tokenizer")]
    Load {
        /// The error of the `tokenizers` crate.
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
        /// The error of the `tokenizers` crate.
        #[source]
        source: tokenizers::Error,
    },
    /// Token ids could not be decoded.
    #[error("cannot decode the tokens")]
    Decode {
        /// The error of the `tokenizers` crate.
        #[source]
        source: tokenizers::Error,
    },
    /// The text has more tokens than the caller's limit.
    #[error("it has more than {max_tokens} tokens, at least {at_least}")]
    TooManyTokens {
        /// The number of tokens when encoding stopped.
        at_least: usize,
        /// The limit.
        max_tokens: usize,
    },
    /// The text is too long for a tokenizer that can only take it in one piece.
    #[error(
        "{bytes} bytes are too many for this model's tokenizer, which takes {max_bytes} in one piece"
    )]
    TooLong {
        /// The length of the piece, or of the part that was examined.
        bytes: usize,
        /// The most bytes that are tokenized in one piece.
        max_bytes: usize,
    },
    /// The caller stopped the work.
    #[error("tokenizing was stopped")]
    Stopped,
    /// The `tokenizers` crate panicked: it does not support the kind or the settings of the model's tokenizer.
    #[error("the model's tokenizer cannot {task} this: the tokenizers library panicked: {message}")]
    Panicked {
        /// The task.
        task: &'static str,
        /// The panic message.
        message: String,
    },
}

impl TokenizerError {
    /// Turns the error of a text's part into that of the text, after `before` tokens of other parts.
    fn after(self, before: usize, limits: &EncodeLimits<'_>) -> Self {
        if let Self::TooManyTokens { at_least, .. } = self {
            return Self::TooManyTokens {
                at_least: at_least + before - 1,
                max_tokens: limits.max_tokens,
            };
        }
        self
    }
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
    longest_token_bytes: Option<usize>,
    /// `None` if the library encodes texts whole.
    bounded: Option<BoundedEncoder>,
    /// The largest factor by which its normalizer lengthens a text.
    growth: usize,
    prefixes: Option<PrefixCache>,
    /// `None` if two texts cannot be joined.
    pairs: Option<PairTemplate>,
}

/// The limits for encoding one text.
#[derive(Clone, Copy)]
pub struct EncodeLimits<'a> {
    /// More tokens fail with [`TokenizerError::TooManyTokens`].
    pub max_tokens: usize,
    /// Called between parts of the text. Once it returns true, encoding fails with [`TokenizerError::Stopped`].
    pub should_stop: &'a dyn Fn() -> bool,
    /// Uses only tokens known from prompts with the same salt.
    pub salt: Option<&'a str>,
}

impl EncodeLimits<'static> {
    /// Allows any number of tokens, and never stops.
    pub const NONE: Self = Self {
        max_tokens: usize::MAX,
        should_stop: &|| false,
        salt: None,
    };
}

impl EncodeLimits<'_> {
    /// Checks whether work with `tokens` so far may continue.
    pub(super) fn check(&self, tokens: usize) -> Result<(), TokenizerError> {
        if tokens > self.max_tokens {
            return Err(TokenizerError::TooManyTokens {
                at_least: tokens,
                max_tokens: self.max_tokens,
            });
        }
        if (self.should_stop)() {
            return Err(TokenizerError::Stopped);
        }
        Ok(())
    }
}

impl fmt::Debug for EncodeLimits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncodeLimits")
            .field("max_tokens", &self.max_tokens)
            .finish_non_exhaustive()
    }
}

/// A prompt's tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// All tokens.
    pub ids: Vec<u32>,
    /// How many tokens were known from other prompts.
    pub cached_tokens: usize,
}

impl TextTokenizer {
    /// Loads a `tokenizer.json` and prepares the decoding table, which adds some tens of milliseconds
    /// for a vocabulary of 150,000 tokens.
    ///
    /// Drops truncation and padding settings in the file: they are for training, and would silently cut or pad a prompt.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Load`] when the file is malformed, [`TokenizerError::UnsupportedDecoder`] or
    /// [`TokenizerError::VocabularyTooLarge`] when its tokens cannot be decoded one at a time, and
    /// [`TokenizerError::Panicked`].
    pub fn from_bytes(json: &[u8]) -> Result<Self, TokenizerError> {
        guarded("load", || Self::load(json))
    }

    fn load(json: &[u8]) -> Result<Self, TokenizerError> {
        let load = |source| TokenizerError::Load { source };
        growth::check(json)?;
        let text = str::from_utf8(json).map_err(|error| load(error.into()))?;
        // Parsed by the tokenizers crate's own code: a generic function would be compiled here once more.
        let mut inner: Tokenizer = text.parse().map_err(load)?;
        inner.with_truncation(None).map_err(load)?;
        inner.with_padding(None);
        let pieces = PieceTable::try_new(&inner)?;
        let vocab_size = inner.get_vocab_size(true);
        let longest_token_bytes = longest::longest_token_bytes(&inner);
        let bounded = BoundedEncoder::try_new(&inner);
        let pairs = guarded("encode", || Ok(PairTemplate::try_new(&inner)));
        if bounded.is_none() {
            let max_bytes = WHOLE_BYTES;
            tracing::info!(
                max_bytes,
                "the tokenizer takes texts whole, and so none above a limit"
            );
        }
        Ok(Self {
            growth: growth::of_normalizer(inner.get_normalizer()),
            inner,
            pieces,
            vocab_size,
            longest_token_bytes,
            bounded,
            prefixes: None,
            pairs: pairs.ok().flatten(),
        })
    }

    /// Adds a cache of at most `max_bytes` for [`encode_prompt`](Self::encode_prompt); 0 for none. An eighth is for words,
    /// the rest for prompt prefixes. Prefixes are not cached if that could not be exact, for example for a tokenizer
    /// without special tokens.
    #[must_use]
    pub fn with_cache(mut self, max_bytes: usize) -> Self {
        let of_words = max_bytes / 8;
        if let Some(bounded) = &mut self.bounded {
            bounded.remember_words(&self.inner, of_words);
        }
        let cache = guarded("encode", || {
            Ok(PrefixCache::try_new(&self.inner, max_bytes - of_words))
        });
        self.prefixes = cache.unwrap_or_else(|error| {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "no cache of tokenized prefixes");
            None
        });
        self
    }

    /// Returns the token ids of `text`. With `add_special_tokens`, the tokenizer's post-processor adds what the model
    /// expects around a plain prompt, such as a BOS token; text from a chat template usually contains those already.
    ///
    /// Takes up to 300 times the text's bytes of memory, and cannot be stopped: use [`encode_prompt`](Self::encode_prompt) for
    /// texts of clients.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Encode`] when the model has neither a token for a part of the text nor an unknown token, or a
    /// pattern of the pre-tokenizer gives up. [`TokenizerError::Panicked`] when two of its added tokens claim the same
    /// spaces.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        guarded("encode", || {
            self.inner
                .encode_fast(text, add_special_tokens)
                .map(|encoding| encoding.get_ids().to_vec())
                .map_err(|source| TokenizerError::Encode { source })
        })
    }

    /// Returns the same tokens as [`encode`](Self::encode). A prefix known from other prompts, up to a special token, is
    /// not tokenized again: time grows with the rest. Prompts with `add_special_tokens` do not use the cache.
    ///
    /// A long text is tokenized in parts: memory grows by four bytes a token, and by the text's normalized copy if the
    /// tokenizer has a normalizer. Time grows with the text: one or two milliseconds for each 10 KB of words that are not
    /// cached. Keep long texts off async threads.
    ///
    /// # Errors
    ///
    /// The errors of [`encode`](Self::encode) and of `limits`, and [`TokenizerError::TooLong`] for long texts that cannot
    /// be tokenized in parts: whole texts for unknown kinds of tokenizers, words without a space for Unigram models, and
    /// runs of white space.
    pub fn encode_prompt(
        &self,
        text: &str,
        add_special_tokens: bool,
        limits: &EncodeLimits<'_>,
    ) -> Result<EncodedPrompt, TokenizerError> {
        limits.check(0)?;
        let encoded = match &self.prefixes {
            Some(prefixes) if !add_special_tokens => {
                prefixes.encode(limits.salt, text, |part, before| {
                    limits.check(before)?;
                    // The border at a part's beginning was counted before.
                    let further = EncodeLimits {
                        max_tokens: (limits.max_tokens - before).saturating_add(1),
                        ..*limits
                    };
                    self.encode_part(part, false, &further)
                        .map_err(|error| error.after(before, limits))
                })?
            }
            Some(_) | None => EncodedPrompt {
                ids: self.encode_part(text, add_special_tokens, limits)?,
                cached_tokens: 0,
            },
        };
        limits.check(encoded.ids.len())?;
        Ok(encoded)
    }

    /// Encodes a text without the cache.
    fn encode_part(
        &self,
        text: &str,
        add_special_tokens: bool,
        limits: &EncodeLimits<'_>,
    ) -> Result<Vec<u32>, TokenizerError> {
        match &self.bounded {
            Some(bounded) => guarded("encode", || {
                bounded.encode(&self.inner, text, add_special_tokens, limits)
            }),
            None if text.len() > WHOLE_BYTES => Err(TokenizerError::TooLong {
                bytes: text.len(),
                max_bytes: WHOLE_BYTES,
            }),
            None => {
                guarded("encode", || self.check_growth(text))?;
                self.encode(text, add_special_tokens)
            }
        }
    }

    /// Refuses a text that the normalizer makes far longer. A letter often becomes longer, a whole text hardly ever.
    fn check_growth(&self, text: &str) -> Result<(), TokenizerError> {
        let max_bytes = growth::most_bytes(text.len());
        let Some(normalizer) = self.inner.get_normalizer() else {
            return Ok(());
        };
        if text.len().saturating_mul(self.growth) <= max_bytes {
            return Ok(());
        }
        let whole_bytes = growth::whole_bytes(self.growth);
        if text.len() > whole_bytes {
            return Err(TokenizerError::TooLong {
                bytes: text.len(),
                max_bytes: whole_bytes,
            });
        }
        let mut normalized = NormalizedString::from(text);
        let done = normalizer.normalize(&mut normalized);
        done.map_err(|source| TokenizerError::Encode { source })?;
        let bytes = normalized.get().len();
        if bytes > max_bytes {
            return Err(TokenizerError::TooLong { bytes, max_bytes });
        }
        Ok(())
    }

    /// Returns the most bytes of a text that one token can stand for: a text of more than `n` times as many bytes has more
    /// than `n` tokens. `None` if there is no bound, for example if the tokenizer drops white space, or makes one unknown
    /// token of any text.
    #[must_use]
    pub fn longest_token_bytes(&self) -> Option<usize> {
        self.longest_token_bytes
    }

    /// Returns how two texts are joined for a model that reads both at once; `None` if the tokenizer's post-processor does
    /// not define it, or puts nothing between them.
    #[must_use]
    pub fn pair_template(&self) -> Option<&PairTemplate> {
        self.pairs.as_ref()
    }

    /// Decodes a whole sequence at once: the reference for a [`Detokenizer`](super::Detokenizer)'s outputs. Skips ids
    /// unknown to the vocabulary.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`] when a pattern of the decoder gives up, and [`TokenizerError::Panicked`].
    pub fn decode_all(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        // Some decoders of the `tokenizers` crate require at least one token.
        let visible = |&id: &u32| self.pieces.is_visible(id, skip_special);
        if !ids.iter().any(visible) {
            return Ok(String::new());
        }
        guarded("decode", || {
            self.inner
                .decode(ids, skip_special)
                .map_err(|source| TokenizerError::Decode { source })
        })
    }

    /// Returns the id of a token as spelled in the vocabulary, such as `<|im_end|>` or `Ġthe`.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the token as spelled in the vocabulary, which may differ from its decoded text.
    #[must_use]
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns the bytes that this token adds to a text if it is not the first token; empty for an unknown id. They may be
    /// part of a code point.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces
            .get(id, Position::Later)
            .map_or(&[], |piece| piece.as_bytes())
    }

    /// Returns the text of this token for logprobs: [`token_bytes`](Self::token_bytes), with U+FFFD for what is not a whole
    /// code point. Concatenating these does not give the decoded text.
    #[must_use]
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.token_bytes(id)).into_owned()
    }

    /// Whether the vocabulary marks this token as special, so that decoding may skip it.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }

    /// Returns the number of tokens, added ones included. If the ids have gaps, the largest id is not below this number.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The decoded pieces of all tokens.
    pub(super) fn pieces(&self) -> &PieceTable {
        &self.pieces
    }
}

/// Runs `work` with the `tokenizers` crate and turns a panic into this request's error: the crate relies on files made by
/// its own authors, but models' files may contain anything.
fn guarded<T>(
    task: &'static str,
    work: impl FnOnce() -> Result<T, TokenizerError>,
) -> Result<T, TokenizerError> {
    // Only a tokenizer's word caches change while it works, and each change is one step.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        let message = panic_message(&*payload);
        Err(TokenizerError::Panicked { task, message })
    })
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("it did not say why").to_owned()
}

genset_backend_common::debug_as!(|it| TextTokenizer {
    vocab_size: it.vocab_size,
    decoding: it.pieces.plan(),
    is_bounded: it.bounded.is_some(),
    has_prefix_cache: it.prefixes.is_some(),
    ..
});

#[cfg(test)]
mod tests;
