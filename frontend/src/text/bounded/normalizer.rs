//! [`ChunkNormalizer`]: the normalized text of a long one, made chunk by chunk.
//!
//! A chunk ends between two characters over which the normalizer does not look. [`Rule`] says which those are: some
//! normalizers treat each character by itself, Unicode's forms compose a letter with the marks behind it, and others look at
//! runs of spaces. What is done at a text's ends is done to the first and the last chunk alone.

use std::borrow::Cow;

use tokenizers::normalizers::{NormalizerWrapper, Sequence, Strip};
use tokenizers::{NormalizedString, Normalizer};

use super::{Sizes, boundary_before};
use crate::text::growth;
use crate::text::tokenizer::{EncodeLimits, TokenizerError};

/// A normalizer that works on a chunk at a time.
pub(super) struct ChunkNormalizer {
    /// For a chunk that is the first (1) and the last (2) of its text, or neither; `None` where it does nothing.
    variants: [Option<NormalizerWrapper>; 4],
    rule: Rule,
    /// Whether a text of ASCII stays as it is.
    keeps_ascii: bool,
    /// How many times as long it makes a text at most.
    growth: usize,
}

/// What must hold of the characters on both sides of a cut.
#[derive(Debug, Default)]
struct Rule {
    /// The one on the right combines with nothing on its left.
    right_begins_anew: bool,
    /// Neither combines with anything.
    both_begin_anew: bool,
    /// Neither is white space.
    no_space: bool,
    /// They do not follow each other in one of these.
    literals: Vec<Vec<char>>,
}

impl ChunkNormalizer {
    /// `None` for a normalizer that may look at all of a text.
    pub(super) fn try_new(normalizer: Option<&NormalizerWrapper>) -> Option<Self> {
        let mut rule = Rule::default();
        let parts = normalizer.map_or_else(Vec::new, flat);
        let keeps_ascii = parts.iter().all(|part| composes(part));
        let prepends = |part: &NormalizerWrapper| matches!(part, NormalizerWrapper::Prepend(_));
        if parts.iter().any(|part| removes(part)) && parts.iter().any(|part| prepends(part)) {
            // What is put before a text depends on whether anything is left of it.
            return None;
        }
        for (index, part) in parts.into_iter().enumerate() {
            rule.add(part, index == 0)?;
        }
        let variant =
            |index| normalizer.and_then(|part| variant(part, index & 1 > 0, index & 2 > 0));
        Some(Self {
            variants: [0, 1, 2, 3].map(variant),
            rule,
            keeps_ascii,
            growth: growth::of_normalizer(normalizer),
        })
    }

    /// Whether the text stays as it is.
    pub(super) fn is_none(&self) -> bool {
        self.variants.iter().all(Option::is_none)
    }

    /// Whether every character becomes letters that stand for its bytes.
    pub(super) fn maps_bytes(&self) -> bool {
        let maps = |part: &NormalizerWrapper| matches!(part, NormalizerWrapper::ByteLevel(_));
        self.variants.iter().flatten().flat_map(flat).any(maps)
    }

    /// The normalized text.
    ///
    /// # Errors
    /// [`TokenizerError::TooLong`] where there is no place to cut or it becomes far longer, [`TokenizerError::Stopped`], and what the library says.
    pub(super) fn normalize<'t>(
        &self,
        text: &'t str,
        sizes: Sizes,
        limits: &EncodeLimits<'_>,
    ) -> Result<Cow<'t, str>, TokenizerError> {
        if self.is_none() || (self.keeps_ascii && text.is_ascii()) {
            return Ok(Cow::Borrowed(text));
        }
        let sizes = Sizes {
            window: sizes.window.min(growth::window_bytes(self.growth)),
            whole: sizes.whole.min(growth::whole_bytes(self.growth)),
        };
        let max_bytes = growth::most_bytes(text.len());
        let mut normalized = String::with_capacity(text.len());
        let mut rest = text;
        while !rest.is_empty() {
            limits.check(0)?;
            let (chunk, later) = rest.split_at(self.cut(rest, sizes)?);
            let (is_first, is_last) = (rest.len() == text.len(), later.is_empty());
            match &self.variants[usize::from(is_first) + 2 * usize::from(is_last)] {
                Some(normalizer) => {
                    let mut chunk = NormalizedString::from(chunk);
                    let done = normalizer.normalize(&mut chunk);
                    done.map_err(|source| TokenizerError::Encode { source })?;
                    normalized.push_str(chunk.get());
                }
                None => normalized.push_str(chunk),
            }
            if normalized.len() > max_bytes {
                return Err(TokenizerError::TooLong {
                    bytes: normalized.len(),
                    max_bytes,
                });
            }
            rest = later;
        }
        Ok(Cow::Owned(normalized))
    }

    /// Where the first chunk of `text` ends: at the last cut of a window, else at the first after it.
    fn cut(&self, text: &str, sizes: Sizes) -> Result<usize, TokenizerError> {
        if text.len() <= sizes.window {
            return Ok(text.len());
        }
        let window = boundary_before(text, sizes.window);
        let mut before = text[..window].char_indices().rev().map(|(index, _)| index);
        if let Some(cut) = before.find(|&index| index > 0 && self.rule.allows(text, index)) {
            return Ok(cut);
        }
        let end = text.floor_char_boundary(sizes.whole);
        let mut after = text[window..end.max(window)].char_indices();
        if let Some((index, _)) = after.find(|(index, _)| self.rule.allows(text, window + index)) {
            return Ok(window + index);
        }
        if text.len() <= sizes.whole {
            return Ok(text.len());
        }
        Err(TokenizerError::TooLong {
            bytes: text.len(),
            max_bytes: sizes.whole,
        })
    }
}

impl Rule {
    /// Asks for what one normalizer needs; `None` where nothing is enough.
    fn add(&mut self, normalizer: &NormalizerWrapper, is_first: bool) -> Option<()> {
        match normalizer {
            NormalizerWrapper::NFC(_)
            | NormalizerWrapper::NFD(_)
            | NormalizerWrapper::NFKC(_)
            | NormalizerWrapper::NFKD(_)
            | NormalizerWrapper::BertNormalizer(_)
            | NormalizerWrapper::StripAccents(_)
            | NormalizerWrapper::Nmt(_) => self.right_begins_anew = true,
            NormalizerWrapper::Lowercase(_)
            | NormalizerWrapper::ByteLevel(_)
            | NormalizerWrapper::Prepend(_) => {}
            NormalizerWrapper::StripNormalizer(_) => self.no_space = true,
            // It goes by graphemes.
            NormalizerWrapper::Precompiled(_) => self.both_begin_anew = true,
            NormalizerWrapper::Replace(replace) => {
                if !replace.content.chars().all(|c| c.is_ascii() || c == '▁') {
                    return None;
                }
                let pattern = serde_json::to_value(replace).ok()?;
                let pattern = &pattern["pattern"];
                if pattern["Regex"].as_str() == Some(" {2,}") {
                    self.no_space = true;
                    return Some(());
                }
                let literal: Vec<_> = pattern["String"].as_str()?.chars().collect();
                let is_one = literal.len() == 1 && !replace.content.is_empty();
                // What came before may have made other characters of those that are compared.
                if !is_one && (!is_first || literal.is_empty()) {
                    return None;
                }
                self.literals.push(literal);
            }
            NormalizerWrapper::Sequence(_) => return None,
        }
        Some(())
    }

    /// Whether `text` may be cut at `index`.
    fn allows(&self, text: &str, index: usize) -> bool {
        let (left, right) = text.split_at(index);
        let (Some(left), Some(right)) = (left.chars().next_back(), right.chars().next()) else {
            return false;
        };
        let follow = |literal: &Vec<char>| literal.windows(2).any(|pair| pair == [left, right]);
        let is_space = |c: char| c.is_whitespace() || !begins_anew(c);
        (!self.right_begins_anew || begins_anew(right))
            && (!self.both_begin_anew || (begins_anew(left) && begins_anew(right)))
            && (!self.no_space || !(is_space(left) || is_space(right)))
            && !self.literals.iter().any(follow)
    }
}

/// The normalizers of a sequence, and of those in it.
fn flat(normalizer: &NormalizerWrapper) -> Vec<&NormalizerWrapper> {
    if let NormalizerWrapper::Sequence(sequence) = normalizer {
        sequence.as_ref().iter().flat_map(flat).collect()
    } else {
        vec![normalizer]
    }
}

/// Whether it is one of Unicode's forms.
fn composes(normalizer: &NormalizerWrapper) -> bool {
    matches!(
        normalizer,
        NormalizerWrapper::NFC(_)
            | NormalizerWrapper::NFD(_)
            | NormalizerWrapper::NFKC(_)
            | NormalizerWrapper::NFKD(_)
    )
}

/// Whether it may leave nothing of a character.
fn removes(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::BertNormalizer(_)
        | NormalizerWrapper::StripNormalizer(_)
        | NormalizerWrapper::StripAccents(_)
        | NormalizerWrapper::Nmt(_)
        | NormalizerWrapper::Precompiled(_) => true,
        NormalizerWrapper::Replace(replace) => replace.content.is_empty(),
        NormalizerWrapper::NFC(_)
        | NormalizerWrapper::NFD(_)
        | NormalizerWrapper::NFKC(_)
        | NormalizerWrapper::NFKD(_)
        | NormalizerWrapper::Lowercase(_)
        | NormalizerWrapper::Prepend(_)
        | NormalizerWrapper::ByteLevel(_)
        | NormalizerWrapper::Sequence(_) => false,
    }
}

/// What a normalizer does to a chunk: all of it to a text's only one.
fn variant(
    normalizer: &NormalizerWrapper,
    is_first: bool,
    is_last: bool,
) -> Option<NormalizerWrapper> {
    if let NormalizerWrapper::Prepend(_) = normalizer {
        is_first.then(|| normalizer.clone())
    } else if let NormalizerWrapper::StripNormalizer(strip) = normalizer {
        let (left, right) = (strip.strip_left && is_first, strip.strip_right && is_last);
        (left || right).then(|| Strip::new(left, right).into())
    } else if let NormalizerWrapper::Sequence(sequence) = normalizer {
        let parts = sequence.as_ref().iter();
        let parts: Vec<_> = parts
            .filter_map(|part| variant(part, is_first, is_last))
            .collect();
        (!parts.is_empty()).then(|| Sequence::new(parts).into())
    } else {
        Some(normalizer.clone())
    }
}

/// Whether a character stays apart from those before it, in every form that Unicode knows, is no control character, and begins
/// a grapheme. It need not be all such characters: every script in common use has some.
fn begins_anew(c: char) -> bool {
    matches!(c,
        ' '..='~' | '\n'
        // Latin, Greek, Cyrillic, Hebrew and Arabic letters.
        | '\u{c0}'..='\u{17f}' | '\u{391}'..='\u{3a1}' | '\u{3a3}'..='\u{3c9}' | '\u{400}'..='\u{482}' | '\u{5d0}'..='\u{5ea}'
        | '\u{621}'..='\u{63a}' | '\u{641}'..='\u{64a}'
        // Devanagari, Bengali, Tamil and Thai consonants.
        | '\u{915}'..='\u{939}' | '\u{995}'..='\u{9a8}' | '\u{b95}' | '\u{ba4}' | '\u{baa}' | '\u{bae}'..='\u{bb5}'
        | '\u{e01}'..='\u{e2e}'
        // Punctuation of East Asia, kana, ideographs, syllables, and the wide forms of ASCII.
        | '\u{3001}'..='\u{3002}' | '\u{300a}'..='\u{3011}' | '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}'
        | '\u{3400}'..='\u{4db5}' | '\u{4e00}'..='\u{9fcc}' | '\u{ac00}'..='\u{d7a3}' | '\u{ff01}'..='\u{ff5e}')
}

#[cfg(test)]
mod tests {
    use tokenizers::normalizers::{NFC, NFD, NFKC, NFKD};

    use super::*;

    fn normalized(normalizer: &NormalizerWrapper, text: &str) -> String {
        let mut text = NormalizedString::from(text);
        normalizer.normalize(&mut text).unwrap();
        text.get().to_owned()
    }

    /// Letters that compose with what follows, marks of every class, Hangul in parts, half-width marks, emoji in parts.
    const LEFT: &[&str] = &[
        "a",
        "e\u{301}",
        "\u{301}\u{316}",
        "\u{323}",
        "\u{1100}",
        "\u{1100}\u{1161}",
        "가",
        "か",
        "ｶ",
        "\u{9c7}",
        "\u{b92}",
        "\u{627}",
        "🦊",
        "\u{200d}",
        "\u{1f1e8}",
        "\u{600}",
        "\r",
        "\u{94d}",
        "\u{338}",
        "<",
        "=",
    ];

    #[test]
    fn nothing_combines_with_what_begins_anew() {
        // Of ideographs and syllables, which are alike, a few.
        let is_looked_at =
            |c: &char| begins_anew(*c) && (*c < '\u{3400}' || u32::from(*c) % 97 == 0);
        let forms: [NormalizerWrapper; 4] = [NFC.into(), NFD.into(), NFKC.into(), NFKD.into()];
        for form in &forms {
            for right in ('\0'..='\u{ffff}').filter(is_looked_at) {
                let alone = normalized(form, &format!("{right}\u{301}"));
                for left in LEFT {
                    let whole = normalized(form, &format!("{left}{right}\u{301}"));
                    let left = normalized(form, left);
                    assert_eq!(whole, format!("{left}{alone}"), "{left:?} {right:?}");
                }
            }
        }
    }
}
