//! Concurrent requests with different options.

use genset_backend_common::{FinishReason, GenerateRequest, TokenId, config::SamplingOption};

use crate::answer::Answer;
use crate::check::{CheckResult, Stop, ensure, fail, skip};
use crate::checks::near::{self, Pair};
use crate::checks::pressure::ensure_room_for;
use crate::trial::{Live, Trial};

/// The number of concurrent requests.
const REQUESTS: usize = 4;

/// The number of tokens in an answer without an earlier end.
const ANSWER_TOKENS: u32 = 12;

/// The compared parts of an answer: its tokens, and its finish reason with its token.
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

/// Requests that end only at `max_tokens`.
fn plain(live: &Live) -> Vec<GenerateRequest> {
    (0..4)
        .map(|seed| live.greedy(live.prompt(6, 40 + seed), ANSWER_TOKENS))
        .collect()
}

/// Makes each request end where its neighbour would not: at a token of the neighbour's answer. `answers` are those without stop
/// tokens. The last request has its own bias.
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

/// The bias of the last request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bias {
    /// Bans tokens of its own answer and of its neighbour's.
    Bans,
    /// Leaves one token that no answer contains.
    Forces,
}

/// A bias that exceeds any model's logits.
const FORCED: f32 = 100.0;

/// The number of tokens to search for one that no answer contains.
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

/// If an engine's answers depend on their batch, no token is known in advance. Each request's options must hold all the same,
/// and other requests' options must have no effect.
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

/// The answer must end as its own request says, and respect its options.
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
        // A model may have its own end.
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
