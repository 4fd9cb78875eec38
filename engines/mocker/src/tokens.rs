//! [`MockerModel`]: the properties of the simulated model; [`Answer`]: the tokens that the mocker generates for it.

use std::collections::BTreeSet;
use std::sync::Arc;

use genset_backend_common::TokenId;
use genset_backend_common::kv::{BlockHash, hash_block};
use genset_backend_common::random::{STEP, mix};

/// The properties of the simulated model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MockerModel {
    /// Token ids are below this; at least 1.
    pub vocab_size: u32,
    /// The most tokens of prompt and answer together, at least 1.
    pub context_length_tokens: u32,
    /// Tokens that never occur in an answer: those that end a sequence, and others without text. Not the whole vocabulary.
    pub unused_tokens: BTreeSet<TokenId>,
}

impl MockerModel {
    /// Creates a model whose answers may contain every token.
    #[must_use]
    pub fn new(vocab_size: u32, context_length_tokens: u32) -> Self {
        Self {
            vocab_size,
            context_length_tokens,
            unused_tokens: BTreeSet::new(),
        }
    }

    /// The unused tokens inside the vocabulary, in order.
    pub(crate) fn unused(&self) -> Arc<[TokenId]> {
        let in_vocabulary = self.unused_tokens.range(..self.vocab_size);
        in_vocabulary.copied().collect()
    }

    /// The number of tokens that may occur in an answer.
    pub(crate) fn used_tokens(&self) -> u32 {
        let unused = self.unused_tokens.range(..self.vocab_size).count();
        self.vocab_size
            .saturating_sub(u32::try_from(unused).unwrap_or(u32::MAX))
    }
}

/// Chooses the tokens of answers.
#[derive(Debug, Clone)]
pub(crate) struct Tokens {
    seed: u64,
    used: u32,
    unused: Arc<[TokenId]>,
}

impl Tokens {
    pub(crate) fn new(model: &MockerModel, seed: u64) -> Self {
        Self {
            seed,
            used: model.used_tokens().max(1),
            unused: model.unused(),
        }
    }

    /// The answer to `prompt`, whose last `resumed` tokens are the first tokens of the answer.
    pub(crate) fn answer(&self, prompt: &[TokenId], resumed: u32) -> Answer {
        let resumed = usize::try_from(resumed).unwrap_or(usize::MAX);
        let original = &prompt[..prompt.len().saturating_sub(resumed)];
        let root = BlockHash(self.seed);
        let BlockHash(start) = hash_block(Some(root), original);
        Answer {
            tokens: self.clone(),
            start,
            next: u64::try_from(prompt.len() - original.len()).unwrap_or(u64::MAX),
        }
    }
}

/// The tokens of one answer: a function of seed, prompt and position alone.
#[derive(Debug)]
pub(crate) struct Answer {
    tokens: Tokens,
    start: u64,
    next: u64,
}

impl Answer {
    /// Returns the next token without advancing.
    pub(crate) fn peek(&self) -> TokenId {
        let mixed = mix(self.start.wrapping_add(self.next.wrapping_mul(STEP)));
        let used = u64::from(self.tokens.used);
        // Below `used`, and uniform within one part in 2^32.
        let mut token = u32::try_from(((mixed >> 32) * used) >> 32).unwrap_or(0);
        for unused in &*self.tokens.unused {
            if *unused > token {
                break;
            }
            token += 1;
        }
        token
    }

    /// Advances to the next token.
    pub(crate) fn advance(&mut self) {
        self.next += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(mut answer: Answer, count: usize) -> Vec<TokenId> {
        let mut tokens = Vec::new();
        for _ in 0..count {
            tokens.push(answer.peek());
            answer.advance();
        }
        tokens
    }

    #[test]
    fn an_answer_goes_on_wherever_it_was_cut() {
        let tokens = Tokens::new(&MockerModel::new(50, 100), 1);
        let whole = take(tokens.answer(&[1, 2, 3], 0), 20);
        for cut in 0..20 {
            let prompt = [&[1, 2, 3][..], &whole[..cut]].concat();
            let rest = take(
                tokens.answer(&prompt, u32::try_from(cut).unwrap()),
                20 - cut,
            );
            assert_eq!(rest, whole[cut..]);
        }
        assert!(take(tokens.answer(&[1, 2, 4], 0), 20) != whole);
        let other = Tokens::new(&MockerModel::new(50, 100), 2);
        assert!(take(other.answer(&[1, 2, 3], 0), 20) != whole);
        // A prompt that is all answer, and a `resumed` beyond the prompt's length.
        take(tokens.answer(&whole, 20), 1);
        take(tokens.answer(&[1], 9), 1);
    }

    #[test]
    fn unused_tokens_never_come_and_all_others_do() {
        let mut model = MockerModel::new(8, 100);
        model.unused_tokens = BTreeSet::from([0, 1, 4, 7, 99]);
        assert_eq!(model.used_tokens(), 4);
        let tokens = Tokens::new(&model, 0);
        let seen: BTreeSet<_> = take(tokens.answer(&[1], 0), 200).into_iter().collect();
        assert_eq!(seen, BTreeSet::from([2, 3, 5, 6]));
    }
}
