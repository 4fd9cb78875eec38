//! [`WordEncoder`]: the tokens of one word, however long.
//!
//! The tokens of short words are [known](super::known) from other texts, mostly.
//!
//! A word is whatever the pre-tokenizer does not split: for some models a whole text, for others a run of a million letters.
//! Of a model that merges pairs, a long one is encoded in windows, each of which begins with a token that the window before
//! had as well. Why that gives the tokens of the whole word:
//!
//! - Merging is local: as long as nothing is merged over a border, what happens on its left and on its right is what would
//!   happen to either side alone.
//! - So tokens of a text are *the* tokens of the text if and only if those of every two neighbours are the tokens of the text
//!   of the two. (Were another the result, consider the first merge over a border of theirs: the two tokens beside it would
//!   have been merged just so when they were alone.)
//! - Within a window the library has made sure of it. So a border after a window's token is right if this token and the first
//!   of the next window are what the library makes of the two. If they are not, the window before is made larger.

use std::sync::OnceLock;

use tokenizers::Model;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;

use super::known::{KnownWords, MAX_WORD_BYTES};
use super::splitter::ByteLetters;
use super::{Tokens, boundary_before};
use crate::text::longest::{has_token_for_all, is_alike_everywhere};
use crate::text::tokenizer::TokenizerError;

/// How a model's words are encoded.
pub(super) struct WordEncoder {
    kind: Kind,
    /// What a word's bytes become before the model sees them.
    letters: Option<ByteLetters>,
    known: Option<KnownWords>,
}

enum Kind {
    /// In windows, by merges alone: the copy, where there is one, never looks a whole window up as a token.
    Merges { without_look_up: OnceLock<Box<BPE>> },
    /// A long word is looked up as it is, and unknown.
    LookedUp,
    /// Whole, up to a limit.
    Whole,
}

/// A token, and where it ends in the word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Placed {
    id: u32,
    end: usize,
}

impl WordEncoder {
    /// Of words that are made of `letters` before the model sees them. `is_byte_level` says that these, or what comes in their
    /// place, stand for bytes.
    pub(super) fn new(
        model: &ModelWrapper,
        is_byte_level: bool,
        letters: Option<ByteLetters>,
    ) -> Self {
        let kind = match model {
            ModelWrapper::BPE(bpe) if merges_locally(bpe, is_byte_level) => Kind::Merges {
                without_look_up: OnceLock::new(),
            },
            ModelWrapper::WordPiece(pieces) if pieces.max_input_chars_per_word <= 4096 => {
                Kind::LookedUp
            }
            ModelWrapper::WordLevel(_) => Kind::LookedUp,
            ModelWrapper::BPE(_) | ModelWrapper::WordPiece(_) | ModelWrapper::Unigram(_) => {
                Kind::Whole
            }
        };
        Self {
            kind,
            letters,
            known: None,
        }
    }

    /// Keeps the tokens of words in so many bytes, where a word always has the same.
    pub(super) fn remember(&mut self, model: &ModelWrapper, max_bytes: usize) {
        self.known = (max_bytes > 0 && !is_random(model)).then(|| KnownWords::new(max_bytes));
    }

    /// Adds the tokens of `word`, which `model`, the one that this was made for, gives.
    ///
    /// # Errors
    /// As [`BoundedEncoder::encode`](super::BoundedEncoder::encode).
    pub(super) fn encode(
        &self,
        model: &ModelWrapper,
        word: &str,
        tokens: &mut Tokens<'_>,
    ) -> Result<(), TokenizerError> {
        let known = self.known.as_ref();
        let known = known.filter(|_| word.len() <= MAX_WORD_BYTES);
        if let Some(added) = known.and_then(|known| known.with(word, |ids| tokens.extend(ids))) {
            return added;
        }
        let before = tokens.ids.len();
        match &self.letters {
            Some(letters) => self.encode_new(model, &letters.of(word), tokens)?,
            None => self.encode_new(model, word, tokens)?,
        }
        if let Some(known) = known {
            known.insert(word, &tokens.ids[before..]);
        }
        Ok(())
    }

    fn encode_new(
        &self,
        model: &ModelWrapper,
        word: &str,
        tokens: &mut Tokens<'_>,
    ) -> Result<(), TokenizerError> {
        if word.len() > tokens.sizes.window {
            match (&self.kind, model) {
                (Kind::Merges { without_look_up }, ModelWrapper::BPE(bpe)) => {
                    let bpe: &BPE = if bpe.ignore_merges {
                        without_look_up.get_or_init(|| {
                            let mut bpe = bpe.clone();
                            bpe.ignore_merges = false;
                            Box::new(bpe)
                        })
                    } else {
                        bpe
                    };
                    return LongWord { bpe, word }.encode(tokens);
                }
                (Kind::LookedUp, _) => {}
                (Kind::Merges { .. } | Kind::Whole, _) => check_length(word.len(), tokens)?,
            }
        }
        let encoded = model.tokenize(word);
        let encoded = encoded.map_err(|source| TokenizerError::Encode { source })?;
        let ids: Vec<_> = encoded.into_iter().map(|token| token.id).collect();
        tokens.extend(&ids)
    }
}

fn check_length(bytes: usize, tokens: &Tokens<'_>) -> Result<(), TokenizerError> {
    let max_bytes = tokens.sizes.whole;
    if bytes > max_bytes {
        return Err(TokenizerError::TooLong { bytes, max_bytes });
    }
    Ok(())
}

/// Whether what a model makes of a part of a word depends on nothing beside it, until something is merged.
fn merges_locally(bpe: &BPE, is_byte_level: bool) -> bool {
    // Beside characters that have bytes, the library puts unknown ones in the wrong place.
    let has_unknown = bpe.unk_token.is_some() && !bpe.byte_fallback;
    let is_known = has_unknown || has_token_for_all(bpe, is_byte_level);
    !drops_merges(bpe) && is_known && is_alike_everywhere(bpe)
}

/// Whether the same word has other tokens each time: a setting for training.
pub(in crate::text) fn is_random(model: &ModelWrapper) -> bool {
    // Unigram models know such a setting too, but no file can turn it on.
    matches!(model, ModelWrapper::BPE(bpe) if drops_merges(bpe))
}

fn drops_merges(bpe: &BPE) -> bool {
    bpe.dropout.is_some_and(|share| share > 0.0)
}

struct LongWord<'a> {
    bpe: &'a BPE,
    word: &'a str,
}

/// A border between two windows, and how to go back behind it.
struct Border {
    /// The window on its left.
    start: usize,
    size: usize,
    /// How many tokens there were before that window's.
    tokens: usize,
    /// Where the tokens beside the border begin, and those on its left.
    begin: usize,
    left: Vec<Placed>,
}

impl LongWord<'_> {
    fn encode(&self, tokens: &mut Tokens<'_>) -> Result<(), TokenizerError> {
        let window = tokens.sizes.window;
        let (mut start, mut size) = (0, window);
        let mut borders = Vec::new();
        loop {
            check_length(size.min(self.word.len() - start), tokens)?;
            tokens.took(window)?;
            let open = self.window(start, size)?;
            let fits = match borders.last() {
                Some(border) => self.fits(border, &open)?,
                None => true,
            };
            if let Some(border) = borders.pop_if(|_| !fits) {
                tokens.ids.truncate(border.tokens);
                (start, size) = (border.start, border.size * 2);
            } else if start + size >= self.word.len() {
                return add(tokens, &open);
            } else if let Some(cut) = self.cut(start, size, &open) {
                borders.push(self.border(start, size, &open[..=cut], tokens.ids.len()));
                add(tokens, &open[..=cut])?;
                (start, size) = (open[cut].end, window);
            } else {
                size *= 2;
            }
        }
    }

    /// The tokens of so many bytes of the word from `start` on, or a few less.
    fn window(&self, start: usize, size: usize) -> Result<Vec<Placed>, TokenizerError> {
        let rest = &self.word[start..];
        let encoded = self.bpe.tokenize(&rest[..boundary_before(rest, size)]);
        let encoded = encoded.map_err(|source| TokenizerError::Encode { source })?;
        let placed = |token: tokenizers::Token| Placed {
            id: token.id,
            end: start + token.offsets.1,
        };
        Ok(encoded.into_iter().map(placed).collect())
    }

    /// The last token of a window that the word may be cut after. The last quarter is left out: more text could make other
    /// tokens of it.
    fn cut(&self, start: usize, size: usize, open: &[Placed]) -> Option<usize> {
        let is_far = |token: &Placed| token.end <= start + size / 4 * 3 && self.is_whole(token);
        open.iter().rposition(is_far)
    }

    /// Whether a token does not end within a character, as those that are one of its bytes may.
    fn is_whole(&self, token: &Placed) -> bool {
        self.word.is_char_boundary(token.end)
    }

    /// The border behind `closed`, the tokens of a window up to its cut.
    fn border(&self, start: usize, size: usize, closed: &[Placed], tokens: usize) -> Border {
        let earlier = &closed[..closed.len() - 1];
        let before = earlier.iter().rposition(|token| self.is_whole(token));
        let (begin, left) = before.map_or((start, 0), |index| (closed[index].end, index + 1));
        Border {
            start,
            size,
            tokens,
            begin,
            left: closed[left..].to_vec(),
        }
    }

    /// Whether the tokens beside a border are those of their text.
    fn fits(&self, border: &Border, open: &[Placed]) -> Result<bool, TokenizerError> {
        let Some(right) = open.iter().position(|token| self.is_whole(token)) else {
            return Ok(false);
        };
        let beside = self.window(border.begin, open[right].end - border.begin)?;
        Ok(beside.iter().eq(border.left.iter().chain(&open[..=right])))
    }
}

fn add(tokens: &mut Tokens<'_>, placed: &[Placed]) -> Result<(), TokenizerError> {
    let ids: Vec<_> = placed.iter().map(|token| token.id).collect();
    tokens.extend(&ids)
}
