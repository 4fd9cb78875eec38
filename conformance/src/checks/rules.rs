//! RD: rules that hold for every stream, whatever the request.
//!
//! [`Reader`](crate::rules) checks every item in every check, so another check may see a rule broken; the rule's row in the
//! report then names that check. The checks here send requests that the others do not.

mod stalled;

use std::num::NonZeroU32;

use genset_backend_common::{
    CancelReason, GenerateRequest,
    config::{Deviation, SamplingOption},
};

use crate::check::{Check, CheckResult, check, skip};
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!(tokens "RD01", Core, Tokens, "in every stream, ids are below the vocabulary size: of tokens, candidates and the token that stopped",
        clause: "EngineConfig::vocab_size",
        breaks: "panics in the detokenizer, now and then", ids_are_in_the_vocabulary),
    check!("RD02", Core, Tokens, "in every stream, usage is what was sent and what came",
        clause: "LLMEngine::generate, Contract",
        breaks: "bills that are wrong for the requests nobody tried", ask_for_all_sorts),
    check!(tokens "RD03", Core, Tokens, "in every stream, there are as many log probabilities as tokens, or none where none were asked for",
        clause: "TokenChunk::logprobs",
        breaks: "log probabilities shown beside the wrong tokens", ask_for_all_sorts),
    check!("RD04", Core, Tokens, "no request kills the engine",
        clause: "StartContext::health",
        breaks: "workers taken out of service by an ordinary request", ask_for_all_sorts),
    check!("RD05", Core, KvEvents, "the events of the prefix cache never contradict each other, also after it was cleared",
        clause: "KvEventData::Stored",
        breaks: "prefix indexes that drift from the cache for good", ask_for_all_sorts),
    check!("RD06", Strict, Tokens, "in every stream, no more tokens come than the engine's pace explains, also after nobody read",
        clause: "OutputStream",
        breaks: "answers computed whole behind clients that are slow or gone: memory and a device for nobody", stalled),
];

/// Longer than the answers of the other groups, and than a power of two.
const LONG_ANSWER_TOKENS: u32 = 140;

async fn ids_are_in_the_vocabulary(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    if live.config.vocab_size.is_none() {
        skip!(
            NotDeclared,
            "the engine does not know its vocabulary's size"
        );
    }
    live.put_away().await?;
    ask_for_all_sorts(trial).await
}

async fn ask_for_all_sorts(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let sorts = sorts(&live);
    for request in &sorts {
        live.answer(request.clone()).await?;
    }
    leave(&live).await?;
    live.answers(sorts.into_iter().take(places(&live)).collect())
        .await?;
    clear_meanwhile(&live).await
}

async fn stalled(trial: Trial) -> CheckResult {
    stalled::come_soon_enough(&trial).await?;
    ask_for_all_sorts(trial).await
}

/// How many requests the engine runs at once, up to four.
fn places(live: &Live) -> usize {
    let places = live.config.max_num_seqs.unwrap_or(4).clamp(1, 4);
    usize::try_from(places).unwrap_or(1)
}

/// Requests that ask for different things besides tokens.
fn sorts(live: &Live) -> Vec<GenerateRequest> {
    let can = &live.config.capabilities;
    let most_logprobs = can.max_logprobs;
    let plain = live.request(9, 12);
    let mut rated = plain.clone();
    rated.output.logprobs = most_logprobs;
    let mut sampled = rated.clone();
    sampled.sampling.temperature = live.can(SamplingOption::Temperature).then_some(1.0);
    sampled.sampling.seed = live.can(SamplingOption::Seed).then_some(1);
    let mut at_least = plain.clone();
    if !can.deviates(Deviation::NoMinTokens) {
        at_least.stop.min_tokens = 6;
    }
    let mut ending = plain.clone();
    ending.stop.ignore_eos = false;
    if live.medium().is_tokens() {
        ending.stop.stop_token_ids = (0..9).map(|seed| live.token(seed)).collect();
        ending.stop.eos_token_ids = (9..12).map(|seed| live.token(seed)).collect();
    }
    let long = live.request(5, live.affordable_answer(5, LONG_ANSWER_TOKENS));
    vec![rated, sampled, at_least, ending, long, plain]
}

/// One client that cancels, with a Worker's abort hint, and one that disconnects.
async fn leave(live: &Live) -> CheckResult {
    let long = live.affordable_answer(9, LONG_ANSWER_TOKENS);
    let mut cancelled = live.generate(live.request(9, long)).await?;
    cancelled.read_tokens(1).await?;
    cancelled.ctx.cancel(CancelReason::Client);
    let ctx = cancelled.ctx.clone();
    cancelled.finish().await?;
    live.abort(&ctx).await?;
    let mut dropped = live.generate(live.request(9, long)).await?;
    dropped.read_tokens(1).await?;
    drop(dropped);
    Ok(())
}

/// Clears the prefix cache during a request, and sends the same prompt again.
async fn clear_meanwhile(live: &Live) -> CheckResult {
    let size = live.config.kv_block_size.map_or(8, NonZeroU32::get);
    let half = live.config.context_length_tokens / 2;
    let prompt = usize::try_from(size.saturating_mul(2).min(half)).unwrap_or(usize::MAX);
    let answer = live.affordable_answer(prompt, size.saturating_mul(3).min(LONG_ANSWER_TOKENS));
    let request = live.greedy(live.prompt(prompt, 1), answer);
    let mut running = live.generate(request.clone()).await?;
    running.read_tokens(1).await?;
    if let Some(controls) = live.subject.engine.controls() {
        // KV06 judges whether it can.
        let clear = controls.clear_prefix_cache();
        drop(live.trial.call("clear_prefix_cache", clear).await?);
    }
    running.finish().await?;
    live.answer(request).await?;
    Ok(())
}
