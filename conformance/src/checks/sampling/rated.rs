//! Log probabilities as numbers: of one distribution over the whole vocabulary.

use genset_backend_common::SamplingOption;

use super::greedy;
use crate::check::{CheckResult, Stop, ensure};
use crate::trial::{Live, Trial};

/// What rounding in an engine's arithmetic may add, of half precision too.
const TOLERANCE: f32 = 0.05;

pub(super) async fn one_distribution(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let max = live.config.capabilities.max_logprobs.unwrap_or(0);
    adds_up(&live, max).await?;
    is_the_same_however_many_are_asked_for(&live, max).await
}

/// The probabilities of different tokens at one place are at most 1 together, also where the choice is free.
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
            // A sum that is not a number is in no range.
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

/// The tokens of a greedy answer and their log probabilities, as long as it goes the same way.
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
