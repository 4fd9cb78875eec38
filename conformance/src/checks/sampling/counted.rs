//! What tells the penalties apart: one counts how often a token came, the other whether it did.

use genset_backend_common::SamplingOption;

use super::generated;
use crate::check::{CheckResult, ensure, skip};
use crate::trial::Trial;

/// A bias that no model's logits outweigh.
const FORCED: f32 = 100.0;

/// Enough for a frequency penalty of 2 a token to take that bias away, and what the model's logits add to it.
const ANSWER_TOKENS: u32 = 140;

pub(super) async fn frequency_adds_up(trial: Trial) -> CheckResult {
    use SamplingOption::{FrequencyPenalty, LogitBias, PresencePenalty};
    let live = trial.start().await?;
    if !live.can(LogitBias) || !(live.can(FrequencyPenalty) || live.can(PresencePenalty)) {
        skip!(
            NotDeclared,
            "the engine does not declare logit_bias and a penalty"
        );
    }
    let room = live.affordable_answer(8, ANSWER_TOKENS);
    if room < ANSWER_TOKENS {
        skip!(Level, "an answer of {ANSWER_TOKENS} tokens is too long");
    }
    let mut request = live.greedy(live.prompt(8, 0), ANSWER_TOKENS);
    let token = live.token(1);
    request.sampling.logit_bias = [(token, FORCED)].into();
    if live.can(PresencePenalty) {
        let mut once = request.clone();
        once.sampling.presence_penalty = Some(2.0);
        let answer = generated(&live, once).await?;
        let other = answer.units().iter().position(|unit| *unit != token);
        ensure!(
            other.is_none(),
            "a presence penalty of 2 took a bias of {FORCED} away after {other:?} tokens: it counts each time"
        );
    }
    if live.can(FrequencyPenalty) {
        let mut each = request;
        each.sampling.frequency_penalty = Some(2.0);
        let answer = generated(&live, each).await?;
        ensure!(
            answer.units().iter().any(|unit| *unit != token),
            "a frequency penalty of 2 left a token that came {ANSWER_TOKENS} times with a bias of {FORCED}: it counts once"
        );
    }
    Ok(())
}
