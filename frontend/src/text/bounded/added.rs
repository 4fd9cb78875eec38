//! [`AddedTokens`]: finds the added tokens in a text, and the parts between them, from left to right without a copy.
//!
//! The library searches for added tokens twice: for some in the original text, for others in the normalized text. It takes the
//! leftmost match; of several there, the longest. A token may include the white space beside it.

use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::Tokenizer;

/// The added tokens of one of the two kinds.
pub(super) struct AddedTokens {
    /// `None` if there are no such tokens.
    matcher: Option<AhoCorasick>,
    /// Indexed by the matcher's pattern number.
    tokens: Vec<Token>,
}

struct Token {
    id: u32,
    takes_left: bool,
    takes_right: bool,
}

/// A part of a text.
pub(super) enum Part {
    Token(u32),
    /// Text without added tokens; never empty.
    Text(Range<usize>),
}

impl AddedTokens {
    /// The tokens that are searched for in normalized text, or the others. `None` if a match depends on more than the token's own
    /// text: it must be a whole word, or may share spaces with another token.
    pub(super) fn try_new(tokenizer: &Tokenizer, normalized: bool) -> Option<Self> {
        let added = tokenizer.get_added_tokens_decoder();
        let added = added
            .iter()
            .filter(|(_, token)| token.normalized == normalized);
        let (mut texts, mut tokens) = (Vec::new(), Vec::new());
        for (&id, token) in added {
            // For a token that is searched for in normalized text, this is its normalized text.
            texts.push(tokenizer.id_to_token(id)?);
            tokens.push(Token {
                id,
                takes_left: token.lstrip,
                takes_right: token.rstrip,
            });
            if token.single_word {
                return None;
            }
        }
        let takes_right = tokens.iter().any(|token| token.takes_right);
        let is_bad = |text: &String| {
            text.is_empty() || (takes_right && text.starts_with(char::is_whitespace))
        };
        if texts.iter().any(is_bad) {
            return None;
        }
        let mut builder = AhoCorasick::builder();
        builder.match_kind(MatchKind::LeftmostLongest);
        let matcher = (!texts.is_empty()).then(|| builder.build(texts));
        Some(Self {
            matcher: matcher.transpose().ok()?,
            tokens,
        })
    }

    /// Calls `each` with the parts of `text`, in order.
    ///
    /// # Errors
    /// The first error of `each`, which stops the search.
    pub(super) fn for_each_part<E>(
        &self,
        text: &str,
        mut each: impl FnMut(Part) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut begin = 0;
        for found in self.matcher.iter().flat_map(|all| all.find_iter(text)) {
            let token = &self.tokens[found.pattern().as_usize()];
            let (mut start, mut end) = (found.start(), found.end());
            if token.takes_left {
                start = begin + text[begin..start].trim_end().len();
            }
            if token.takes_right {
                end = text.len() - text[end..].trim_start().len();
            }
            if begin < start {
                each(Part::Text(begin..start))?;
            }
            each(Part::Token(token.id))?;
            begin = end;
        }
        if begin < text.len() {
            each(Part::Text(begin..text.len()))?;
        }
        Ok(())
    }
}
