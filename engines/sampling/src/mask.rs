//! [`TokenMask`]: a set of token ids, one bit each.

use genset_backend_common::TokenId;

const BITS: usize = 32;

/// The tokens that may come next, of a vocabulary of `len` tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    /// Bit `id % 32` of word `id / 32`; the bits past `len` are 0.
    words: Vec<u32>,
    len: usize,
}

impl TokenMask {
    /// Allows nothing.
    #[must_use]
    pub fn none(len: usize) -> Self {
        let words = vec![0; len.div_ceil(BITS)];
        Self { words, len }
    }

    /// Creates a mask from words of 32 bits, lowest id first. Missing words allow nothing, and bits past `len` are dropped.
    #[must_use]
    pub fn from_words(mut words: Vec<u32>, len: usize) -> Self {
        words.resize(len.div_ceil(BITS), 0);
        if let (Some(last), rest @ 1..) = (words.last_mut(), len % BITS) {
            *last &= (1 << rest) - 1;
        }
        Self { words, len }
    }

    /// The vocabulary's size, not the number of allowed tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is allowed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// Whether `token` is allowed; `false` past the vocabulary.
    #[must_use]
    pub fn allows(&self, token: TokenId) -> bool {
        let (word, bit) = place(token);
        self.words.get(word).is_some_and(|bits| bits & bit != 0)
    }

    /// Allows `token`; ignores ids past the vocabulary.
    pub fn allow(&mut self, token: TokenId) {
        let (word, bit) = place(token);
        if usize::try_from(token).is_ok_and(|token| token < self.len) {
            self.words[word] |= bit;
        }
    }

    /// The number of allowed tokens.
    #[must_use]
    pub fn count(&self) -> usize {
        let ones = |word: &u32| usize::try_from(word.count_ones()).unwrap_or(BITS);
        self.words.iter().map(ones).sum()
    }

    /// The allowed tokens, lowest id first.
    pub fn iter(&self) -> impl Iterator<Item = TokenId> + '_ {
        let bits = |word: u32| (0..32).filter(move |bit| word & (1 << bit) != 0);
        (0..)
            .zip(&self.words)
            .flat_map(move |(place, word)| bits(*word).map(move |bit| place * 32 + bit))
    }

    /// Sets the logits of all other tokens to minus infinity. logits: `[len]`.
    pub fn apply(&self, logits: &mut [f32]) {
        for (row, word) in logits.chunks_mut(BITS).zip(&self.words) {
            match *word {
                u32::MAX => {}
                0 => row.fill(f32::NEG_INFINITY),
                word => {
                    for (bit, logit) in row.iter_mut().enumerate() {
                        if word & (1 << bit) == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

fn place(token: TokenId) -> (usize, u32) {
    let word = usize::try_from(token / 32).unwrap_or(usize::MAX);
    (word, 1 << (token % 32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_past_the_vocabulary_are_dropped() {
        let mask = TokenMask::from_words(vec![u32::MAX; 9], 37);
        assert_eq!((mask.len(), mask.count()), (37, 37));
        assert!(mask.allows(36) && !mask.allows(37) && !mask.allows(u32::MAX));
    }

    #[test]
    fn apply_keeps_exactly_the_allowed_logits() {
        for len in [1, 31, 32, 33, 64, 100] {
            let mut mask = TokenMask::none(len);
            assert!(mask.is_empty());
            (0..200).step_by(3).for_each(|token| mask.allow(token));
            let allowed: Vec<u32> = mask.iter().collect();
            let mut logits = vec![1.0; len];
            mask.apply(&mut logits);
            let kept: Vec<u32> = (0..)
                .zip(&logits)
                .filter(|(_, logit)| **logit == 1.0)
                .map(|(token, _)| token)
                .collect();
            assert_eq!(kept, allowed);
            assert_eq!(allowed.len(), mask.count());
        }
    }
}
