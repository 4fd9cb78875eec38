//! Prompt text to token ids, and what each token id stands for.
//!
//! [`TextTokenizer`] wraps a `tokenizer.json` of the `tokenizers` crate. It is shared by
//! [`Arc`](std::sync::Arc): the preprocessor encodes prompts with it, every
//! [`Detokenizer`](super::Detokenizer) reads its table of decoded pieces, and log-probabilities ask it
//! for the text of single tokens. With a [cache](TextTokenizer::with_cache) a conversation's
//! history is not tokenized again with every turn; nothing else in it changes. It is not the place for chat formatting (see
//! [`template`](super::template)) or for limits on the prompt's length, which belong to validation.

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
    /// The text has more tokens than the caller's limit.
    #[error("it has more than {max_tokens} tokens, at least {at_least}")]
    TooManyTokens {
        /// The tokens that came before the work was left.
        at_least: usize,
        /// The limit.
        max_tokens: usize,
    },
    /// The text is too long for a tokenizer that can only take it in one piece.
    #[error(
        "{bytes} bytes are too many for this model's tokenizer, which takes {max_bytes} in one piece"
    )]
    TooLong {
        /// The bytes of the piece, or of as much of it as was looked at.
        bytes: usize,
        /// The most that are tokenized in one piece.
        max_bytes: usize,
    },
    /// The caller wanted no more of it.
    #[error("tokenizing was stopped")]
    Stopped,
    /// The model's tokenizer is of a kind, or has settings, for which the `tokenizers` crate panics.
    #[error("the model's tokenizer cannot {task} this: the tokenizers library panicked: {message}")]
    Panicked {
        /// What it was asked to do.
        task: &'static str,
        /// What it said.
        message: String,
    },
}

impl TokenizerError {
    /// The error of a text whose part this is of, after `before` tokens of other parts.
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
    /// `None` where texts are given to the library whole.
    bounded: Option<BoundedEncoder>,
    /// How many times as long its normalizer makes a text at most.
    growth: usize,
    prefixes: Option<PrefixCache>,
    /// `None` where two texts cannot be put together.
    pairs: Option<PairTemplate>,
}

/// What encoding one text may cost.
#[derive(Clone, Copy)]
pub struct EncodeLimits<'a> {
    /// More tokens end it as [`TokenizerError::TooManyTokens`].
    pub max_tokens: usize,
    /// Asked between parts of the text. Once it says yes, the work ends as [`TokenizerError::Stopped`].
    pub should_stop: &'a dyn Fn() -> bool,
    /// Tokens are known from prompts with the same salt alone.
    pub salt: Option<&'a str>,
}

impl EncodeLimits<'static> {
    /// Any number of tokens, and never stopped.
    pub const NONE: Self = Self {
        max_tokens: usize::MAX,
        should_stop: &|| false,
        salt: None,
    };
}

impl EncodeLimits<'_> {
    /// Whether work with `tokens` so far may go on.
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
    /// [`TokenizerError::VocabularyTooLarge`] when its tokens cannot be decoded one at a time, and
    /// [`TokenizerError::Panicked`].
    pub fn from_bytes(json: &[u8]) -> Result<Self, TokenizerError> {
        guarded("load", || Self::load(json))
    }

    fn load(json: &[u8]) -> Result<Self, TokenizerError> {
        let load = |source| TokenizerError::Load { source };
        growth::check(json)?;
        let mut inner = Tokenizer::from_bytes(json).map_err(load)?;
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

    /// With a cache of at most so many bytes for [`encode_prompt`](Self::encode_prompt); 0 for none. An eighth of them is for
    /// words, the rest for prompts that begin as others did. The latter are not kept where that could not be exact, such as for
    /// a tokenizer without special tokens.
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

    /// The token ids of `text`. With `add_special_tokens` the tokenizer's post-processor adds what the
    /// model expects around a plain prompt (such as a BOS token); text from a chat template usually
    /// holds those already.
    ///
    /// Memory grows with the text, up to 300 times its bytes, and nothing stops it: texts of clients belong to
    /// [`encode_prompt`](Self::encode_prompt).
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Encode`] when the model has no token for a part of the text and no unknown
    /// token either, or a pattern of the pre-tokenizer gives up. [`TokenizerError::Panicked`] when two of
    /// its added tokens claim the same spaces.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        guarded("encode", || {
            self.inner
                .encode_fast(text, add_special_tokens)
                .map(|encoding| encoding.get_ids().to_vec())
                .map_err(|source| TokenizerError::Encode { source })
        })
    }

    /// The same tokens as [`encode`](Self::encode). What is known from other prompts, up to a special token, is not
    /// tokenized again: time grows with the rest. Prompts with `add_special_tokens` do without the cache.
    ///
    /// A long text is tokenized in parts: memory grows by four bytes a token, and by the text's normalized copy where the
    /// tokenizer has a normalizer. Time grows with the text, one or two milliseconds for each 10 KB, if the words are new to
    /// the tokenizer's cache. Keep long texts off async threads.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode), what `limits` say, and [`TokenizerError::TooLong`] for what such a tokenizer cannot take
    /// in parts: whole texts of kinds that are not known here, words without a space of Unigram models, and runs of white space.
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
                    // The border that a part begins with was counted before.
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

    /// The tokens of a text that is not looked for in the cache.
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

    /// Refuses a text of which the normalizer makes far more than it was. What becomes of a letter is often longer than it, what
    /// becomes of a text hardly ever.
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

    /// The most bytes of a text that one token can stand for: a text of more than `n` times as many has more than `n`
    /// tokens. `None` where there is no such number, such as for a tokenizer that drops white space, or makes one unknown
    /// token of any text.
    #[must_use]
    pub fn longest_token_bytes(&self) -> Option<usize> {
        self.longest_token_bytes
    }

    /// How two texts are put together for a model that reads both at once; `None` where the tokenizer's post-processor does not
    /// say, or puts nothing between them.
    #[must_use]
    pub fn pair_template(&self) -> Option<&PairTemplate> {
        self.pairs.as_ref()
    }

    /// Decodes a whole sequence at once: the reference that a [`Detokenizer`](super::Detokenizer)'s
    /// outputs add up to. Ids unknown to the vocabulary are skipped.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Decode`] when a pattern of the decoder gives up, and [`TokenizerError::Panicked`].
    pub fn decode_all(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        // Some decoders of the `tokenizers` crate count on there being at least one token.
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

/// Does `work` with the `tokenizers` crate, whose panics are this request's errors: it counts on files that its own authors
/// made, and models' files hold what it was not written for.
fn guarded<T>(
    task: &'static str,
    work: impl FnOnce() -> Result<T, TokenizerError>,
) -> Result<T, TokenizerError> {
    // Nothing of a tokenizer changes while it works but its caches of words, which are filled in one step each.
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

impl fmt::Debug for TextTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextTokenizer")
            .field("vocab_size", &self.vocab_size)
            .field("decoding", &self.pieces.plan())
            .field("is_bounded", &self.bounded.is_some())
            .field("has_prefix_cache", &self.prefixes.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
