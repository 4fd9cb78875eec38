//! The usage of long prompts and answers, and of prompts that are partly cached.

use std::hash::{BuildHasher, RandomState};

use genset_backend_common::TokenId;

use super::{completion_is_what_came, usage_of};
use crate::check::{CheckResult, Stop, ensure, skip};
use crate::checks::words::words_of;
use crate::trial::{Live, Trial};

/// Prompt lengths beyond a KV block, a byte's signed and unsigned range, and a chunk of prefill.
const PROMPTS: [u32; 4] = [65, 130, 300, 1000];

/// Answer lengths beyond the same.
const ANSWERS: [u32; 3] = [130, 300, 600];

pub(super) async fn long_prompts_and_answers(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let half = live.config.context_length_tokens / 2;
    let longest = if live.trial.keeps_virtual_time() {
        half
    } else {
        half.min(LONGEST_IN_REAL_TIME)
    };
    let prompts = PROMPTS.into_iter().filter(|len| *len < longest);
    for prompt_tokens in prompts.chain([longest]) {
        let words = words_of(&live, prompt_tokens).await?;
        // The time for a prompt that fills a context: an engine may compute prompts no faster than answers.
        let limit = live.trial.limits().start;
        let answer = live.answer_within(limit, live.request(words, 2)).await?;
        let usage = usage_of(&answer)?;
        ensure!(
            usage.prompt_tokens == prompt_tokens || !live.medium().is_tokens(),
            "a prompt of {prompt_tokens} tokens is counted as {}",
            usage.prompt_tokens
        );
    }
    for max_tokens in ANSWERS {
        let max_tokens = live.affordable_answer(4, max_tokens);
        let answer = live.answer(live.request(4, max_tokens)).await?;
        let what = format!("with max_tokens = {max_tokens}");
        completion_is_what_came(&answer, &what)?;
        let came = answer.generated().len();
        ensure!(
            u32::try_from(came) == Ok(max_tokens),
            "{came} tokens came {what}: {:?} ({:?})",
            answer.reason(),
            answer.error()
        );
    }
    Ok(())
}

/// About a second of prefill on a slow CPU.
const LONGEST_IN_REAL_TIME: u32 = 1024;

pub(super) async fn only_what_was_cached_counts(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let block = live.several_blocks() / 3;
    let (head, other, tail) = (
        live.prompt(block, 1),
        live.prompt(block, 2),
        live.prompt(2 * block + 1, 3),
    );
    let salt = unique_salt();
    let first = cached(&live, &salt, [head, tail.clone()].concat()).await?;
    if first.is_none() {
        skip!(NotDeclared, "the engine does not count cached tokens");
    }
    ensure!(
        first == Some(0),
        "a prompt that nobody sent before reused {first:?} tokens"
    );
    let moved = cached(&live, &salt, [other, tail].concat()).await?;
    ensure!(
        moved == Some(0),
        "a prompt reused {moved:?} tokens of one that begins otherwise and ends alike"
    );
    Ok(())
}

/// A live worker may have seen the same prompts in an earlier run; nobody has sent anything with this salt.
pub(crate) fn unique_salt() -> String {
    format!("{:x}", RandomState::new().hash_one("salt"))
}

async fn cached(live: &Live, salt: &str, prompt: Vec<TokenId>) -> Result<Option<u32>, Stop> {
    let mut request = live.greedy(prompt, 2);
    request.cache_salt = Some(salt.to_owned());
    let ctx = live.context(&request);
    let answer = live.outcome(request, ctx).await?;
    // An engine that cannot isolate prompts may say so.
    if let Some(error) = answer.error() {
        skip!(NotDeclared, "the engine takes no cache_salt: {error}");
    }
    Ok(usage_of(&answer)?.cached_tokens)
}
