//! [`WordEncoder`]: encodes one word of any length.
//!
//! The tokens of most short words are [known](super::known) from other texts.
//!
//! A word is what the pre-tokenizer does not split: for some models a whole text, for others a run of a million letters. If the
//! model merges pairs, a long word is encoded in windows. Why the windows together have the tokens of the whole word:
//!
//! - Merging is local: until a merge crosses a border, both sides evolve as each would alone.
//! - So tokens of a text are *the* tokens of the text if and only if every two neighbours are the tokens of their joint text.
//!   (Proof: if the result differs, consider the first merge that crosses a border of theirs. The two tokens beside it would
//!   have been merged in the same way when encoded alone.)
//! - Within a window the library guarantees this. So a border is right if the library encodes the joint text of the two tokens
//!   beside it as these two tokens. If it does not, the window before is encoded again at twice the size.

use std::sync::OnceLock;

use tokenizers::Model;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;

use super::known::{KnownWords, MAX_WORD_BYTES};
use super::splitter::ByteLetters;
use super::{Tokens, boundary_before};
use crate::text::longest::{has_token_for_all, is_alike_everywhere};
use crate::text::tokenizer::TokenizerError;

/// Encodes a model's words.
pub(super) struct WordEncoder {
    kind: Kind,
    /// The letters to which a word's bytes are mapped before the model sees them.
    letters: Option<ByteLetters>,
    known: Option<KnownWords>,
}

enum Kind {
    /// In windows, by merges alone. The copy, if any, never looks up a whole window as a token.
    Merges { without_look_up: OnceLock<Box<BPE>> },
    /// A long word is looked up whole; it is unknown.
    LookedUp,
    /// In one piece, up to a limit.
    Whole,
}

/// A token, and where it ends in the word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Placed {
    id: u32,
    end: usize,
}

impl WordEncoder {
    /// An encoder of words that are mapped to `letters` before the model sees them. `is_byte_level` says that a word's letters
    /// stand for bytes.
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

    /// Caches the tokens of words in up to `max_bytes`, if a word always has the same tokens.
    pub(super) fn remember(&mut self, model: &ModelWrapper, max_bytes: usize) {
        self.known = (max_bytes > 0 && !is_random(model)).then(|| KnownWords::new(max_bytes));
    }

    /// Adds the tokens of `word`. `model` is the model that this encoder was made for.
    ///
    /// # Errors
    /// The errors of [`BoundedEncoder::encode`](super::BoundedEncoder::encode).
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

/// Whether the model's result for a part of a word depends on nothing beside it, until a merge crosses the border.
fn merges_locally(bpe: &BPE, is_byte_level: bool) -> bool {
    // Beside characters that have bytes, the library misplaces unknown ones.
    let has_unknown = bpe.unk_token.is_some() && !bpe.byte_fallback;
    let is_known = has_unknown || has_token_for_all(bpe, is_byte_level);
    !drops_merges(bpe) && is_known && is_alike_everywhere(bpe)
}

/// Whether the same word may get different tokens each time: a setting for training.
pub(in crate::text) fn is_random(model: &ModelWrapper) -> bool {
    // Unigram models have such a setting too, but a file cannot enable it.
    matches!(model, ModelWrapper::BPE(bpe) if drops_merges(bpe))
}

fn drops_merges(bpe: &BPE) -> bool {
    bpe.dropout.is_some_and(|share| share > 0.0)
}

struct LongWord<'a> {
    bpe: &'a BPE,
    word: &'a str,
}

/// A border between two windows, with what is needed to return to the window before it.
struct Border {
    /// The window to its left.
    start: usize,
    size: usize,
    /// The number of tokens before that window's.
    tokens: usize,
    /// The start of the tokens beside the border, and those to its left.
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

    /// Returns the tokens of about `size` bytes of the word from `start` on.
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

    /// Returns the last token in a window after which the word may be cut. Skips the last quarter, whose tokens may change with
    /// more text.
    fn cut(&self, start: usize, size: usize, open: &[Placed]) -> Option<usize> {
        let is_far = |token: &Placed| token.end <= start + size / 4 * 3 && self.is_whole(token);
        open.iter().rposition(is_far)
    }

    /// Whether a token ends at a character boundary; tokens of single bytes may not.
    fn is_whole(&self, token: &Placed) -> bool {
        self.word.is_char_boundary(token.end)
    }

    /// Returns the border after `closed`, the tokens of a window up to its cut.
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

    /// Whether the tokens beside a border are the tokens of their joint text.
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
