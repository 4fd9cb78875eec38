//! Prompt lookup: if a sequence's last tokens occurred before, the tokens that followed then may follow again.
//!
//! # Source
//! Saxena, Prompt Lookup Decoding, 2023; vLLM's method `ngram`.

use genset_backend_common::TokenId;

/// The fewest last tokens that must match: a single one says little.
const MIN_TOKENS: usize = 2;
/// After a match of this length, earlier positions are not searched.
const MAX_TOKENS: usize = 4;

/// At most `most` tokens that followed an earlier occurrence of the last ones of `tokens`: the longest match, up to
/// [`MAX_TOKENS`], and the latest among equal ones.
pub(super) fn guess(tokens: &[TokenId], most: usize) -> &[TokenId] {
    let Some((last, before)) = tokens.split_last().filter(|_| most > 0) else {
        return &[];
    };
    let mut best = (MIN_TOKENS - 1, 0);
    for end in (1..=before.len()).rev() {
        if before[end - 1] != *last {
            continue;
        }
        let agreeing = agreeing(&tokens[..end], tokens);
        if agreeing > best.0 {
            best = (agreeing, end);
        }
        if agreeing == MAX_TOKENS {
            break;
        }
    }
    match best {
        (_, 0) => &[],
        (_, end) => &tokens[end..tokens.len().min(end + most)],
    }
}

/// The number of equal last tokens, up to [`MAX_TOKENS`].
fn agreeing(one: &[TokenId], other: &[TokenId]) -> usize {
    let pairs = one.iter().rev().zip(other.iter().rev()).take(MAX_TOKENS);
    pairs.take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_the_last_tokens_is_guessed() {
        assert_eq!(guess(&[1, 2, 3, 4, 9, 1, 2], 2), [3, 4]);
        assert_eq!(guess(&[1, 2, 3, 4, 9, 1, 2], 9), [3, 4, 9, 1, 2]);
    }

    #[test]
    fn a_longer_agreement_wins_and_of_equals_the_latest() {
        assert_eq!(guess(&[1, 2, 3, 7, 8, 2, 3, 6, 1, 2, 3], 1), [7]);
        assert_eq!(guess(&[2, 3, 7, 2, 3, 6, 2, 3], 1), [6]);
    }

    #[test]
    fn beyond_four_tokens_the_latest_is_taken() {
        let longer = [0, 1, 2, 3, 4, 7, 5, 1, 2, 3, 4, 8, 0, 1, 2, 3, 4];
        assert_eq!(guess(&longer, 1), [8]);
    }

    #[test]
    fn what_repeats_itself_is_guessed_to_go_on() {
        assert_eq!(guess(&[5, 5, 5], 4), [5]);
        assert_eq!(guess(&[1, 2, 1, 2, 1, 2], 4), [1, 2]);
    }

    #[test]
    fn nothing_is_guessed_where_nothing_agrees() {
        for tokens in [&[][..], &[1], &[1, 1], &[1, 2, 3, 2], &[1, 2, 3, 4]] {
            assert_eq!(guess(tokens, 4), [0; 0], "{tokens:?}");
        }
        assert_eq!(guess(&[1, 2, 1, 2], 0), [0; 0]);
    }
}
