//! Compares an answer beside others with the answer alone: equal, or close for an engine that declares
//! [`Deviation::BatchVariant`](genset_backend_common::config::Deviation::BatchVariant). For the groups CC, CN and DT; and for
//! MG and DG, which compare a resumed answer with an uninterrupted one, and one of two instances with that of one.
//!
//! Another order of summation changes the last bits of logits. So a choice changes only where two tokens are almost equally
//! likely, which log probabilities show if available. Few answers change at their beginning.

use genset_backend_common::output::TokenLogprob;
use genset_backend_common::{GenerateRequest, TokenId};

use crate::answer::Answer;
use crate::check::{CheckResult, ensure};
use crate::trial::Live;

/// The maximum difference between the log probabilities of two tokens that rounding can swap.
const NEAR: f32 = 0.5;

/// A number of tokens or characters within which few answers change.
const BEGINNING: usize = 4;

/// The number of answers that distinguishes a fault from rounding if only their beginnings are compared.
pub(super) const ENOUGH: u64 = 6;

/// The request. For an engine that depends on the batch, adds log probabilities, which show how close two tokens are.
pub(super) fn rated(live: &Live, mut request: GenerateRequest) -> GenerateRequest {
    if live.varies_with_batch() && live.medium().is_tokens() {
        request.output.logprobs = live.config.capabilities.max_logprobs;
    }
    request
}

/// How the tokens of answers are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    /// The likeliest token.
    Greedy,
    /// The likeliest token after penalties, which log probabilities do not include.
    Penalized,
    /// Drawn with a seed, possibly any token.
    Seeded,
}

/// The answers to a request alone and beside others.
pub(super) type Pair = (Answer, Answer);

/// The answers of several requests must equal those alone, as exactly as the engine declares. `when` describes the others.
pub(super) fn ensure_as_alone(
    live: &Live,
    choice: Choice,
    pairs: &[Pair],
    when: &str,
) -> CheckResult {
    if live.varies_with_batch() {
        return ensure_all_near(choice, pairs, when);
    }
    for (alone, beside) in pairs {
        let (alone, beside) = (alone.generated(), beside.generated());
        ensure!(
            beside == alone,
            "a request was answered by {alone:?} alone, and by {beside:?} {when}"
        );
    }
    Ok(())
}

/// Each answer must be near that alone, and most must begin as that does.
pub(super) fn ensure_all_near(choice: Choice, pairs: &[Pair], when: &str) -> CheckResult {
    for (alone, beside) in pairs {
        ensure_near(choice, alone, beside, when)?;
    }
    ensure_most_begin_alike(pairs, when)
}

/// An answer must have the same log probabilities as alone, and may differ only where both tokens are almost equally likely.
pub(super) fn ensure_near(
    choice: Choice,
    alone: &Answer,
    beside: &Answer,
    when: &str,
) -> CheckResult {
    let (own, seen) = (alone.tokens(), beside.tokens());
    let way = own.iter().zip(&seen).take_while(|(own, seen)| own == seen);
    let parting = way.count();
    let rated = alone.logprobs().into_iter().zip(beside.logprobs());
    for (place, (alone, beside)) in rated.enumerate().take(parting + 1) {
        let (Some(own), Some(seen)) = (own.get(place), seen.get(place)) else {
            break;
        };
        let differ = (alone.logprob - beside.logprob).abs();
        let apart = if place < parting {
            vec![differ]
        } else if choice == Choice::Greedy {
            vec![differ, behind(&alone, *seen), behind(&beside, *own)]
        } else {
            break;
        };
        // NaN is in no range.
        let far = apart.iter().find(|by| !(..=NEAR).contains(*by));
        ensure!(
            far.is_none(),
            "another order of sums changes last bits, and nothing else; but token {place} is {own} \
             alone and {seen} {when}, and their log probabilities are {far:?} apart"
        );
    }
    Ok(())
}

/// By how much a token is less likely than the chosen one, as far as the candidates show.
fn behind(chosen: &TokenLogprob, other: TokenId) -> f32 {
    let listed = chosen.top.iter().find(|top| top.token_id == other);
    let at_most = listed.or(chosen.top.last());
    at_most.map_or(0.0, |other| chosen.logprob - other.logprob)
}

/// Whether two answers differ at their beginnings, or only one of them has any.
pub(super) fn begin_otherwise(alone: &Answer, beside: &Answer) -> bool {
    let (alone, beside) = (alone.generated(), beside.generated());
    let mut beginnings = alone.units().iter().zip(beside.units()).take(BEGINNING);
    let is_one_empty = alone.units().is_empty() != beside.units().is_empty();
    is_one_empty || beginnings.any(|(alone, beside)| alone != beside)
}

/// The number of answers that begin otherwise than alone.
pub(super) fn astray(pairs: &[Pair]) -> usize {
    let is_astray = |(alone, beside): &&Pair| begin_otherwise(alone, beside);
    pairs.iter().filter(is_astray).count()
}

/// More than half of the answers must begin as they do alone.
pub(super) fn ensure_most_begin_alike(pairs: &[Pair], when: &str) -> CheckResult {
    let astray = astray(pairs);
    ensure!(
        astray * 2 < pairs.len().max(1),
        "another order of sums changes few tokens; but of {} answers {when}, {astray} \
         begin otherwise than alone",
        pairs.len()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use genset_backend_common::Output;
    use genset_backend_common::output::{TokenChunk, TopLogprob};

    use super::*;

    /// An answer of tokens, each with its log probability and one other candidate.
    fn answer(tokens: &[(TokenId, f32, (TokenId, f32))]) -> Answer {
        let item = |(token, logprob, (token_id, other)): &(TokenId, f32, (TokenId, f32))| {
            let mut chunk = TokenChunk::from(*token);
            let top = vec![TopLogprob {
                token_id: *token_id,
                logprob: *other,
            }];
            chunk.logprobs = vec![TokenLogprob {
                logprob: *logprob,
                top,
            }];
            Ok(Output::Tokens(chunk))
        };
        Answer::of(tokens.iter().map(item).collect())
    }

    fn is_near(choice: Choice, alone: &Answer, beside: &Answer) -> bool {
        ensure_near(choice, alone, beside, "beside others").is_ok()
    }

    #[test]
    fn a_greedy_answer_parts_only_where_two_tokens_are_all_but_equal() {
        let alone = answer(&[(1, -0.1, (9, -3.0)), (2, -0.70, (3, -0.71))]);
        let tie = answer(&[
            (1, -0.1, (9, -3.0)),
            (3, -0.70, (2, -0.71)),
            (8, -9.0, (7, -1.0)),
        ]);
        let far = answer(&[(1, -0.1, (9, -3.0)), (4, -0.70, (2, -0.71))]);
        let unlikely = answer(&[(1, -0.1, (9, -3.0)), (3, -2.0, (2, -0.1))]);
        let moved = answer(&[(1, -1.1, (9, -1.2)), (2, -0.70, (3, -0.71))]);
        assert!(is_near(Choice::Greedy, &alone, &alone));
        assert!(is_near(Choice::Greedy, &alone, &tie));
        assert!(
            is_near(Choice::Greedy, &alone, &far),
            "the only candidate is as near"
        );
        assert!(!is_near(Choice::Greedy, &alone, &unlikely));
        assert!(!is_near(Choice::Greedy, &alone, &moved));
        assert!(
            is_near(Choice::Seeded, &alone, &unlikely),
            "a draw takes any token"
        );
        assert!(!is_near(Choice::Seeded, &alone, &moved));
    }

    #[test]
    fn no_number_is_far() {
        let alone = answer(&[(1, -0.1, (9, -3.0))]);
        let broken = answer(&[(1, f32::NAN, (9, -3.0))]);
        assert!(!is_near(Choice::Greedy, &alone, &broken));
    }

    #[test]
    fn half_of_the_answers_may_not_begin_otherwise() {
        let of = |token| answer(&[(token, 0.0, (0, -1.0))]);
        let (same, other) = ((of(1), of(1)), (of(1), of(2)));
        let most = [same.clone(), same.clone(), other.clone()];
        assert!(ensure_most_begin_alike(&most, "beside others").is_ok());
        let missing = (of(1), answer(&[]));
        assert!(ensure_most_begin_alike(&[same.clone(), missing], "beside others").is_err());
        assert!(ensure_most_begin_alike(&[same, other], "beside others").is_err());
        assert!(ensure_most_begin_alike(&[], "beside others").is_ok());
    }
}
