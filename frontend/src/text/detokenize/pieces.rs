//! The decoded form of every token of a vocabulary, computed once when the tokenizer is loaded.
//!
//! [`PieceTable`] stores the results of the per-token stages that `plan` found in the decoder.

use std::ops::Range;

use tokenizers::{Model, Tokenizer};

use super::plan::{Chain, Content, Plan};
use crate::text::tokenizer::TokenizerError;

/// The largest token id in the table; real vocabularies stay below 300,000. Without a limit, a file
/// that claims a huge id could allocate gigabytes.
const MAX_TOKEN_ID: u32 = (1 << 24) - 1;

/// A token's position: some decoders treat the first token differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::text) enum Position {
    /// The first of the decoded tokens.
    First,
    /// After at least one other.
    Later,
}

/// What a token contributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::text) enum Piece<'a> {
    /// Whole code points. In a byte-level vocabulary it is never empty, so that it always ends an
    /// unfinished code point.
    Text(&'a str),
    /// Bytes that may begin or end inside a code point.
    Bytes(&'a [u8]),
    /// One byte of a byte-fallback run.
    FallbackByte(&'a u8),
}

impl<'a> Piece<'a> {
    pub(in crate::text) fn as_bytes(&self) -> &'a [u8] {
        match *self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
            Self::FallbackByte(byte) => std::slice::from_ref(byte),
        }
    }
}

/// Token id to [`Piece`].
pub(in crate::text) struct PieceTable {
    plan: Plan,
    /// Indexed by token id.
    later: Box<[Entry]>,
    /// The same for the first token of a text, if that makes a difference.
    first: Option<Box<[Entry]>>,
    /// Indexed by token id.
    is_special: Box<[bool]>,
    arena: Arena,
}

/// A [`Piece`] whose text or bytes are in the [`Arena`].
#[derive(Debug, Clone, Copy)]
enum Entry {
    /// The vocabulary has no such id.
    Unknown,
    Text {
        start: u32,
        end: u32,
    },
    Bytes {
        start: u32,
        end: u32,
    },
    FallbackByte(u8),
}

#[derive(Default)]
struct Arena {
    text: String,
    bytes: Vec<u8>,
}

impl PieceTable {
    pub(in crate::text) fn try_new(tokenizer: &Tokenizer) -> Result<Self, TokenizerError> {
        let chain = Chain::try_new(tokenizer.get_decoder())?;
        let tokens = vocabulary(tokenizer)?;
        let added = tokenizer.get_added_vocabulary();
        let is_special = tokens
            .iter()
            .map(|token| {
                token
                    .as_ref()
                    .is_some_and(|token| added.is_special_token(token))
            })
            .collect();

        let mut arena = Arena::default();
        let later = chain.later(&tokens)?;
        let later = arena.entries(&tokens, later, &chain.plan)?;
        let first = match chain.first(&tokens)? {
            Some(first) => Some(arena.entries(&tokens, first, &chain.plan)?),
            None => None,
        };
        Ok(Self {
            plan: chain.plan,
            later,
            first,
            is_special,
            arena,
        })
    }

    pub(in crate::text) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns what token `id` contributes at `position`; `None` if the vocabulary does not know it.
    #[inline]
    pub(in crate::text) fn get(&self, id: u32, position: Position) -> Option<Piece<'_>> {
        let entries = match (&self.first, position) {
            (Some(first), Position::First) => first,
            (None, Position::First) | (_, Position::Later) => &self.later,
        };
        match entries.get(index(id))? {
            Entry::Unknown => None,
            Entry::Text { start, end } => {
                Some(Piece::Text(&self.arena.text[index(*start)..index(*end)]))
            }
            Entry::Bytes { start, end } => {
                Some(Piece::Bytes(&self.arena.bytes[index(*start)..index(*end)]))
            }
            Entry::FallbackByte(byte) => Some(Piece::FallbackByte(byte)),
        }
    }

    #[inline]
    pub(in crate::text) fn is_special(&self, id: u32) -> bool {
        self.is_special.get(index(id)).copied().unwrap_or(false)
    }

    /// Whether `id` has any effect on decoding.
    #[inline]
    pub(in crate::text) fn is_visible(&self, id: u32, skip_special: bool) -> bool {
        let is_known = self
            .later
            .get(index(id))
            .is_some_and(|entry| !matches!(entry, Entry::Unknown));
        is_known && !(skip_special && self.is_special(id))
    }
}

const fn index(id: u32) -> usize {
    id as usize
}

/// Returns all tokens by id, in the form that decoding starts from.
fn vocabulary(tokenizer: &Tokenizer) -> Result<Vec<Option<String>>, TokenizerError> {
    let largest = tokenizer.get_vocab(true).into_values().max();
    if largest.is_some_and(|id| id > MAX_TOKEN_ID) {
        return Err(TokenizerError::VocabularyTooLarge {
            what: format!("a token id is above {MAX_TOKEN_ID}"),
        });
    }
    let added = tokenizer.get_added_vocabulary();
    let token = |id| {
        // `Tokenizer::decode` looks up in this order; `Tokenizer::id_to_token` may return another
        // token.
        let added = added.simple_id_to_token(id);
        added.or_else(|| tokenizer.get_model().id_to_token(id))
    };
    Ok(match largest {
        Some(largest) => (0..=largest).map(token).collect(),
        None => Vec::new(),
    })
}

impl Arena {
    /// Stores `pieces`, the results of the per-token stages for `tokens`.
    fn entries(
        &mut self,
        tokens: &[Option<String>],
        pieces: Vec<String>,
        plan: &Plan,
    ) -> Result<Box<[Entry]>, TokenizerError> {
        let content = match plan {
            Plan::Incremental { content, .. } => *content,
            Plan::AtEnd => Content::Text,
        };
        let alphabet = Alphabet::new();
        let entry = |(token, piece): (&Option<String>, String)| match (token, content) {
            (None, _) => Ok(Entry::Unknown),
            (Some(_), Content::Text) => self.text(&piece),
            (Some(_), Content::TextAndFallbackBytes) => match fallback_byte(&piece) {
                Some(byte) => Ok(Entry::FallbackByte(byte)),
                None => self.text(&piece),
            },
            (Some(_), Content::ByteLevel) => self.bytes(alphabet.bytes(&piece)),
        };
        tokens.iter().zip(pieces).map(entry).collect()
    }

    fn text(&mut self, piece: &str) -> Result<Entry, TokenizerError> {
        let start = self.text.len();
        self.text.push_str(piece);
        let Range { start, end } = span(start..self.text.len())?;
        Ok(Entry::Text { start, end })
    }

    fn bytes(&mut self, piece: Vec<u8>) -> Result<Entry, TokenizerError> {
        match str::from_utf8(&piece) {
            Ok(text) if !text.is_empty() => self.text(text),
            Ok(_) | Err(_) => {
                let start = self.bytes.len();
                self.bytes.extend(piece);
                let Range { start, end } = span(start..self.bytes.len())?;
                Ok(Entry::Bytes { start, end })
            }
        }
    }
}

fn span(range: Range<usize>) -> Result<Range<u32>, TokenizerError> {
    match (u32::try_from(range.start), u32::try_from(range.end)) {
        (Ok(start), Ok(end)) => Ok(start..end),
        (Err(_), _) | (_, Err(_)) => Err(TokenizerError::VocabularyTooLarge {
            what: "its texts exceed 4 GiB".to_owned(),
        }),
    }
}

/// Returns the byte that a token like `<0xE2>` stands for.
fn fallback_byte(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// The byte for each character of the byte-level alphabet, by code point: most visible Latin-1
/// characters stand for themselves, those from U+0100 on for the remaining bytes in order.
///
/// # Source
///
/// `bytes_to_unicode` in GPT-2's `encoder.py`.
struct Alphabet([Option<u8>; 0x144]);

impl Alphabet {
    fn new() -> Self {
        let mut byte_of = [None; 0x144];
        let mut next_stand_in = 0x100;
        for byte in 0..=u8::MAX {
            let is_visible = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let code_point = if is_visible {
                usize::from(byte)
            } else {
                next_stand_in += 1;
                next_stand_in - 1
            };
            byte_of[code_point] = Some(byte);
        }
        Self(byte_of)
    }

    fn byte(&self, c: char) -> Option<u8> {
        self.0.get(index(c.into())).copied().flatten()
    }

    /// Returns the bytes that `piece` stands for; its own UTF-8 if any of its characters is not in the
    /// alphabet, as in most added tokens.
    fn bytes(&self, piece: &str) -> Vec<u8> {
        let bytes: Option<Vec<u8>> = piece.chars().map(|c| self.byte(c)).collect();
        bytes.unwrap_or_else(|| piece.as_bytes().to_vec())
    }
}

/// Returns the character of the byte-level alphabet for each byte.
pub(in crate::text) fn byte_letters() -> [char; 256] {
    let mut letters = ['\0'; 256];
    for (letter, byte) in ('\0'..).zip(Alphabet::new().0) {
        if let Some(byte) = byte {
            letters[usize::from(byte)] = letter;
        }
    }
    letters
}

#[cfg(test)]
mod tests {
    use tokenizers::Decoder;

    use super::*;

    #[test]
    fn the_alphabet_is_the_one_of_the_byte_level_decoder() {
        let decoder = tokenizers::decoders::byte_level::ByteLevel::default();
        let alphabet = Alphabet::new();
        let in_alphabet = ('\0'..='\u{200}').filter_map(|c| Some((c, alphabet.byte(c)?)));
        let mut seen = Vec::new();
        for (c, byte) in in_alphabet {
            let decoded = decoder.decode(vec![c.to_string()]).unwrap();
            assert_eq!(decoded, String::from_utf8_lossy(&[byte]));
            seen.push(byte);
        }
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..=u8::MAX));
    }

    #[test]
    fn only_two_hexadecimal_digits_make_a_fallback_byte() {
        assert_eq!(fallback_byte("<0xE2>"), Some(0xe2));
        assert_eq!(fallback_byte("<0xe2>"), Some(0xe2));
        for text in [
            "<0x>", "<0xE>", "<0xE2", "<0xE22>", "<0xGG>", "<0xé>", "0xE2", "",
        ] {
            assert_eq!(fallback_byte(text), None, "{text}");
        }
    }
}
