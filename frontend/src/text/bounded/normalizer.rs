//! [`ChunkNormalizer`]: normalizes a long text chunk by chunk.
//!
//! A chunk ends between two characters across which the normalizer does not look. [`Rule`] defines them: some normalizers treat
//! each character by itself, Unicode's forms compose a letter with the marks after it, and others look at runs of spaces. What
//! applies to a text's ends applies to the first and the last chunk only.

use std::borrow::Cow;

use tokenizers::normalizers::{NormalizerWrapper, Sequence, Strip};
use tokenizers::{NormalizedString, Normalizer};

use super::{Sizes, boundary_before};
use crate::text::growth;
use crate::text::tokenizer::{EncodeLimits, TokenizerError};

/// A normalizer that works on one chunk at a time.
pub(super) struct ChunkNormalizer {
    /// By index: 1 for the first chunk of a text, 2 for the last, 3 for the only one, 0 for others; `None` if it does nothing.
    variants: [Option<NormalizerWrapper>; 4],
    rule: Rule,
    /// Whether it leaves ASCII text unchanged.
    keeps_ascii: bool,
    /// The largest factor by which it lengthens a text.
    growth: usize,
}

/// The conditions on the characters on both sides of a cut.
#[derive(Debug, Default)]
struct Rule {
    /// The right one combines with nothing on its left.
    right_begins_anew: bool,
    /// Neither combines with anything.
    both_begin_anew: bool,
    /// Neither is white space.
    no_space: bool,
    /// They are not adjacent in any of these.
    literals: Vec<Vec<char>>,
}

impl ChunkNormalizer {
    /// `None` for a normalizer that may look at the whole text.
    pub(super) fn try_new(normalizer: Option<&NormalizerWrapper>) -> Option<Self> {
        let mut rule = Rule::default();
        let parts = normalizer.map_or_else(Vec::new, flat);
        let keeps_ascii = parts.iter().all(|part| composes(part));
        let prepends = |part: &NormalizerWrapper| matches!(part, NormalizerWrapper::Prepend(_));
        if parts.iter().any(|part| removes(part)) && parts.iter().any(|part| prepends(part)) {
            // Whether a prefix is added depends on whether any text is left.
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

    /// Whether it leaves every text unchanged.
    pub(super) fn is_none(&self) -> bool {
        self.variants.iter().all(Option::is_none)
    }

    /// Whether it maps every byte to a letter that stands for it.
    pub(super) fn maps_bytes(&self) -> bool {
        let maps = |part: &NormalizerWrapper| matches!(part, NormalizerWrapper::ByteLevel(_));
        self.variants.iter().flatten().flat_map(flat).any(maps)
    }

    /// Returns the normalized text.
    ///
    /// # Errors
    /// [`TokenizerError::TooLong`] if there is no place to cut or the text becomes far longer, [`TokenizerError::Stopped`], and
    /// the library's errors.
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

    /// Returns the end of the first chunk of `text`: the last cut within a window, else the first cut after it.
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
    /// Adds the conditions that one normalizer needs; `None` if no condition is enough.
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
            // It works on graphemes.
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
                // An earlier step may have changed the characters that are compared.
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

/// The normalizers of a sequence, nested ones included.
fn flat(normalizer: &NormalizerWrapper) -> Vec<&NormalizerWrapper> {
    if let NormalizerWrapper::Sequence(sequence) = normalizer {
        sequence.as_ref().iter().flat_map(flat).collect()
    } else {
        vec![normalizer]
    }
}

/// Whether it is one of Unicode's normalization forms.
fn composes(normalizer: &NormalizerWrapper) -> bool {
    matches!(
        normalizer,
        NormalizerWrapper::NFC(_)
            | NormalizerWrapper::NFD(_)
            | NormalizerWrapper::NFKC(_)
            | NormalizerWrapper::NFKD(_)
    )
}

/// Whether it may remove a character.
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

/// The part of a normalizer that applies to a chunk, given its place in the text.
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

/// Whether a character stays apart from those before it in every Unicode form, is no control character, and begins a grapheme.
/// The list need not be complete: every script in common use has some such characters.
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

    /// Characters that may combine with what follows: letters, marks of every class, Hangul jamo, half-width marks, parts of
    /// emoji.
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
        // Samples ideographs and syllables, which all behave alike.
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
