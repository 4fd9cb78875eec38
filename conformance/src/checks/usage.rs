//! US: usage.
//!
//! A Worker corrects and reports the usage of an engine that counts wrongly; these checks judge the engine's own count.

use genset_backend_common::output::Usage;
use genset_backend_common::{CancelReason, GenerateRequest, TokenId};

use super::foretold::Foretold;
use crate::answer::Answer;
use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::medium::Medium;
use crate::trial::{Live, Trial};

mod long;

pub(super) use self::long::unique_salt;

pub(super) const CHECKS: &[Check] = &[
    // The type of the terminal always has a usage; if it was not filled in, it is all zeros.
    check!("US01", Core, Tokens, "the terminal's usage is filled in, however the sequence ended",
        clause: "LLMEngine::generate, Contract; Finished::usage",
        breaks: "answers that nobody can bill", usage_is_filled_in),
    check!("US02", Core, Tokens, "prompt_tokens is the prompt's length",
        clause: "Usage::prompt_tokens",
        breaks: "clients billed for a template or padding they did not send", prompt_tokens_are_the_prompts),
    check!("US03", Core, Tokens, "completion_tokens is the number of tokens streamed",
        clause: "Usage::completion_tokens",
        breaks: "bills that drift from what was delivered", completion_tokens_are_the_streams),
    // The total is computed from its parts, so it cannot disagree with them. What remains is arithmetic that wraps or saturates
    // if there is nothing to count.
    check!(tokens "US04", Core, Tokens, "the total is the prompt's length when the first token ends the sequence",
        clause: "Usage::total_tokens",
        breaks: "a count below zero that wraps into a bill of four billion tokens", nothing_streamed_costs_the_prompt),
    check!("US05", Strict, Tokens, "cached_tokens is at most the prompt's length, and a prompt sent again does not lower it",
        clause: "Usage::cached_tokens",
        breaks: "discounts for tokens that do not exist", cached_tokens_are_of_the_prompt),
    check!("US06", Core, Tokens, "after a cancellation, usage covers what was delivered",
        clause: "LLMEngine::generate, Contract: also when cancelled",
        breaks: "clients billed for work they did not get", cancelled_usage_is_what_was_delivered),
    check!("US07", Core, Tokens, "each of many requests at once has its own usage",
        clause: "LLMEngine::generate: called concurrently",
        breaks: "one client billed for another's tokens: a shared counter", concurrent_usage_is_each_ones),
    check!("US08", Core, Tokens, "usage is right for long prompts and long answers",
        clause: "Usage",
        breaks: "bills that are wrong from some length on", long::long_prompts_and_answers),
    check!(tokens "US09", Strict, Tokens, "cached_tokens counts what was cached before, from the prompt's beginning on",
        clause: "Usage::cached_tokens",
        breaks: "discounts for what was computed, and dashboards of a cache that does nothing", long::only_what_was_cached_counts),
];

async fn usage_is_filled_in(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut ends = vec![("length", live.request(4, 4))];
    if live.medium().is_tokens() {
        ends.push(("a stop token", Foretold::ask(&live, 2).await?.stopping()));
    }
    for (end, request) in ends {
        let usage = usage_of(&live.answer(request).await?)?;
        ensure!(
            usage != Usage::default(),
            "the usage of an answer that ended by {end} is all zeros"
        );
    }
    Ok(())
}

/// The usage of an answer, which must have one.
fn usage_of(answer: &Answer) -> Result<Usage, Stop> {
    match answer.usage() {
        Some(usage) => Ok(usage),
        None => fail!(
            "there is no usage: the stream ended with {:?}",
            answer.error()
        ),
    }
}

async fn prompt_tokens_are_the_prompts(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let declared = Medium::declared(&live.config.capabilities);
    // The usage of a body is up to the author of its answer.
    for medium in declared.filter(|medium| *medium != Medium::Body) {
        prompt_tokens_in(&live, medium).await?;
    }
    Ok(())
}

/// Tests each medium that the engine declares, not only that of the other checks: an engine cannot count what it does not read.
async fn prompt_tokens_in(live: &Live, medium: Medium) -> CheckResult {
    let mut longest = 0;
    for prompt_len in [1, 2, 17, 33] {
        let mut request = live.request(1, 2);
        request.input = medium.input(live.prompt(prompt_len, 0));
        let counted = usage_of(&live.answer(request).await?)?.prompt_tokens;
        ensure!(
            !medium.is_tokens() || usize::try_from(counted) == Ok(prompt_len),
            "a prompt of {prompt_len} tokens is counted as {counted}"
        );
        // Only the engine knows the number of tokens of a text. But more words are not fewer tokens, and many more are more.
        let least = if prompt_len > 2 {
            longest + 1
        } else {
            longest.max(1)
        };
        ensure!(
            counted >= least,
            "a prompt of {prompt_len} words, sent as {medium:?}, is counted as {counted} tokens, a shorter one as {longest}"
        );
        longest = counted;
    }
    Ok(())
}

/// The expected count of a prompt: its tokens, or for a text, the engine's count when it was alone.
async fn prompt_tokens_of(live: &Live, prompt: Vec<TokenId>) -> Result<u32, Stop> {
    if live.medium().is_tokens() {
        return Ok(u32::try_from(prompt.len()).unwrap_or(u32::MAX));
    }
    let alone = live.answer(live.greedy(prompt, 1)).await?;
    Ok(usage_of(&alone)?.prompt_tokens)
}

async fn completion_tokens_are_the_streams(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut ending_itself = live.request(4, 64);
    ending_itself.stop.ignore_eos = false;
    let mut requests = vec![live.request(4, 1), live.request(4, 9), ending_itself];
    if live.medium().is_tokens() {
        let foretold = Foretold::ask(&live, 2).await?;
        requests.extend([foretold.stopping(), foretold.ending()]);
    }
    for request in requests {
        let stop = request.stop.clone();
        let answer = live.answer(request).await?;
        completion_is_what_came(&answer, &format!("with {stop:?}"))?;
    }
    Ok(())
}

/// Compares the number of delivered tokens with the engine's count.
fn completion_is_what_came(answer: &Answer, what: &str) -> CheckResult {
    let (usage, tokens) = (usage_of(answer)?, answer.generated().len());
    ensure!(
        usize::try_from(usage.completion_tokens) == Ok(tokens),
        "{tokens} tokens were streamed and {} counted, {what}",
        usage.completion_tokens
    );
    Ok(())
}

async fn nothing_streamed_costs_the_prompt(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let foretold = Foretold::ask(&live, 0).await?;
    let answer = live.answer(foretold.stopping()).await?;
    foretold.expect_met(&answer)?;
    let (total, streamed) = (usage_of(&answer)?.total_tokens(), answer.tokens().len());
    ensure!(
        usize::try_from(total) == Ok(4 + streamed),
        "a prompt of 4 tokens and {streamed} streamed make a total of {total}"
    );
    Ok(())
}

async fn cached_tokens_are_of_the_prompt(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    // Of odd length, so that rounding to blocks shows.
    let request = live.request(61, 2);
    let mut cached = Vec::new();
    for _ in 0..3 {
        let usage = usage_of(&live.answer(request.clone()).await?)?;
        let (tokens, prompt) = (usage.cached_tokens.unwrap_or(0), usage.prompt_tokens);
        let prompt = if live.medium().is_tokens() {
            61
        } else {
            prompt
        };
        ensure!(
            tokens <= prompt,
            "of a prompt of {prompt} tokens, {tokens} are said to be cached"
        );
        cached.push(usage.cached_tokens);
    }
    if cached.iter().all(Option::is_none) {
        skip!(NotDeclared, "the engine does not count cached tokens");
    }
    ensure!(
        cached.is_sorted(),
        "the same prompt, sent again and again, was cached in part: {cached:?}"
    );
    Ok(())
}

async fn cancelled_usage_is_what_was_delivered(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let prompt_tokens = prompt_tokens_of(&live, live.prompt(7, 0)).await?;
    let room = live.config.context_length_tokens.saturating_sub(7).max(1);
    let mut running = live.generate(live.request(7, room.min(1000))).await?;
    let read = running.read_tokens(3).await?.len();
    running.ctx.cancel(CancelReason::Client);
    let answer = running.finish().await?;
    let (usage, delivered) = (usage_of(&answer)?, read + answer.generated().len());
    ensure!(
        usize::try_from(usage.completion_tokens) == Ok(delivered),
        "{delivered} tokens were delivered before the cancellation took hold, {} are counted",
        usage.completion_tokens
    );
    ensure!(
        usage.prompt_tokens == prompt_tokens,
        "a prompt of {prompt_tokens} tokens is counted as {} after a cancellation",
        usage.prompt_tokens
    );
    Ok(())
}

async fn concurrent_usage_is_each_ones(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let lengths: Vec<(usize, u32)> = vec![(4, 3), (8, 11), (12, 5), (15, 8)];
    let requests: Vec<GenerateRequest> = lengths
        .iter()
        .zip(0..)
        .map(|((prompt_len, max_tokens), seed)| {
            live.greedy(live.prompt(*prompt_len, seed), *max_tokens)
        })
        .collect();
    let mut prompts = Vec::new();
    for ((prompt_len, _), seed) in lengths.iter().zip(0..) {
        prompts.push(prompt_tokens_of(&live, live.prompt(*prompt_len, seed)).await?);
    }
    let answers = live.answers(requests).await?;
    for (answer, ((prompt_len, max_tokens), prompt)) in
        answers.iter().zip(lengths.iter().zip(prompts))
    {
        let what =
            format!("for {prompt_len} prompt tokens and max_tokens = {max_tokens}, among others");
        completion_is_what_came(answer, &what)?;
        let prompt_tokens = usage_of(answer)?.prompt_tokens;
        ensure!(
            prompt_tokens == prompt,
            "{prompt_tokens} prompt tokens are counted {what}"
        );
    }
    Ok(())
}
