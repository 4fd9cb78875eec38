//! SC: scores, for engines that declare that they score pairs of texts.

use futures_util::future::try_join_all;
use genset_backend_common::{GenerateRequest, Input, Output, TokenId, request::ScorePair};

use crate::check::{Check, CheckResult, Stop, check, ensure, fail};
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("SC01", Core, Scores, "each pair has one score, in the order of the pairs, and the same alone as among others",
        clause: "Output::Scores",
        breaks: "rankings that give one document's score to another, or change with what else is ranked", one_each_in_order),
    check!("SC02", Core, Scores, "scores are finite, and not the same for every second text",
        clause: "Output::Scores",
        breaks: "rankings in which nothing comes before anything else", sane_scores),
];

/// The tolerance between a pair's scores alone and in a batch, if the engine declares that it depends on the batch.
const TOLERANCE: f32 = 0.02;

/// The number of tokens in the first text of all pairs.
const FIRST_TOKENS: usize = 6;

/// A pair of the common first text and a second of `len` tokens, limited by the context.
fn pair(live: &Live, len: usize, seed: u64) -> ScorePair {
    let context = usize::try_from(live.config.context_length_tokens).unwrap_or(usize::MAX);
    let first = FIRST_TOKENS.min(context / 2);
    let second = len.min(context - first);
    let tokens: Vec<TokenId> = (live.prompt(first, 1).into_iter())
        .chain(live.prompt(second, seed))
        .collect();
    ScorePair {
        token_ids: tokens,
        first_tokens: u32::try_from(first).unwrap_or(u32::MAX),
    }
}

/// Pairs of different lengths; the first and the last are equal.
fn pairs(live: &Live) -> Vec<ScorePair> {
    [(7, 2), (1, 3), (90, 4), (33, 5), (7, 2)]
        .map(|(len, seed)| pair(live, len, seed))
        .to_vec()
}

async fn score(live: &Live, pairs: Vec<ScorePair>) -> Result<Vec<f32>, Stop> {
    let count = pairs.len();
    let mut request = GenerateRequest::from_tokens(live.config.model.clone(), Vec::new());
    request.input = Input::Score(pairs.into());
    let answer = live.answer(request).await?;
    if answer.finished().is_none() {
        fail!("{count} pairs to score ended with {:?}", answer.error());
    }
    let mut scores = Vec::new();
    for output in answer.items.into_iter().flatten() {
        match output {
            Output::Scores(some) => scores.extend(some),
            Output::Finished(_) => {}
            Output::Tokens(_) | Output::Text(_) | Output::Embeddings(_) => {
                fail!("pairs to score were answered with something else")
            }
        }
    }
    ensure!(
        scores.len() == count,
        "{count} pairs have {} scores",
        scores.len()
    );
    Ok(scores)
}

async fn one_each_in_order(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let may_vary = live.varies_with_batch();
    let pairs = pairs(&live);
    let together = score(&live, pairs.clone()).await?;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for pair in &pairs {
        alone.extend(score(&live, vec![pair.clone()]).await?);
    }
    for some in pairs.chunks(live.at_once(u32::MAX)) {
        let asked = some.iter().map(|pair| score(&live, vec![pair.clone()]));
        beside.extend(try_join_all(asked).await?.into_iter().flatten());
    }
    for (scores, when) in [(together, "of a batch"), (beside, "of requests at once")] {
        for (place, (alone, score)) in alone.iter().zip(scores).enumerate() {
            let is_same = alone.to_bits() == score.to_bits()
                || (may_vary && (alone - score).abs() <= TOLERANCE * alone.abs().max(1.0));
            ensure!(
                is_same,
                "pair {place} {when} has the score {score}, and {alone} alone"
            );
        }
    }
    Ok(())
}

async fn sane_scores(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let scores = score(&live, pairs(&live)).await?;
    for (place, score) in scores.iter().enumerate() {
        ensure!(score.is_finite(), "pair {place} has the score {score}");
    }
    let first = scores[0];
    ensure!(
        scores
            .iter()
            .any(|score| score.to_bits() != first.to_bits()),
        "pairs with the same first text and other second ones all have the score {first}"
    );
    Ok(())
}
