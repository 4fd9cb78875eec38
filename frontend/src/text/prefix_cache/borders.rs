//! [`Borders`]: where a text may be cut so that its parts together have the tokens of the whole.
//!
//! The tokenizer first searches for added tokens, from left to right and before it normalizes anything. It normalizes, splits and
//! encodes the text on each side separately. So a border is an added token that is found in the original text: the rest does not
//! depend on what is left of it. There are three exceptions, and they look no further than the border itself:
//!
//! - an added token may include the spaces beside it, or match only if no letter is beside it;
//! - some pre-tokenizers treat the beginning of the whole text differently from that of a later part;
//! - the border belongs to one side only, but may include spaces of both.
//!
//! Therefore a window *begins with the border that ended the previous one*, and that token is then left out. The text `a<x>b<x>c`
//! has the windows `a<x>`, `<x>b<x>` and `<x>c`.
//!
//! Added tokens that are searched for in normalized text (`"normalized": true`) are not borders. Nor are those that must be whole
//! words, because they depend on both sides.

use std::iter;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::Tokenizer;

/// The added tokens that the tokenizer searches for first, and which of them are borders.
pub(super) struct Borders {
    /// Finds what the tokenizer finds: the leftmost match; of several there, the longest.
    matcher: AhoCorasick,
    /// Indexed by the matcher's pattern number.
    tokens: Vec<Token>,
    min_window_bytes: usize,
}

#[derive(Debug, Clone, Copy)]
struct Token {
    id: u32,
    is_border: bool,
}

impl Borders {
    /// Returns the borders of a tokenizer's texts; `None` if it has none, or if its post-processor changes texts that it should
    /// not. Windows add at least `min_window_bytes`, so that a run of borders does not become many windows.
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

    /// Returns the windows of a text, in order; at least one. A window does not depend on the text after it, unless more text
    /// makes its border a longer token.
    pub(super) fn windows<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Window<'a>> {
        let mut matches = self.matcher.find_iter(text);
        // The start of the next window, and the end of the previous one.
        let (mut begin, mut seen) = (0, 0);
        let mut leading = None;
        let mut is_done = false;
        iter::from_fn(move || {
            for found in matches.by_ref() {
                let token = self.tokens[found.pattern().as_usize()];
                if !token.is_border || found.end() - seen < self.min_window_bytes {
                    continue;
                }
                let window = Window {
                    text: &text[begin..found.end()],
                    leading,
                    trailing: Some(token.id),
                };
                (begin, seen) = (found.start(), found.end());
                leading = Some(token.id);
                return Some(window);
            }
            let has_rest = seen < text.len() || leading.is_none();
            (has_rest && !std::mem::replace(&mut is_done, true)).then(|| Window {
                text: &text[begin..],
                leading,
                trailing: None,
            })
        })
    }
}

/// A part of a text that can be encoded by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window<'a> {
    text: &'a str,
    /// The border that it begins with, which the previous window has already contributed.
    leading: Option<u32>,
    /// The border that it ends with.
    trailing: Option<u32>,
}

impl<'a> Window<'a> {
    /// Returns the text to encode.
    pub(super) fn text(&self) -> &'a str {
        self.text
    }

    /// Whether it ends with a border, not with the text.
    pub(super) fn ends_with_border(&self) -> bool {
        self.trailing.is_some()
    }

    /// Returns what it adds to the tokens of earlier windows, given its own `ids`; `None` if these do not match its borders.
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
