//! The difference between the penalties: one counts how often a token came, the other whether it came.

use genset_backend_common::config::{Deviation, SamplingOption};

use super::generated;
use crate::check::{CheckResult, ensure, fail, skip};
use crate::trial::Trial;

/// A bias that exceeds any model's logits.
const FORCED: f32 = 100.0;

/// Enough for a frequency penalty of 2 per token to cancel that bias and the model's logits.
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

/// How often the prompt contains the token: often enough that a penalty of 2 each exceeds the bias, and within the 64 tokens
/// that some engines look back.
const PROMPT_TIMES: u32 = 62;

pub(super) async fn prompt_counts_where_declared(trial: Trial) -> CheckResult {
    use SamplingOption::{FrequencyPenalty, LogitBias};
    let live = trial.start().await?;
    live.needs(LogitBias)?;
    live.needs(FrequencyPenalty)?;
    if live.config.context_length_tokens <= PROMPT_TIMES {
        skip!(Level, "a prompt of {PROMPT_TIMES} tokens is too long");
    }
    let token = live.token(1);
    let mut request = live.greedy((0..PROMPT_TIMES).map(|_| token).collect(), 1);
    request.sampling.logit_bias = [(token, FORCED)].into();
    if generated(&live, request.clone()).await?.units() != [token] {
        skip!(
            NotDeclared,
            "a bias of {FORCED} does not force a token, for which there is DT06"
        );
    }
    request.sampling.frequency_penalty = Some(2.0);
    let is_counted = generated(&live, request).await?.units() != [token];
    let can = &live.config.capabilities;
    match (is_counted, can.deviates(Deviation::PenaltiesCountPrompt)) {
        (true, false) => fail!(
            "a frequency penalty of 2 took a bias of {FORCED} from a token that was not generated yet, but stands \
             {PROMPT_TIMES} times in the prompt"
        ),
        (false, true) => fail!(
            "the engine declares that penalties count the prompt's tokens, but a token that stands there {PROMPT_TIMES} times \
             kept a bias of {FORCED} under a frequency penalty of 2: take the deviation off the declaration"
        ),
        (true, true) | (false, false) => Ok(()),
    }
}
