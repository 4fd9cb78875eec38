//! Requests at once that ask for different things.

use genset_backend_common::{GenerateRequest, SamplingOption};

use crate::answer::Answer;
use crate::check::{CheckResult, Stop, ensure, fail, skip};
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

pub(super) async fn beside_others(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs_batch_invariance()?;
    ensure_room_for(&live, 4)?;
    let mut requests: Vec<GenerateRequest> = (0..4)
        .map(|seed| live.greedy(live.prompt(6, 40 + seed), ANSWER_TOKENS))
        .collect();
    let plain = alone(&live, &requests).await?;
    if plain != together(&live, &requests).await? {
        skip!(
            NotDeclared,
            "answers are not the same in a batch, for which there is CC04"
        );
    }
    let token = |of: usize, place: usize| plain[of].0.get(place).copied();
    // Each ends where its neighbour would not: by a token that comes in the neighbour's answer.
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
            _ if live.can(SamplingOption::LogitBias) => {
                let banned = neighbours.into_iter().chain(token(3, 2));
                own.sampling.logit_bias = banned.map(|token| (token, -100.0)).collect();
            }
            _ => {}
        }
    }
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
