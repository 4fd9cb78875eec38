//! Log probabilities form one distribution over the whole vocabulary.

use std::ops::RangeInclusive;

use genset_backend_common::{
    GenerateRequest, TokenId,
    config::{Deviation, SamplingOption},
};

use super::greedy;
use crate::check::{CheckResult, Stop, ensure, skip};
use crate::trial::{Live, Trial};

/// The rounding error that an engine's arithmetic may add, including half precision.
const TOLERANCE: f32 = 0.05;

pub(super) async fn one_distribution(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let max = live.config.capabilities.max_logprobs.unwrap_or(0);
    adds_up(&live, max).await?;
    is_the_same_however_many_are_asked_for(&live, max).await
}

/// The probabilities of different tokens at one position add up to at most 1, also with a free choice.
async fn adds_up(live: &Live, max: u32) -> CheckResult {
    let mut sampled = greedy(live, 0);
    sampled.sampling.temperature = live.can(SamplingOption::Temperature).then_some(1.0);
    for mut request in [greedy(live, 1), sampled] {
        request.output.logprobs = Some(max);
        let answer = live.answer(request).await?;
        for (token, at) in answer.tokens().iter().zip(&answer.logprobs()) {
            let mut sum: f32 = at.top.iter().map(|top| top.logprob.exp()).sum();
            if !at.top.iter().any(|top| top.token_id == *token) {
                sum += at.logprob.exp();
            }
            // NaN is in no range.
            ensure!(
                (0.0..=1.0 + TOLERANCE).contains(&sum),
                "the probabilities of {} candidates are {sum} together: {at:?}",
                at.top.len()
            );
        }
    }
    Ok(())
}

async fn is_the_same_however_many_are_asked_for(live: &Live, max: u32) -> CheckResult {
    let few = rated(live, 0).await?;
    for top in [1.min(max), max] {
        let many = rated(live, top).await?;
        let differ = few
            .iter()
            .zip(&many)
            .position(|((token, few), (same, many))| {
                token == same && (few - many).abs() > TOLERANCE
            });
        if let Some(place) = differ {
            let (few, many) = (few[place].1, many[place].1);
            return Err(Stop::Fail(format!(
                "the log probability of token {place} is {few} alone, and {many} beside {top} candidates"
            )));
        }
    }
    Ok(())
}

/// The tokens of a greedy answer and their log probabilities, as long as the answers agree.
async fn rated(live: &Live, top: u32) -> Result<Vec<(u32, f32)>, Stop> {
    let mut request = greedy(live, 2);
    request.output.logprobs = Some(top);
    let answer = live.answer(request).await?;
    let logprobs = answer.logprobs();
    Ok(answer
        .tokens()
        .into_iter()
        .zip(logprobs.iter().map(|at| at.logprob))
        .collect())
}

/// A change to a request.
struct SetUp {
    option: SamplingOption,
    name: &'static str,
    /// Applies it; the argument is the best token.
    set: fn(&mut GenerateRequest, TokenId),
    /// The range of the best token's log probability if biases count in it, given its own.
    biased: fn(f32) -> RangeInclusive<f32>,
}

const SET_UPS: [SetUp; 3] = [
    SetUp {
        option: SamplingOption::LogitBias,
        name: "a bias of 1",
        set: |request, best| request.sampling.logit_bias = [(best, 1.0)].into(),
        biased: |own| {
            let grown = own.exp() * 1_f32.exp();
            let biased = (grown / (1.0 - own.exp() + grown)).ln();
            biased..=biased
        },
    },
    SetUp {
        option: SamplingOption::LogitBias,
        name: "a bias of 10 on others",
        set: |request, best| {
            let others = (0..).filter(|token| *token != best).take(2);
            request.sampling.logit_bias = others.map(|token| (token, 10.0)).collect();
        },
        // The probability of the other tokens is unknown.
        biased: |own| f32::NEG_INFINITY..=own,
    },
    SetUp {
        option: SamplingOption::Temperature,
        name: "a temperature of 2",
        set: |request, _| request.sampling.temperature = Some(2.0),
        biased: |own| own..=own,
    },
];

/// Tests the first position of an answer, where only the change can make a difference.
pub(super) async fn before_bias(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let max = live.config.capabilities.max_logprobs.unwrap_or(0);
    let plain = greedy(&live, 3);
    let Some((best, own)) = first(&live, plain.clone(), max).await? else {
        skip!(NotDeclared, "the answer holds no token");
    };
    let own = own[0].1;
    let is_biased = live
        .config
        .capabilities
        .deviates(Deviation::LogprobsAfterBias);
    let mut was_tried = false;
    for set_up in SET_UPS {
        if !live.can(set_up.option) {
            continue;
        }
        was_tried = true;
        let mut request = plain.clone();
        (set_up.set)(&mut request, best);
        let Some((token, rated)) = first(&live, request, max).await? else {
            continue;
        };
        // Candidates include the best token, whichever was chosen.
        let of_best = if token == best {
            Some(rated[0].1)
        } else {
            None
        };
        let of_best = of_best.or(rated.iter().find(|(id, _)| *id == best).map(|at| at.1));
        let right = match is_biased {
            true => (set_up.biased)(own),
            false => own..=own,
        };
        let near = right.start() - TOLERANCE..=right.end() + TOLERANCE;
        ensure!(
            of_best.is_none_or(|rated| near.contains(&rated)),
            "with {}, the log probability of token {best} is {of_best:?} and not {right:?}; without it {own}",
            set_up.name
        );
    }
    if !was_tried {
        skip!(
            NotDeclared,
            "the engine declares neither logit_bias nor temperature"
        );
    }
    Ok(())
}

/// The first token of an answer, and the log probabilities there: its own, and those of the candidates.
async fn first(
    live: &Live,
    mut request: GenerateRequest,
    top: u32,
) -> Result<Option<(TokenId, Vec<(TokenId, f32)>)>, Stop> {
    request.output.logprobs = Some(top);
    request.stop.max_tokens = Some(1);
    let answer = live.answer(request).await?;
    let Some((token, at)) = answer
        .tokens()
        .first()
        .copied()
        .zip(answer.logprobs().into_iter().next())
    else {
        return Ok(None);
    };
    let candidates = at.top.iter().map(|top| (top.token_id, top.logprob));
    Ok(Some((
        token,
        [(token, at.logprob)]
            .into_iter()
            .chain(candidates)
            .collect(),
    )))
}
