//! Requests at once that ask for different things.

use genset_backend_common::{FinishReason, GenerateRequest, TokenId, config::SamplingOption};

use crate::answer::Answer;
use crate::check::{CheckResult, Stop, ensure, fail, skip};
use crate::checks::near::{self, Pair};
use crate::checks::pressure::ensure_room_for;
use crate::trial::{Live, Trial};

/// Requests at once.
const REQUESTS: usize = 4;

/// Tokens of an answer that nothing ends before.
const ANSWER_TOKENS: u32 = 12;

/// What of an answer is compared: its tokens, why it ended and at which token.
type Told = (Vec<u32>, String);

fn told(answer: &Answer) -> Result<Told, Stop> {
    match answer.finished() {
        Some(end) => {
            let how = format!("{:?} at {:?}", end.reason, end.stop_token);
            Ok((answer.tokens(), how))
        }
        None => fail!("a request ended with {:?}", answer.error()),
    }
}

async fn alone(live: &Live, requests: &[GenerateRequest]) -> Result<Vec<Told>, Stop> {
    let mut all = Vec::new();
    for request in requests {
        all.push(told(&live.answer(request.clone()).await?)?);
    }
    Ok(all)
}

async fn together(live: &Live, requests: &[GenerateRequest]) -> Result<Vec<Told>, Stop> {
    let answers = live.answers(requests.to_vec()).await?;
    answers.iter().map(told).collect()
}

/// Requests that nothing but `max_tokens` ends.
fn plain(live: &Live) -> Vec<GenerateRequest> {
    (0..4)
        .map(|seed| live.greedy(live.prompt(6, 40 + seed), ANSWER_TOKENS))
        .collect()
}

/// Has each request end where its neighbour would not: by a token that comes in the neighbour's answer. `answers` are those
/// without. The last one has a bias of its own.
fn differ(live: &Live, requests: &mut [GenerateRequest], answers: &[Vec<TokenId>], bias: Bias) {
    let token = |of: usize, place: usize| answers[of].get(place).copied();
    for (at, own) in requests.iter_mut().enumerate() {
        let neighbours = token((at + 1) % REQUESTS, 3);
        match at {
            0 => own.stop.stop_token_ids = token(0, 7).into_iter().chain(neighbours).collect(),
            1 => {
                own.stop.ignore_eos = false;
                own.stop.eos_token_ids = token(1, 5).into_iter().chain(neighbours).collect();
            }
            2 => {
                own.stop.max_tokens = Some(5);
                own.stop.stop_token_ids = neighbours.into_iter().collect();
            }
            _ if !live.can(SamplingOption::LogitBias) => {}
            _ if bias == Bias::Forces => {
                let mut all = (0..).map(|seed| live.token(seed)).take(FORCED_FROM);
                let is_new = |token: &TokenId| !answers.iter().any(|own| own.contains(token));
                own.sampling.logit_bias = all
                    .find(is_new)
                    .map(|token| (token, FORCED))
                    .into_iter()
                    .collect();
            }
            _ => {
                let banned = neighbours.into_iter().chain(token(3, 2));
                own.sampling.logit_bias = banned.map(|token| (token, -FORCED)).collect();
            }
        }
    }
}

/// What the bias of the last request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bias {
    /// It bans tokens of its own answer and of its neighbour's.
    Bans,
    /// It leaves one token that no answer has.
    Forces,
}

/// A bias that no model's logits outweigh.
const FORCED: f32 = 100.0;

/// Tokens among which one is looked for that no answer has.
const FORCED_FROM: usize = 100;

pub(super) async fn beside_others(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    ensure_room_for(&live, 4)?;
    if live.varies_with_batch() {
        return hold_in_any_batch(&live).await;
    }
    let mut requests = plain(&live);
    let plain = alone(&live, &requests).await?;
    if plain != together(&live, &requests).await? {
        skip!(
            NotDeclared,
            "answers are not the same in a batch, for which there is CC04"
        );
    }
    let answers: Vec<Vec<TokenId>> = plain.into_iter().map(|told| told.0).collect();
    differ(&live, &mut requests, &answers, Bias::Bans);
    let expected = alone(&live, &requests).await?;
    let seen = together(&live, &requests).await?;
    for (expected, seen) in expected.into_iter().zip(seen) {
        ensure!(
            seen == expected,
            "alone a request is answered by {} tokens and ends as {}, beside others that ask for other things by {} tokens \
             and as {}: {:?} and {:?}",
            expected.0.len(),
            expected.1,
            seen.0.len(),
            seen.1,
            expected.0,
            seen.0
        );
    }
    Ok(())
}

/// Of an engine whose answers depend on their batch no token is foretold. What each request asks for must hold all the same, and
/// what it does not ask for must not show.
async fn hold_in_any_batch(live: &Live) -> CheckResult {
    let mut requests = plain(live);
    let answers = live.answers(requests.clone()).await?;
    let answers: Vec<Vec<TokenId>> = answers.iter().map(Answer::tokens).collect();
    differ(live, &mut requests, &answers, Bias::Forces);
    let mut pairs: Vec<Pair> = Vec::new();
    for request in &requests {
        let alone = live.answer(request.clone()).await?;
        ensure_kept(request, &alone)?;
        pairs.push((alone.clone(), alone));
    }
    let together = live.answers(requests.clone()).await?;
    for ((request, pair), beside) in requests.iter().zip(&mut pairs).zip(together) {
        ensure_kept(request, &beside)?;
        pair.1 = beside;
    }
    near::ensure_most_begin_alike(&pairs, "beside others that ask for other things")
}

/// The answer ends and is as its own request asks for.
fn ensure_kept(request: &GenerateRequest, answer: &Answer) -> CheckResult {
    let (stop, tokens) = (&request.stop, answer.tokens());
    let ends = |token: &TokenId| {
        let is_eos = !stop.ignore_eos && stop.eos_token_ids.contains(token);
        stop.stop_token_ids.contains(token) || is_eos
    };
    let Some(end) = answer.finished() else {
        fail!("a request ended with {:?}", answer.error())
    };
    let is_own_end = match (end.reason, end.stop_token) {
        (FinishReason::Stop, Some(token)) => ends(&token),
        // A model may know an end of its own.
        (FinishReason::Stop, None) => !stop.ignore_eos,
        (FinishReason::Length, _) => stop.max_tokens.map(usize::try_from) == Some(Ok(tokens.len())),
        (FinishReason::Cancelled | FinishReason::ContentFilter, _) => false,
    };
    ensure!(
        is_own_end && !tokens.iter().any(ends),
        "a request that asks for at most {:?} tokens and to stop at {:?} or {:?} ended after {tokens:?} as {:?} at {:?}",
        stop.max_tokens,
        stop.stop_token_ids,
        stop.eos_token_ids,
        end.reason,
        end.stop_token
    );
    let forced = request.sampling.logit_bias.keys().next();
    let other = forced.and_then(|forced| tokens.iter().find(|token| *token != forced));
    ensure!(
        other.is_none(),
        "token {other:?} appeared although {forced:?} had a bias of {FORCED}: {tokens:?}"
    );
    Ok(())
}
