//! [`Splitter`]: splits a normalized text into words one by one, as the tokenizer's pre-tokenizer does.
//!
//! A pre-tokenizer is a list of steps, each of which splits the parts from the step before, and may change them. Expressions
//! search the whole text, so that they see what they look at beside a word; no list of words is made. The library runs the steps
//! that look only at the two characters beside a border, on windows of the text.

use std::ops::Range;

use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior,
};

use super::expression::Expression;
use super::{Sizes, boundary_before};
use crate::text::detokenize::pieces::byte_letters;
use crate::text::tokenizer::TokenizerError;

/// GPT-2's expression for words, built into the library's `ByteLevel`.
///
/// # Source
/// `RE` in `pre_tokenizers/byte_level.rs` of the `tokenizers` crate, where it is private.
const GPT_2_WORDS: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The callback for each word.
type Each<'a> = &'a mut dyn FnMut(&str) -> Result<(), TokenizerError>;

/// A pre-tokenizer, step by step.
pub(super) struct Splitter {
    steps: Vec<Step>,
}

/// The letters that stand for bytes.
pub(super) struct ByteLetters(Box<[char; 256]>);

impl ByteLetters {
    fn new() -> Self {
        Self(Box::new(byte_letters()))
    }

    /// Returns a text with one letter for each byte.
    pub(super) fn of(&self, text: &str) -> String {
        let mut mapped = String::with_capacity(text.len() * 2);
        mapped.extend(text.bytes().map(|byte| self.0[usize::from(byte)]));
        mapped
    }
}

enum Step {
    /// Splits by an expression.
    Expression(Box<Expression>),
    /// Prepends a space.
    PrefixSpace,
    /// Maps each byte to a letter.
    Bytes(ByteLetters),
    Metaspace(Metaspace),
    /// Splits between two characters, whatever surrounds them.
    Pairs(PreTokenizerWrapper),
}

impl Step {
    fn is_bytes(&self) -> bool {
        matches!(self, Self::Bytes(_))
    }
}

#[derive(Clone, Copy)]
struct Metaspace {
    mark: char,
    scheme: PrependScheme,
    splits: bool,
}

impl Splitter {
    /// `None` for a pre-tokenizer with a step that may look at the whole text. `is_plain` says that the normalizer changes
    /// nothing. If the last step maps bytes to letters, it is left to the caller, who skips it for known words: the letters are
    /// returned too.
    pub(super) fn try_new(
        pre_tokenizer: Option<&PreTokenizerWrapper>,
        is_plain: bool,
    ) -> Option<(Self, Option<ByteLetters>)> {
        let mut steps = Vec::new();
        if let Some(pre_tokenizer) = pre_tokenizer {
            add_steps(pre_tokenizer, &mut steps)?;
        }
        let is_first_alone = |step: &Step| matches!(step, Step::Metaspace(space) if space.scheme == PrependScheme::First);
        if let Some(index) = steps.iter().position(is_first_alone) {
            // Where the library sees a text's beginning is known only if no earlier step changed the text.
            let keeps = |step: &Step| matches!(step, Step::Expression(_) | Step::Pairs(_));
            if !is_plain || !steps[..index].iter().all(keeps) {
                return None;
            }
        }
        let last = steps.pop_if(|step| step.is_bytes());
        Some((Self { steps }, last.map(|_| ByteLetters::new())))
    }

    /// Whether words consist of letters that stand for bytes.
    pub(super) fn maps_bytes(&self) -> bool {
        self.steps.iter().any(Step::is_bytes)
    }

    /// Calls `each` with every word of `text`. `is_first` says that this is the beginning of a whole text; `sizes` bounds the
    /// library's input.
    ///
    /// # Errors
    /// The first error of `each`, which stops the split; the library's errors; and [`TokenizerError::TooLong`] for a run of white
    /// space that an expression would have to look back over.
    pub(super) fn split(
        &self,
        text: &str,
        is_first: bool,
        sizes: Sizes,
        each: Each<'_>,
    ) -> Result<(), TokenizerError> {
        run(&self.steps, text, is_first, sizes, each)
    }
}

fn add_steps(pre_tokenizer: &PreTokenizerWrapper, steps: &mut Vec<Step>) -> Option<()> {
    match pre_tokenizer {
        PreTokenizerWrapper::Sequence(sequence) => {
            for part in sequence.as_ref() {
                add_steps(part, steps)?;
            }
        }
        PreTokenizerWrapper::ByteLevel(bytes) => {
            if bytes.add_prefix_space {
                steps.push(Step::PrefixSpace);
            }
            if bytes.use_regex {
                let pattern = SplitPattern::Regex(GPT_2_WORDS.to_owned());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
                steps.push(Step::Expression(Box::new(Expression::new(split.ok()?))));
            }
            steps.push(Step::Bytes(ByteLetters::new()));
        }
        PreTokenizerWrapper::Split(split) => {
            steps.push(Step::Expression(Box::new(Expression::new(split.clone()))));
        }
        PreTokenizerWrapper::Metaspace(space) => steps.push(Step::Metaspace(Metaspace {
            mark: space.get_replacement(),
            scheme: space.get_prepend_scheme(),
            splits: space.get_split(),
        })),
        PreTokenizerWrapper::BertPreTokenizer(_)
        | PreTokenizerWrapper::Delimiter(_)
        | PreTokenizerWrapper::Digits(_)
        | PreTokenizerWrapper::Punctuation(_)
        | PreTokenizerWrapper::Whitespace(_)
        | PreTokenizerWrapper::WhitespaceSplit(_) => {
            steps.push(Step::Pairs(pre_tokenizer.clone()));
        }
        // They count from the beginning, or have state.
        PreTokenizerWrapper::FixedLength(_) | PreTokenizerWrapper::UnicodeScripts(_) => {
            return None;
        }
    }
    Some(())
}

/// Applies the first step to `text`, and the other steps to its parts.
fn run(
    steps: &[Step],
    text: &str,
    is_first: bool,
    sizes: Sizes,
    each: Each<'_>,
) -> Result<(), TokenizerError> {
    if text.is_empty() {
        return Ok(());
    }
    let Some((step, steps)) = steps.split_first() else {
        return each(text);
    };
    let mut part = |part: &str, is_first| run(steps, part, is_first, sizes, each);
    match step {
        Step::Expression(expression) => expression.split(text, sizes.whole, |range| {
            part(&text[range.clone()], is_first && range.start == 0)
        }),
        Step::PrefixSpace if text.starts_with(' ') => part(text, is_first),
        Step::PrefixSpace => part(&format!(" {text}"), is_first),
        Step::Bytes(letters) => part(&letters.of(text), is_first),
        Step::Metaspace(space) => space.split(text, is_first, part),
        Step::Pairs(pre_tokenizer) => by_pairs(pre_tokenizer, text, sizes.window, |range| {
            part(&text[range.clone()], is_first && range.start == 0)
        }),
    }
}

impl Metaspace {
    fn split(
        self,
        text: &str,
        is_first: bool,
        mut each: impl FnMut(&str, bool) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        let begins_word = |c: char| c == ' ' || c == self.mark;
        let wants_mark = match self.scheme {
            PrependScheme::Always => true,
            PrependScheme::First => is_first,
            PrependScheme::Never => false,
        };
        let mut prefix = (wants_mark && !text.starts_with(begins_word)).then_some(self.mark);
        let mut word = String::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let later = &rest[first.len_utf8()..];
            let end = if self.splits {
                later.find(begins_word).unwrap_or(later.len())
            } else {
                later.len()
            };
            let (in_word, next) = rest.split_at(first.len_utf8() + end);
            word.clear();
            word.reserve(in_word.len());
            word.extend(prefix.take());
            let marked = |c| if c == ' ' { self.mark } else { c };
            word.extend(in_word.chars().map(marked));
            each(&word, is_first && rest.len() == text.len())?;
            rest = next;
        }
        Ok(())
    }
}

/// Calls `each` with the parts from a pre-tokenizer that looks only at the two characters beside a border.
fn by_pairs(
    pre_tokenizer: &PreTokenizerWrapper,
    text: &str,
    window: usize,
    mut each: impl FnMut(Range<usize>) -> Result<(), TokenizerError>,
) -> Result<(), TokenizerError> {
    let mut start = 0;
    while start < text.len() {
        let end = start + boundary_before(&text[start..], window);
        let parts = parts_of(pre_tokenizer, &text[start..end])?;
        let mut next = end;
        for part in parts {
            let mut part = start + part.start..start + part.end;
            if part.end == end && end < text.len() {
                // It may continue in the next window.
                if part.start > start {
                    next = part.start;
                    break;
                }
                part.end = end_of_part(pre_tokenizer, text, end, window)?;
                next = part.end;
            }
            each(part)?;
        }
        start = next;
    }
    Ok(())
}

/// Returns the end of the part that contains the character before `seen`.
fn end_of_part(
    pre_tokenizer: &PreTokenizerWrapper,
    text: &str,
    mut seen: usize,
    window: usize,
) -> Result<usize, TokenizerError> {
    while seen < text.len() {
        let last = text.floor_char_boundary(seen - 1);
        let next = boundary_before(&text[seen..], window);
        let parts = parts_of(pre_tokenizer, &text[last..seen + next])?;
        let end = parts.first().map_or(seen, |part| last + part.end);
        if end < seen + next {
            return Ok(end);
        }
        seen += next;
    }
    Ok(text.len())
}

/// Returns the parts into which the library splits a short text, if it does not change it.
fn parts_of(
    pre_tokenizer: &PreTokenizerWrapper,
    text: &str,
) -> Result<Vec<Range<usize>>, TokenizerError> {
    let mut parts = PreTokenizedString::from(text);
    pre_tokenizer
        .pre_tokenize(&mut parts)
        .map_err(|source| TokenizerError::Encode { source })?;
    let parts = parts.get_splits(OffsetReferential::Original, OffsetType::Byte);
    Ok(parts.iter().map(|(_, part, _)| part.0..part.1).collect())
}
