//! MG: continuing after another instance's tokens, as a router does when an instance is lost during an answer.
//!
//! An engine that takes those tokens only as prompt (`resume_as_prompt`) is compared with its own answer to that prompt, and
//! receives no options that count them as generated. An engine whose answers depend on their batch goes on nearly as it would
//! have: a resumed answer is in another batch.

use genset_backend_common::output::Usage;
use genset_backend_common::{FinishReason, GenerateRequest, GuidedDecoding, Input};
use serde_json::json;

use super::near::{self, Choice, Pair};
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

/// A request and its uninterrupted answer.
pub(super) struct Whole {
    request: GenerateRequest,
    pub(super) answer: Answer,
}

impl Whole {
    pub(super) async fn of(live: &Live, request: GenerateRequest) -> Result<Self, Stop> {
        let request = near::rated(live, request);
        let answer = live.answer(request.clone()).await?;
        ensure!(
            answer.finished().is_some(),
            "the uninterrupted request failed: {:?}",
            answer.error()
        );
        Ok(Self { request, answer })
    }

    /// A greedy request for [`WHOLE`] tokens.
    async fn plain(live: &Live) -> Result<Self, Stop> {
        let whole = Self::of(live, live.greedy(live.prompt(9, 3), WHOLE)).await?;
        let count = whole.answer.tokens().len();
        ensure!(
            u32::try_from(count) == Ok(WHOLE),
            "a request for {WHOLE} tokens gave {count}"
        );
        Ok(whole)
    }

    /// A few positions to cut it, including the first and the last.
    pub(super) fn cuts(&self) -> Vec<usize> {
        let last = self.answer.tokens().len().saturating_sub(1);
        let mut cuts = vec![1, last / 4, last / 2, last];
        cuts.retain(|cut| (1..=last).contains(cut));
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }

    /// The request that continues after the first `cut` tokens, as a router makes it.
    pub(super) fn resumed(&self, cut: usize) -> GenerateRequest {
        let count = u32::try_from(cut).unwrap_or(u32::MAX);
        let mut request = self.request.clone();
        if let Input::Tokens(tokens) = &mut request.input {
            tokens.extend_from_slice(&self.answer.tokens()[..cut]);
        }
        request.resumed_tokens = count;
        let stop = &mut request.stop;
        stop.max_tokens = stop.max_tokens.map(|max| max.saturating_sub(count));
        stop.min_tokens = stop.min_tokens.saturating_sub(count);
        request
    }

    /// The answer to that request.
    pub(super) async fn rest(&self, live: &Live, cut: usize) -> Result<Answer, Stop> {
        live.answer(self.resumed(cut)).await
    }

    /// The answer to a prompt that ends with the first `cut` tokens, if they are nothing but prompt.
    pub(super) async fn as_prompt(&self, live: &Live, cut: usize) -> Result<Answer, Stop> {
        let mut request = self.resumed(cut);
        request.resumed_tokens = 0;
        live.answer(request).await
    }

    /// What must come after the first `cut` tokens: the rest of the answer, or for an engine that takes another instance's
    /// tokens only as prompt, its answer to such a prompt.
    pub(super) async fn expected(&self, live: &Live, cut: usize) -> Result<Answer, Stop> {
        match live.config.capabilities.resume {
            true => Ok(self.answer.after(cut)),
            false => self.as_prompt(live, cut).await,
        }
    }

    /// Checks that it continues unchanged after each cut. MG02 judges the number of tokens.
    pub(super) async fn goes_on(
        &self,
        live: &Live,
        cuts: impl IntoIterator<Item = usize>,
    ) -> CheckResult {
        for cut in cuts {
            let expected = self.expected(live, cut).await?.tokens();
            let rest = self.rest(live, cut).await?.tokens();
            let common = rest.len().min(expected.len());
            ensure!(
                common > 0 && rest[..common] == expected[..common],
                "resumed after {cut} tokens came {rest:?}, expected {expected:?}"
            );
        }
        Ok(())
    }

    /// As [`Self::goes_on`], with the same end.
    pub(super) async fn ends_alike(
        &self,
        live: &Live,
        cuts: impl IntoIterator<Item = usize>,
    ) -> CheckResult {
        let tokens = self.answer.tokens();
        for cut in cuts {
            let rest = self.rest(live, cut).await?;
            ensure!(
                rest.tokens() == tokens[cut..] && rest.reason() == self.answer.reason(),
                "resumed after {cut} tokens came {:?} ({:?}), uninterrupted {:?} ({:?})",
                rest.tokens(),
                rest.reason(),
                &tokens[cut..],
                self.answer.reason()
            );
        }
        Ok(())
    }
}

/// Checks that answers continue nearly as they must after each cut, for an engine whose answers depend on their batch.
pub(super) async fn go_on_near(live: &Live, choice: Choice, wholes: &[Whole]) -> CheckResult {
    let mut pairs: Vec<Pair> = Vec::new();
    for whole in wholes {
        for cut in whole.cuts() {
            let expected = whole.expected(live, cut).await?;
            pairs.push((expected, whole.rest(live, cut).await?));
        }
    }
    near::ensure_all_near(choice, &pairs, "resumed")
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

async fn same_continuation(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let whole = Whole::plain(&live).await?;
    match live.varies_with_batch() {
        true => go_on_near(&live, Choice::Greedy, &[whole]).await,
        false => whole.goes_on(&live, CUTS).await,
    }
}

async fn remaining_max_tokens(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let whole = Whole::plain(&live).await?;
    for cut in CUTS {
        let rest = whole.rest(&live, cut).await?;
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
    let whole = Whole::plain(&live).await?;
    let Some(expected) = whole.answer.usage() else {
        fail!("the uninterrupted request has no usage");
    };
    for cut in CUTS {
        let Some(usage) = whole.rest(&live, cut).await?.usage() else {
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
    let guided = declared(&live, &grammars()[..3])?.swap_remove(0);
    let mut request = live.greedy(live.prompt(9, 3), WHOLE);
    guide(&mut request, guided);
    let whole = Whole::of(&live, request).await?;
    let count = whole.answer.tokens().len();
    ensure!(
        whole.answer.reason() == Some(FinishReason::Stop) && count > 0,
        "the uninterrupted guided request did not come to its end: {:?}",
        whole.answer.items.last()
    );
    match live.varies_with_batch() {
        true => go_on_near(&live, Choice::Greedy, &[whole]).await,
        false => whole.ends_alike(&live, 1..count).await,
    }
}

/// One text for each kind of grammar that all engines understand alike.
pub(super) fn grammars() -> [GuidedDecoding; 4] {
    let texts = [
        "The quick brown fox jumps over the lazy dog.",
        "Pack my box with five dozen liquor jugs.",
    ];
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "ok"],
        "properties": {
            "name": { "type": "string", "minLength": 4, "maxLength": 12 },
            "ok": { "type": "boolean" },
        },
    });
    [
        GuidedDecoding::Choice(texts.map(str::to_owned).into()),
        GuidedDecoding::Regex("[a-z]{12} [0-9]{12}".into()),
        GuidedDecoding::JsonObject,
        GuidedDecoding::JsonSchema(schema),
    ]
}

pub(super) fn declared(
    live: &Live,
    grammars: &[GuidedDecoding],
) -> Result<Vec<GuidedDecoding>, Stop> {
    let kinds = &live.config.capabilities.guided;
    let guided: Vec<GuidedDecoding> = grammars
        .iter()
        .filter(|guided| kinds.contains(&guided.kind()))
        .cloned()
        .collect();
    if guided.is_empty() {
        skip!(
            NotDeclared,
            "the engine does not declare guided decoding that the check uses"
        );
    }
    Ok(guided)
}

/// Makes a grammar guide the request to its end.
pub(super) fn guide(request: &mut GenerateRequest, guided: GuidedDecoding) {
    request.stop.ignore_eos = false;
    request.stop.max_tokens = Some(128);
    request.guided = Some(guided.into());
}

async fn stop_after_cut(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let whole = Whole::plain(&live).await?;
    let mut pairs: Vec<Pair> = Vec::new();
    for cut in CUTS {
        let expected = whole.expected(&live, cut).await?;
        let Some(stop) = expected.tokens().first().copied() else {
            fail!("no token came after a prompt with {cut} tokens of an answer of {WHOLE}");
        };
        let mut request = whole.resumed(cut);
        request.stop.stop_token_ids = [stop].into();
        let rest = live.answer(request).await?;
        let tokens = rest.tokens();
        if tokens.is_empty() && rest.reason() == Some(FinishReason::Stop) {
            // The stop token is the first one, though it is not told.
            pairs.push((expected.clone(), expected));
            continue;
        }
        let is_another = tokens.first().is_some_and(|first| *first != stop);
        ensure!(
            live.varies_with_batch() && is_another,
            "the stop token {stop} came right after the cut at {cut}, yet the answer went on: {tokens:?} ({:?})",
            rest.reason()
        );
        pairs.push((expected, rest));
    }
    near::ensure_all_near(Choice::Greedy, &pairs, "resumed")
}
