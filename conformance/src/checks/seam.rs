//! MG: continuing after another instance's tokens, with every option of a request.

use genset_backend_common::{GenerateRequest, TokenId, config::SamplingOption};

use super::near::{self, Choice, Pair};
use super::resume::{Whole, declared, go_on_near, grammars, guide, needs_exact};
use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("MG06", Strict, Resume, "a resumed request with a seed draws on where it was",
        clause: "SamplingOptions::seed",
        breaks: "sampled answers that turn to something else where a worker was lost", seeded),
    check!("MG07", Strict, Resume, "penalties count resumed tokens as generated",
        clause: "SamplingOptions::presence_penalty",
        breaks: "answers that begin to repeat themselves where a worker was lost", penalized),
    check!("MG08", Strict, Resume, "min_tokens of a resumed request counts its new tokens only",
        clause: "StopConditions::min_tokens",
        breaks: "answers that stop before the length that was asked for, where a worker was lost", least),
    check!("MG09", Strict, Resume, "log probabilities have no seam",
        clause: "TokenLogprob",
        breaks: "scores of answers that depend on which worker was lost", rated),
    check!("MG10", Strict, Resume, "every further kind of grammar goes on from the tokens that were already generated",
        clause: "GenerateRequest::resumed_tokens",
        breaks: "structured output that is broken where a worker was lost", guided),
    check!("MG11", Strict, Resume, "a guided request with a seed draws on where it was",
        clause: "GenerateRequest::resumed_tokens",
        breaks: "structured answers that change where a worker was lost", guided_and_seeded),
    check!("MG12", Strict, Resume, "a resumed request with a seed and penalties draws on where it was",
        clause: "SamplingOptions::presence_penalty",
        breaks: "sampled answers that begin to repeat themselves where a worker was lost", penalized_and_seeded),
];

/// The number of tokens in an uninterrupted answer.
const WHOLE: u32 = 32;
/// The tolerance of log probabilities: engines compute prompts and single tokens with different sums.
const SAME_LOGPROB: f32 = 1e-2;

/// A request prepared by `set`, and its uninterrupted answer.
async fn whole(
    live: &Live,
    seed: u64,
    set: impl FnOnce(&mut GenerateRequest),
) -> Result<Whole, Stop> {
    let mut request = live.greedy(live.prompt(9, seed), WHOLE);
    set(&mut request);
    Whole::of(live, request).await
}

/// Makes the engine choose freely, but repeatably.
fn draw(live: &Live, request: &mut GenerateRequest, seed: u64) {
    let sampling = &mut request.sampling;
    sampling.seed = Some(seed);
    sampling.temperature = Some(1.0);
    sampling.top_p = live.can(SamplingOption::TopP).then_some(0.95);
    sampling.min_p = live.can(SamplingOption::MinP).then_some(0.01);
    sampling.top_k = live.can(SamplingOption::TopK).then_some(64);
}

fn draws(live: &Live) -> CheckResult {
    needs_exact(live)?;
    live.needs(SamplingOption::Seed)?;
    live.needs(SamplingOption::Temperature)?;
    Ok(())
}

async fn seeded(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    draws(&live)?;
    let mut wholes = Vec::new();
    for seed in 0..3 {
        wholes.push(whole(&live, seed, |request| draw(&live, request, seed + 5)).await?);
    }
    draw_on(&live, &wholes).await
}

/// Checks that drawn answers continue after each cut, as exactly as the engine declares.
async fn draw_on(live: &Live, wholes: &[Whole]) -> CheckResult {
    if live.varies_with_batch() {
        return go_on_near(live, Choice::Seeded, wholes).await;
    }
    for whole in wholes {
        whole.goes_on(live, whole.cuts()).await?;
    }
    Ok(())
}

async fn penalized(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    needs_exact(&live)?;
    let wholes = with_penalties(&live, |_, _| ()).await?;
    if live.varies_with_batch() {
        return penalized_nearly(&live, &wholes).await;
    }
    for whole in wholes {
        whole.goes_on(&live, whole.cuts()).await?;
    }
    Ok(())
}

/// More answers than rounding turns to something else.
const MANY: usize = 6;

/// Most answers go on as they would have without penalties. So those are compared a second time that go on otherwise if the
/// tokens before the cut are prompt, which no penalty counts.
async fn penalized_nearly(live: &Live, wholes: &[Whole]) -> CheckResult {
    let mut pairs: Vec<Pair> = Vec::new();
    let mut telling: Vec<Pair> = Vec::new();
    for whole in wholes {
        for cut in whole.cuts() {
            let (uninterrupted, rest) = (whole.answer.after(cut), whole.rest(live, cut).await?);
            let uncounted = whole.as_prompt(live, cut).await?;
            if near::begin_otherwise(&uninterrupted, &uncounted) {
                telling.push((uninterrupted.clone(), rest.clone()));
            }
            pairs.push((uninterrupted, rest));
        }
    }
    near::ensure_all_near(Choice::Penalized, &pairs, "resumed")?;
    let astray = near::astray(&telling);
    ensure!(
        astray < MANY || astray * 2 < telling.len(),
        "of {} answers that change if penalties do not count the resumed tokens, {astray} begin otherwise than uninterrupted",
        telling.len()
    );
    Ok(())
}

async fn penalized_and_seeded(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    draws(&live)?;
    let wholes = with_penalties(&live, |request, seed| draw(&live, request, seed)).await?;
    draw_on(&live, &wholes).await?;
    match live.varies_with_batch() {
        true => draws_count(&live, &wholes).await,
        false => Ok(()),
    }
}

/// More first tokens than rounding turns to those of a request without penalties.
const SEVERAL: u32 = 4;

/// Penalties change few of the drawn tokens, and rounding changes some. So the first token after each cut is compared with that of
/// the same request without penalties, where the two must differ: an engine that does not count the resumed tokens has penalized
/// nothing yet.
async fn draws_count(live: &Live, wholes: &[Whole]) -> CheckResult {
    let (mut counted, mut forgotten) = (0, 0);
    for whole in wholes {
        for cut in whole.cuts() {
            let mut free = whole.resumed(cut);
            free.stop.max_tokens = Some(1);
            free.sampling.presence_penalty = None;
            free.sampling.frequency_penalty = None;
            free.sampling.repetition_penalty = None;
            let free = live.answer(free).await?.tokens().first().copied();
            let uninterrupted = whole.answer.tokens().get(cut).copied();
            if free != uninterrupted {
                let resumed = whole.rest(live, cut).await?.tokens().first().copied();
                counted += u32::from(resumed == uninterrupted);
                forgotten += u32::from(resumed == free);
            }
        }
    }
    ensure!(
        forgotten < SEVERAL || forgotten <= counted,
        "of the resumed answers that penalties change, {forgotten} begin as without penalties, and {counted} as uninterrupted: \
         draws do not count the resumed tokens"
    );
    Ok(())
}

type Penalty = (SamplingOption, fn(&mut GenerateRequest));

const PENALTIES: [Penalty; 3] = [
    (SamplingOption::PresencePenalty, |r| {
        r.sampling.presence_penalty = Some(1.5);
    }),
    (SamplingOption::FrequencyPenalty, |r| {
        r.sampling.frequency_penalty = Some(1.5);
    }),
    (SamplingOption::RepetitionPenalty, |r| {
        r.sampling.repetition_penalty = Some(1.5);
    }),
];

/// The answers to requests with each penalty, prepared by `also`.
async fn with_penalties(
    live: &Live,
    also: impl Fn(&mut GenerateRequest, u64),
) -> Result<Vec<Whole>, Stop> {
    let mut wholes = Vec::new();
    for (option, set) in PENALTIES {
        if !live.can(option) {
            continue;
        }
        for seed in 0..3 {
            // With few tokens to choose from, tokens repeat and are penalized.
            let favoured: Vec<TokenId> = (0..3).map(|place| live.token(seed + place)).collect();
            let is_biased = live.can(SamplingOption::LogitBias);
            let whole = whole(live, seed, |request| {
                set(request);
                also(request, seed);
                if is_biased {
                    request.sampling.logit_bias =
                        favoured.into_iter().map(|token| (token, 10.0)).collect();
                }
            });
            wholes.push(whole.await?);
        }
    }
    if wholes.is_empty() {
        skip!(NotDeclared, "the engine declares no penalty");
    }
    Ok(wholes)
}

/// The minimum number of tokens, and the position of an earlier token that would stop the answer.
const LEAST: usize = 12;
const STOP_AT: usize = 10;

async fn least(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs_min_tokens()?;
    let plain = whole(&live, 3, |_| ()).await?.answer.tokens();
    let Some(stop) = plain.get(STOP_AT).copied() else {
        fail!("a request for {WHOLE} tokens gave {}", plain.len());
    };
    let whole = whole(&live, 3, |request| {
        request.stop.stop_token_ids = [stop].into();
        request.stop.min_tokens = u32::try_from(LEAST).unwrap_or(u32::MAX);
    });
    let whole = whole.await?;
    let mut pairs: Vec<Pair> = Vec::new();
    for cut in [1, 5, 8] {
        let uninterrupted = whole.expected(&live, cut).await?;
        let resumed = whole.rest(&live, cut).await?;
        let (expected, rest) = (uninterrupted.tokens(), resumed.tokens());
        // FN10 judges whether the whole answer has that many.
        let expected = expected.get(..LEAST - cut).unwrap_or_default();
        let seen = rest.get(..expected.len());
        let is_kept = match live.varies_with_batch() {
            true => seen.is_some(),
            false => seen == Some(expected),
        };
        ensure!(
            is_kept,
            "at least {LEAST} tokens were asked for, and after {cut} of them came {rest:?}, expected {expected:?}"
        );
        pairs.push((uninterrupted, resumed));
    }
    match live.varies_with_batch() {
        true => near::ensure_all_near(Choice::Greedy, &pairs, "resumed"),
        false => Ok(()),
    }
}

async fn rated(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let Some(most) = live.config.capabilities.max_logprobs else {
        skip!(NotDeclared, "the engine does not declare log probabilities");
    };
    let top = most.min(2);
    let whole = whole(&live, 3, |request| request.output.logprobs = Some(top)).await?;
    if live.varies_with_batch() || !live.config.capabilities.resume {
        let mut pairs: Vec<Pair> = Vec::new();
        for cut in whole.cuts() {
            pairs.push((whole.answer.after(cut), whole.rest(&live, cut).await?));
        }
        return near::ensure_all_near(Choice::Greedy, &pairs, "resumed");
    }
    let expected = whole.answer.logprobs();
    for cut in whole.cuts() {
        let rest = whole.rest(&live, cut).await?.logprobs();
        let uninterrupted = expected.iter().skip(cut);
        let differs = |(a, b): (&f32, &f32)| (a - b).abs() > SAME_LOGPROB;
        let seam = rest.iter().zip(uninterrupted).position(|(ours, theirs)| {
            let tops = ours.top.iter().map(|at| &at.logprob);
            let theirs_tops = theirs.top.iter().map(|at| &at.logprob);
            differs((&ours.logprob, &theirs.logprob)) || tops.zip(theirs_tops).any(differs)
        });
        ensure!(
            seam.is_none() && !rest.is_empty(),
            "resumed after {cut} tokens the log probabilities are {rest:?}, uninterrupted {:?}",
            expected.get(cut..)
        );
    }
    Ok(())
}

async fn guided(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    needs_exact(&live)?;
    // MG04 covers the first kind.
    let mut wholes = Vec::new();
    for guided in declared(&live, &grammars()[1..])? {
        wholes.push(whole(&live, 3, |request| guide(request, guided)).await?);
    }
    end_alike(&live, Choice::Greedy, &wholes).await
}

/// Checks that guided answers come to the same ends after each cut, as exactly as the engine declares.
async fn end_alike(live: &Live, choice: Choice, wholes: &[Whole]) -> CheckResult {
    if live.varies_with_batch() {
        return go_on_near(live, choice, wholes).await;
    }
    for whole in wholes {
        whole.ends_alike(live, whole.cuts()).await?;
    }
    Ok(())
}

async fn guided_and_seeded(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    draws(&live)?;
    let mut wholes = Vec::new();
    // Those that leave a choice to draw from.
    for guided in declared(&live, &grammars()[1..3])? {
        let whole = whole(&live, 4, |request| {
            guide(request, guided);
            draw(&live, request, 11);
        });
        wholes.push(whole.await?);
    }
    end_alike(&live, Choice::Seeded, &wholes).await
}
