//! [`BoundedEncoder`]: encodes a text in a tenth of the library's time. Its memory does not grow with the text, except for the
//! normalized copy and four bytes a token.
//!
//! The `tokenizers` library keeps the results of all steps of a text side by side: 150 to 300 bytes for each byte of text. This
//! module runs the same steps with the library's own parts, one piece of text at a time, and returns *exactly* the same tokens:
//!
//! - [`added`] finds the added tokens, from left to right;
//! - [`normalizer`] normalizes the text between them in chunks, cut where the normalizer does not look across the cut;
//! - [`splitter`] splits off words from the front, with the tokenizer's own [expressions](expression) on the whole text;
//! - [`words`] encodes words, most of which are [known]. It cuts long words, such as whole texts of models without words, if it
//!   can prove that the tokens stay the same.
//!
//! It analyzes a tokenizer once, when it is loaded. If it cannot be certain of the result, there is no encoder, and
//! [`WHOLE_BYTES`] bounds the library's input: [`TextTokenizer`](super::TextTokenizer) decides.

mod added;
mod expression;
mod known;
mod normalizer;
mod splitter;
mod words;

use tokenizers::Tokenizer;

use self::added::{AddedTokens, Part};
use self::normalizer::ChunkNormalizer;
use self::splitter::Splitter;
use self::words::WordEncoder;
pub(super) use self::words::is_random;
use super::tokenizer::{EncodeLimits, TokenizerError};

/// Texts are processed in parts of about this many bytes.
const WINDOW_BYTES: usize = 16 << 10;

/// The most bytes that are tokenized in one piece if there is no known way to cut them.
pub(super) const WHOLE_BYTES: usize = 256 << 10;

/// The sizes of the parts in which a text is processed.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    /// A part that is tokenized at once, if the text can be cut.
    window: usize,
    /// A part that cannot be cut.
    whole: usize,
}

const SIZES: Sizes = Sizes {
    window: WINDOW_BYTES,
    whole: WHOLE_BYTES,
};

/// Texts that exercise every step, to compare the result with the library's when a tokenizer is loaded.
const PROBES: [&str; 3] = [
    "a",
    " Hello,  wörld! It's 12345\n\n\t<|x|> e\u{301}日本語 🦊▁▁ x.",
    "one two three, four. FIVE 6789 \r\n   ",
];

type Ids = Box<[u32]>;

/// A tokenizer's steps, each ready to work on a part of a text.
pub(super) struct BoundedEncoder {
    added: AddedTokens,
    normalizer: ChunkNormalizer,
    /// Added tokens that are searched for in the normalized text.
    normalized_added: AddedTokens,
    splitter: Splitter,
    words: WordEncoder,
    /// What the post-processor adds before a text, and after it.
    before: Ids,
    after: Ids,
}

impl BoundedEncoder {
    /// Makes the encoder for a tokenizer's long texts; `None` if any of its steps may be unable to work in parts.
    pub(super) fn try_new(tokenizer: &Tokenizer) -> Option<Self> {
        let normalizer = ChunkNormalizer::try_new(tokenizer.get_normalizer())?;
        let pre_tokenizer = tokenizer.get_pre_tokenizer();
        let (splitter, letters) = Splitter::try_new(pre_tokenizer, normalizer.is_none())?;
        let (before, after) = added_by_post_processor(tokenizer)?;
        let is_byte_level = letters.is_some() || splitter.maps_bytes() || normalizer.maps_bytes();
        let encoder = Self {
            added: AddedTokens::try_new(tokenizer, false)?,
            normalized_added: AddedTokens::try_new(tokenizer, true)?,
            words: WordEncoder::new(tokenizer.get_model(), is_byte_level, letters),
            normalizer,
            splitter,
            before,
            after,
        };
        encoder.agrees_with(tokenizer).then_some(encoder)
    }

    /// Caches the tokens of words in up to `max_bytes`.
    pub(super) fn remember_words(&mut self, tokenizer: &Tokenizer, max_bytes: usize) {
        self.words.remember(tokenizer.get_model(), max_bytes);
    }

    /// Returns the tokens of `text`, exactly as the original tokenizer does.
    ///
    /// # Errors
    /// The errors of `limits` and of the library, and [`TokenizerError::TooLong`] if a long part cannot be cut.
    pub(super) fn encode(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        add_special_tokens: bool,
        limits: &EncodeLimits<'_>,
    ) -> Result<Vec<u32>, TokenizerError> {
        self.encode_in(SIZES, tokenizer, text, add_special_tokens, limits)
    }

    fn encode_in(
        &self,
        sizes: Sizes,
        tokenizer: &Tokenizer,
        text: &str,
        add_special_tokens: bool,
        limits: &EncodeLimits<'_>,
    ) -> Result<Vec<u32>, TokenizerError> {
        let mut tokens = Tokens::new(sizes, limits);
        if add_special_tokens {
            tokens.extend(&self.before)?;
        }
        self.added.for_each_part(text, |part| match part {
            Part::Token(id) => tokens.extend(&[id]),
            Part::Text(range) => {
                let is_first = range.start == 0;
                self.segment(tokenizer, &text[range], is_first, &mut tokens)
            }
        })?;
        if add_special_tokens {
            tokens.extend(&self.after)?;
        }
        limits.check(tokens.ids.len())?;
        Ok(tokens.ids)
    }

    /// Adds the tokens of the text between two added tokens.
    fn segment(
        &self,
        tokenizer: &Tokenizer,
        segment: &str,
        is_first: bool,
        tokens: &mut Tokens<'_>,
    ) -> Result<(), TokenizerError> {
        let sizes = tokens.sizes;
        let text = self.normalizer.normalize(segment, sizes, tokens.limits)?;
        self.normalized_added
            .for_each_part(&text, |part| match part {
                Part::Token(id) => tokens.extend(&[id]),
                Part::Text(range) => {
                    let is_first = is_first && range.start == 0;
                    let mut encode = |word: &str| {
                        tokens.took(word.len())?;
                        self.words.encode(tokenizer.get_model(), word, tokens)
                    };
                    self.splitter
                        .split(&text[range], is_first, sizes, &mut encode)
                }
            })
    }

    /// Whether texts of a few words get the library's tokens, with parts of a few bytes and with large parts.
    fn agrees_with(&self, tokenizer: &Tokenizer) -> bool {
        let small = Sizes {
            window: 8,
            whole: WHOLE_BYTES,
        };
        let probes = PROBES
            .iter()
            .flat_map(|probe| [(probe, false), (probe, true)]);
        probes
            .filter_map(|(probe, special)| {
                let expected = tokenizer.encode_fast(*probe, special).ok()?;
                Some((probe, special, expected))
            })
            .all(|(probe, special, expected)| {
                [SIZES, small].into_iter().all(|sizes| {
                    let limits = &EncodeLimits::NONE;
                    let ids = self.encode_in(sizes, tokenizer, probe, special, limits);
                    ids.is_ok_and(|ids| ids == expected.get_ids())
                })
            })
    }
}

/// The tokens so far, and their limits.
struct Tokens<'a> {
    ids: Vec<u32>,
    limits: &'a EncodeLimits<'a>,
    sizes: Sizes,
    /// The bytes taken since the last check of the limits.
    unchecked_bytes: usize,
}

impl<'a> Tokens<'a> {
    fn new(sizes: Sizes, limits: &'a EncodeLimits<'a>) -> Self {
        Self {
            ids: Vec::new(),
            limits,
            sizes,
            unchecked_bytes: 0,
        }
    }

    fn extend(&mut self, ids: &[u32]) -> Result<(), TokenizerError> {
        let free = self.ids.capacity() - self.ids.len();
        if free < ids.len() {
            // Doubling would leave up to half of a long text's token buffer unused.
            self.ids
                .reserve_exact(ids.len().max(self.ids.len() / 4).max(64));
        }
        self.ids.extend_from_slice(ids);
        if self.ids.len() > self.limits.max_tokens {
            return self.limits.check(self.ids.len());
        }
        Ok(())
    }

    /// Counts text that is about to be tokenized, and checks the limits from time to time.
    fn took(&mut self, bytes: usize) -> Result<(), TokenizerError> {
        self.unchecked_bytes += bytes;
        if self.unchecked_bytes < self.sizes.window {
            return Ok(());
        }
        self.unchecked_bytes = 0;
        self.limits.check(self.ids.len())
    }
}

/// Returns what the post-processor adds before and after a text; `None` if it does anything else.
fn added_by_post_processor(tokenizer: &Tokenizer) -> Option<(Ids, Ids)> {
    let encode = |special| tokenizer.encode_fast("a", special).ok();
    let (bare, full) = (encode(false)?, encode(true)?);
    let is_added = full.get_special_tokens_mask();
    let before = is_added.iter().take_while(|mask| **mask == 1).count();
    let (before, rest) = full.get_ids().split_at(before);
    let (text, after) = rest.split_at_checked(bare.len())?;
    (text == bare.get_ids()).then(|| (before.into(), after.into()))
}

/// Returns the last character boundary of `text` at or before `index`, but not before the end of the first character.
fn boundary_before(text: &str, index: usize) -> usize {
    let boundary = text.floor_char_boundary(index);
    if boundary > 0 {
        return boundary;
    }
    text.chars().next().map_or(0, char::len_utf8)
}

#[cfg(test)]
mod tests;
