//! MG: continuing after another instance's tokens, as a router does when an instance is lost during an answer.
//!
//! An engine that takes those tokens only as prompt (`resume_as_prompt`) is compared with its own answer to that prompt, and
//! receives no options that count them as generated.

use genset_backend_common::output::Usage;
use genset_backend_common::{
    FinishReason, GenerateRequest, GuidedDecoding, TokenId, config::GuidedKind,
};

use crate::answer::Answer;
use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("MG01", Core, Resume, "a resumed greedy request goes on as the uninterrupted one would have",
        clause: "GenerateRequest::resumed_tokens",
        breaks: "answers that repeat, skip or change words where a worker was lost", same_continuation),
    check!("MG02", Core, Resume, "max_tokens of a resumed request counts its new tokens only",
        clause: "GenerateRequest::resumed_tokens",
        breaks: "answers cut short, or too long, after a worker was lost", remaining_max_tokens),
    check!("MG03", Core, Resume, "usage of the parts adds up to that of the uninterrupted request",
        clause: "GenerateRequest::resumed_tokens",
        breaks: "tokens that are billed twice after a worker was lost", merged_usage),
    check!("MG04", Strict, Resume, "a grammar goes on from the tokens that were already generated",
        clause: "GenerateRequest::resumed_tokens",
        breaks: "JSON that starts again in its middle after a worker was lost", guided_resume),
    // Changed: stop strings belong to the frontend; an engine sees them as a stop token, here right after the cut.
    check!("MG05", Strict, Resume, "a stop token right after the cut ends the resumed request",
        clause: "StopConditions::stop_token_ids",
        breaks: "answers that run past their stop after a worker was lost", stop_after_cut),
];

/// The number of tokens in an uninterrupted answer.
const WHOLE: u32 = 24;
/// The positions at which it is cut.
const CUTS: [usize; 4] = [1, 5, 12, 23];

/// A prompt and its uninterrupted answer.
struct Uninterrupted {
    request: GenerateRequest,
    prompt: Vec<TokenId>,
    answer: Answer,
}

impl Uninterrupted {
    async fn of(live: &Live) -> Result<Self, Stop> {
        let prompt = live.prompt(9, 3);
        let request = live.greedy(prompt.clone(), WHOLE);
        let answer = live.answer(request.clone()).await?;
        let count = answer.tokens().len();
        ensure!(
            u32::try_from(count) == Ok(WHOLE),
            "a request for {WHOLE} tokens gave {count}"
        );
        Ok(Self {
            request,
            prompt,
            answer,
        })
    }

    /// The request that continues after the first `cut` tokens.
    fn resumed(&self, cut: usize) -> GenerateRequest {
        resumed(&self.request, &self.prompt, &self.answer.tokens()[..cut])
    }

    /// The tokens that must come after the first `cut`.
    async fn rest(&self, live: &Live, cut: usize) -> Result<Vec<TokenId>, Stop> {
        rest(live, self.resumed(cut), &self.answer, cut).await
    }
}

/// The tokens that must come after the first `cut` of an answer: the rest of it, or for an engine that takes another instance's
/// tokens only as prompt, its answer to such a prompt.
pub(super) async fn rest(
    live: &Live,
    mut resumed: GenerateRequest,
    uninterrupted: &Answer,
    cut: usize,
) -> Result<Vec<TokenId>, Stop> {
    if live.config.capabilities.resume {
        let tokens = uninterrupted.tokens();
        return Ok(tokens.get(cut..).unwrap_or_default().to_vec());
    }
    resumed.resumed_tokens = 0;
    Ok(live.answer(resumed).await?.tokens())
}

/// Skips a check for engines that do not know which tokens of a prompt were generated.
pub(super) fn needs_exact(live: &Live) -> CheckResult {
    if !live.config.capabilities.resume {
        skip!(
            NotDeclared,
            "the engine declares resume_as_prompt, not resume: to it the tokens of another instance are prompt"
        );
    }
    Ok(())
}

/// The request that continues after the tokens of `emitted`, as a router makes it.
pub(super) fn resumed(
    whole: &GenerateRequest,
    prompt: &[TokenId],
    emitted: &[TokenId],
) -> GenerateRequest {
    let count = u32::try_from(emitted.len()).unwrap_or(u32::MAX);
    let mut request = whole.clone();
    request.input = genset_backend_common::Input::Tokens([prompt, emitted].concat().into());
    request.resumed_tokens = count;
    request.stop.max_tokens = whole.stop.max_tokens.map(|max| max.saturating_sub(count));
    request.stop.min_tokens = whole.stop.min_tokens.saturating_sub(count);
    request
}

/// MG02 judges the number of tokens.
async fn same_continuation(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let whole = Uninterrupted::of(&live).await?;
    for cut in CUTS {
        let expected = whole.rest(&live, cut).await?;
        let rest = live.answer(whole.resumed(cut)).await?.tokens();
        let common = rest.len().min(expected.len());
        ensure!(
            common > 0 && rest[..common] == expected[..common],
            "resumed after {cut} tokens came {rest:?}, expected {expected:?}"
        );
    }
    Ok(())
}

async fn remaining_max_tokens(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let whole = Uninterrupted::of(&live).await?;
    for cut in CUTS {
        let rest = live.answer(whole.resumed(cut)).await?;
        let count = cut + rest.tokens().len();
        ensure!(
            u32::try_from(count) == Ok(WHOLE) && rest.reason() == Some(FinishReason::Length),
            "cut after {cut} of {WHOLE} tokens the parts have {count} and end with {:?}",
            rest.reason()
        );
    }
    Ok(())
}

async fn merged_usage(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let whole = Uninterrupted::of(&live).await?;
    let Some(expected) = whole.answer.usage() else {
        fail!("the uninterrupted request has no usage");
    };
    for cut in CUTS {
        let Some(usage) = live.answer(whole.resumed(cut)).await?.usage() else {
            fail!("the request resumed after {cut} tokens has no usage");
        };
        let cut = u32::try_from(cut).unwrap_or(u32::MAX);
        let merged = Usage {
            prompt_tokens: usage.prompt_tokens.saturating_sub(cut),
            completion_tokens: usage.completion_tokens.saturating_add(cut),
            cached_tokens: expected.cached_tokens,
            // Which tokens are predicted depends on where a step begins.
            predictions: expected.predictions,
        };
        ensure!(
            merged == expected,
            "cut after {cut} tokens the usage adds up to {merged:?}, uninterrupted it is {expected:?}"
        );
    }
    Ok(())
}

async fn guided_resume(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    needs_exact(&live)?;
    let guided = [
        (
            GuidedKind::Choice,
            GuidedDecoding::Choice(vec![TEXT.into(), OTHER_TEXT.into()]),
        ),
        (
            GuidedKind::Regex,
            GuidedDecoding::Regex("[a-z]{12} [0-9]{12}".into()),
        ),
        (GuidedKind::JsonObject, GuidedDecoding::JsonObject),
    ];
    let declared = &live.config.capabilities.guided;
    let guided = guided.into_iter().find(|(kind, _)| declared.contains(kind));
    let Some((_, guided)) = guided else {
        skip!(
            NotDeclared,
            "the engine does not declare guided decoding that the check uses"
        );
    };
    let prompt = live.prompt(9, 3);
    let mut request = live.greedy(prompt.clone(), 128);
    request.stop.ignore_eos = false;
    request.guided = Some(guided.into());
    let whole = live.answer(request.clone()).await?;
    let tokens = whole.tokens();
    ensure!(
        whole.reason() == Some(FinishReason::Stop) && !tokens.is_empty(),
        "the uninterrupted guided request did not come to its end: {:?}",
        whole.items.last()
    );
    for cut in 1..tokens.len() {
        let rest = live
            .answer(resumed(&request, &prompt, &tokens[..cut]))
            .await?;
        ensure!(
            rest.tokens() == tokens[cut..] && rest.reason() == Some(FinishReason::Stop),
            "resumed after {cut} guided tokens came {:?} ({:?}), uninterrupted {:?}",
            rest.tokens(),
            rest.reason(),
            &tokens[cut..]
        );
    }
    Ok(())
}

const TEXT: &str = "The quick brown fox jumps over the lazy dog.";
const OTHER_TEXT: &str = "Pack my box with five dozen liquor jugs.";

async fn stop_after_cut(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let whole = Uninterrupted::of(&live).await?;
    for cut in CUTS {
        let Some(stop) = whole.rest(&live, cut).await?.first().copied() else {
            fail!("no token came after a prompt with {cut} tokens of an answer of {WHOLE}");
        };
        let mut request = whole.resumed(cut);
        request.stop.stop_token_ids = [stop].into();
        let rest = live.answer(request).await?;
        ensure!(
            rest.tokens().is_empty() && rest.reason() == Some(FinishReason::Stop),
            "the stop token {stop} came right after the cut at {cut}, yet the answer went on: {:?} ({:?})",
            rest.tokens(),
            rest.reason()
        );
    }
    Ok(())
}
