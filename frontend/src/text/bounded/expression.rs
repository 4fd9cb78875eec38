//! [`Expression`]: splits a text by a pre-tokenizer's expression.
//!
//! The library searches with an engine that supports look-around, and so goes back and forth over every word. Nearly all models'
//! expressions look around only at their end: `|\s+(?!\S)|\s+` leaves the last space of a run to the next word. This module
//! handles that end itself, and finds the rest with an engine that reads each byte once.

use std::ops::Range;

use regex_automata::meta::{Cache, Regex};
use regex_automata::util::pool::Pool;
use regex_automata::util::syntax;
use regex_automata::{Anchored, Input};
use tokenizers::SplitDelimiterBehavior;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

use crate::text::tokenizer::TokenizerError;

/// The alternatives at the end of many expressions: white space, without its last character if a word follows.
const SPACE_BEFORE_WORD: &str = r"|\s+(?!\S)|\s+";

/// An expression, and how its matches split a text.
pub(super) struct Expression {
    split: Split,
    one_pass: Option<OnePass>,
}

impl Expression {
    /// An expression that splits as the library's does.
    pub(super) fn new(split: Split) -> Self {
        let one_pass = match &split.pattern {
            SplitPattern::Regex(pattern) => OnePass::try_new(pattern),
            SplitPattern::String(_) => None,
        };
        Self { split, one_pass }
    }

    /// Calls `each` with the parts of a text; some may be empty.
    ///
    /// # Errors
    /// The first error of `each`, which stops the split, and [`TokenizerError::TooLong`] for a run of more than `max_space` bytes
    /// of white space, if the library would have to look back over it.
    pub(super) fn split(
        &self,
        text: &str,
        max_space: usize,
        mut each: impl FnMut(Range<usize>) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        let mut parts = Parts::new(self.split.behavior);
        let mut end = 0;
        let mut add = |range: Range<usize>, is_match: bool| {
            let part = parts.add(range, is_match != self.split.invert);
            part.map_or(Ok(()), &mut each)
        };
        let mut found = |found: Range<usize>| {
            if end != found.start {
                add(end..found.start, false)?;
            }
            end = found.end;
            add(found, true)
        };
        if let Some(one_pass) = &self.one_pass {
            one_pass.find(text, found)?;
        } else {
            check_space(text, max_space)?;
            for (start, end) in self.split.regex.find_iter(text) {
                found(start..end)?;
            }
        }
        if end != text.len() {
            add(end..text.len(), false)?;
        }
        parts.open.map_or(Ok(()), each)
    }
}

/// Expressions look back from the end of white space; the library keeps 24 bytes a character for that.
fn check_space(text: &str, max_bytes: usize) -> Result<(), TokenizerError> {
    let runs = text.split(|c: char| !c.is_whitespace());
    match runs.map(str::len).find(|bytes| *bytes > max_bytes) {
        Some(bytes) => Err(TokenizerError::TooLong { bytes, max_bytes }),
        None => Ok(()),
    }
}

/// Returns the pattern with empty character sets, `[]`.
fn without_sets(pattern: &str) -> String {
    let mut depth = 0_usize;
    let mut outside = String::with_capacity(pattern.len());
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        let escaped = if c == '\\' { chars.next() } else { None };
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ if depth > 0 => continue,
            _ => {}
        }
        outside.push(c);
        outside.extend(escaped);
    }
    outside
}

/// Whether the brace at the end of this pattern closes a class such as `\p{L}`, not a repetition.
fn is_class(pattern: &str) -> bool {
    let open = pattern.rfind('{').map_or("", |open| &pattern[..open]);
    open.ends_with(r"\p") || open.ends_with(r"\P")
}

/// An expression that ends with [`SPACE_BEFORE_WORD`] and looks around nowhere else.
struct OnePass {
    /// The first pattern is the part before that suffix, the second is white space.
    regex: Regex,
    /// The search caches; a text takes one for all its words.
    caches: Caches,
}

/// Caches of one expression, as many as there were concurrent searches.
type Caches = Pool<Cache, Box<dyn Fn() -> Cache + Send + Sync>>;

impl OnePass {
    fn try_new(pattern: &str) -> Option<Self> {
        let words = pattern.strip_suffix(SPACE_BEFORE_WORD)?;
        // The library's engine reads a `+` after a repetition as possessive; this engine reads it as another repetition. Flags
        // set for the rest of the expression would apply to the first pattern only.
        let outside = without_sets(words);
        let is_other = ["++", "*+", "?+"].iter().any(|end| outside.contains(end))
            || outside
                .match_indices("}+")
                .any(|(end, _)| !is_class(&outside[..end]));
        let mut groups = outside.split("(?").skip(1);
        let sets_flags = groups.any(|group| !(group.starts_with(':') || group.starts_with("i:")));
        // The library handles empty matches in its own way.
        let shortest = syntax::parse(words).ok()?.properties().minimum_len()?;
        if is_other || sets_flags || shortest == 0 {
            return None;
        }
        let regex = Regex::new_many(&[words, r"\s+"]).ok()?;
        let of = regex.clone();
        let caches = Pool::new(Box::new(move || of.create_cache()) as Box<_>);
        Some(Self { regex, caches })
    }

    /// Calls `found` for every match.
    fn find(
        &self,
        text: &str,
        mut found: impl FnMut(Range<usize>) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        let mut cache = self.caches.get();
        let mut input = Input::new(text);
        loop {
            // A match nearly always begins where the last one ended. An anchored search there knows its beginning, and need not
            // search for it back from its end.
            let here = input.clone().anchored(Anchored::Yes);
            let matched = self
                .regex
                .search_with(&mut cache, &here)
                .or_else(|| self.regex.search_with(&mut cache, &input));
            let Some(matched) = matched else {
                return Ok(());
            };
            let mut range = matched.range();
            if matched.pattern().as_usize() == 1 && range.end < text.len() {
                let last = text[range.clone()].char_indices().next_back();
                match last {
                    Some((index, _)) if index > 0 => range.end = range.start + index,
                    Some(_) | None => {}
                }
            }
            input.set_start(range.end);
            found(range)?;
        }
    }
}

/// Turns matches and the text between them into parts, as a delimiter's behavior requires.
struct Parts {
    behavior: SplitDelimiterBehavior,
    /// The part that may still grow.
    open: Option<Range<usize>>,
    after_match: bool,
}

impl Parts {
    fn new(behavior: SplitDelimiterBehavior) -> Self {
        Self {
            behavior,
            open: None,
            after_match: false,
        }
    }

    /// Takes the next range. Returns the part that it completes, if any.
    fn add(&mut self, range: Range<usize>, is_match: bool) -> Option<Range<usize>> {
        let after_match = std::mem::replace(&mut self.after_match, is_match);
        let joins = match self.behavior {
            SplitDelimiterBehavior::Isolated => return Some(range),
            SplitDelimiterBehavior::Removed => return (!is_match).then_some(range),
            SplitDelimiterBehavior::Contiguous => is_match == after_match,
            SplitDelimiterBehavior::MergedWithPrevious => is_match && !after_match,
            SplitDelimiterBehavior::MergedWithNext => after_match && !is_match,
        };
        match &mut self.open {
            Some(open) if joins => {
                open.end = range.end;
                None
            }
            open => open.replace(range),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;
    use crate::text::detokenize::fixtures::PIECES;

    const GPT_2: &str =
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
    const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const DEEPSEEK_3: &str = r"[!#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    fn expression(pattern: &str) -> Expression {
        let pattern = SplitPattern::Regex(pattern.to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
        Expression::new(split.unwrap())
    }

    #[test]
    fn expressions_that_look_around_at_their_end_alone_are_read_once() {
        for pattern in [GPT_2, LLAMA_3, DEEPSEEK_3] {
            assert!(expression(pattern).one_pass.is_some(), "{pattern}");
        }
        for pattern in [
            r"\p{L}+|\s+",
            r"\p{L}*|\s+(?!\S)|\s+",
            r"\b|\s+(?!\S)|\s+",
            r"\p{L}++|\s+(?!\S)|\s+",
            r"\p{L}{1,3}+|\s+(?!\S)|\s+",
            r"\p{L}+(?=x)|\s+(?!\S)|\s+",
            r"(?U)\p{L}+|\s+(?!\S)|\s+",
            r"(\p{L})\1|\s+(?!\S)|\s+",
        ] {
            assert!(expression(pattern).one_pass.is_none(), "{pattern}");
        }
    }

    static EXPRESSIONS: LazyLock<[Expression; 3]> =
        LazyLock::new(|| [GPT_2, LLAMA_3, DEEPSEEK_3].map(expression));

    proptest! {
        #[test]
        fn matches_are_those_of_the_library(
            index in 0..EXPRESSIONS.len(),
            parts in prop::collection::vec(
                prop_oneof![
                    prop::sample::select(PIECES.to_vec()).prop_map(str::to_owned),
                    r"[\sa'sS\u{17f}0-9.\r\n\u{85}\u{a0}]{0,6}",
                    any::<String>(),
                ],
                0..8,
            ),
        ) {
            let text = parts.concat();
            let expression = &EXPRESSIONS[index];
            let mut found = Vec::new();
            let one_pass = expression.one_pass.as_ref().unwrap();
            one_pass.find(&text, |range| { found.push((range.start, range.end)); Ok(()) }).unwrap();
            let expected: Vec<_> = expression.split.regex.find_iter(&text).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
