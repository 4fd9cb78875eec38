//! [`Borders`]: where a text may be cut so that its parts have the tokens of the whole.
//!
//! The tokenizer looks for added tokens first, from left to right and before it normalizes anything. What is left and right
//! of one it normalizes, splits and encodes apart. So a border is an added token that is found in the text as it stands:
//! the rest does not see what is left of it, with three exceptions, and those look no further than the border itself:
//!
//! - an added token may take the spaces beside it, or only match beside no letter;
//! - some pre-tokenizers treat the beginning of the whole text otherwise than that of a later part;
//! - the border belongs to one side only, but may take spaces of both.
//!
//! Therefore a window *begins with the border that ended the one before*, and that one token is then left out. A text
//! `a<x>b<x>c` has the windows `a<x>`, `<x>b<x>` and `<x>c`.
//!
//! Added tokens that are looked for in normalized text (`"normalized": true`) are no borders; neither are those that must be
//! words by themselves, as they depend on both sides.

use aho_corasick::{AhoCorasick, FindIter, MatchKind};
use tokenizers::Tokenizer;

/// The added tokens that the tokenizer looks for first, and which of them are borders.
pub(super) struct Borders {
    /// Finds what the tokenizer finds: the leftmost, and of those that begin there the longest.
    matcher: AhoCorasick,
    /// By the number of the matcher's pattern.
    tokens: Vec<Token>,
    min_window_bytes: usize,
}

#[derive(Debug, Clone, Copy)]
struct Token {
    id: u32,
    is_border: bool,
}

impl Borders {
    /// The borders of a tokenizer's texts; `None` when it has none, or its post-processor changes texts that it should leave.
    /// Windows add at least `min_window_bytes`, so that a run of borders is not many windows.
    pub(super) fn try_new(tokenizer: &Tokenizer, min_window_bytes: usize) -> Option<Self> {
        let added = tokenizer.get_added_tokens_decoder();
        let (contents, tokens): (Vec<_>, Vec<_>) = added
            .iter()
            .filter(|(_, token)| !token.normalized)
            .map(|(&id, token)| {
                let is_border = !token.single_word;
                (token.content.as_str(), Token { id, is_border })
            })
            .unzip();
        let first = tokens.iter().position(|token| token.is_border)?;
        let alone = tokenizer.encode_fast(contents[first], false).ok()?;
        if alone.get_ids() != [tokens[first].id] {
            return None;
        }
        let mut builder = AhoCorasick::builder();
        builder.match_kind(MatchKind::LeftmostLongest);
        Some(Self {
            matcher: builder.build(contents).ok()?,
            tokens,
            min_window_bytes,
        })
    }

    /// The windows of a text, in order; at least one. Where they lie depends on nothing that comes after them, but for a
    /// border that more text makes a longer one.
    pub(super) fn windows<'a>(&'a self, text: &'a str) -> Windows<'a> {
        Windows {
            borders: self,
            matches: self.matcher.find_iter(text),
            text,
            begin: 0,
            seen: 0,
            leading: None,
            is_done: false,
        }
    }
}

/// A part of a text that can be encoded by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window<'a> {
    text: &'a str,
    /// The border that it begins with, which the window before has given already.
    leading: Option<u32>,
    /// The border that it ends with.
    trailing: Option<u32>,
}

impl<'a> Window<'a> {
    /// What to encode.
    pub(super) fn text(&self) -> &'a str {
        self.text
    }

    /// Whether it ends with a border, not with the text.
    pub(super) fn ends_with_border(&self) -> bool {
        self.trailing.is_some()
    }

    /// What it adds to the tokens of the windows before, when `ids` are its own; `None` if those are not as they must be.
    pub(super) fn added<'i>(&self, ids: &'i [u32]) -> Option<&'i [u32]> {
        let added = match self.leading {
            None => ids,
            Some(leading) => ids.split_first().filter(|(id, _)| **id == leading)?.1,
        };
        match self.trailing {
            Some(trailing) if added.last() != Some(&trailing) => None,
            Some(_) | None => Some(added),
        }
    }
}

/// The windows of a text.
pub(super) struct Windows<'a> {
    borders: &'a Borders,
    matches: FindIter<'a, 'a>,
    text: &'a str,
    /// Where the next window begins.
    begin: usize,
    /// The end of the one before.
    seen: usize,
    leading: Option<u32>,
    is_done: bool,
}

impl<'a> Iterator for Windows<'a> {
    type Item = Window<'a>;

    fn next(&mut self) -> Option<Window<'a>> {
        for found in self.matches.by_ref() {
            let token = self.borders.tokens[found.pattern().as_usize()];
            if !token.is_border || found.end() - self.seen < self.borders.min_window_bytes {
                continue;
            }
            let window = Window {
                text: &self.text[self.begin..found.end()],
                leading: self.leading,
                trailing: Some(token.id),
            };
            (self.begin, self.seen) = (found.start(), found.end());
            self.leading = Some(token.id);
            return Some(window);
        }
        let has_rest = self.seen < self.text.len() || self.leading.is_none();
        (has_rest && !std::mem::replace(&mut self.is_done, true)).then(|| Window {
            text: &self.text[self.begin..],
            leading: self.leading,
            trailing: None,
        })
    }
}
