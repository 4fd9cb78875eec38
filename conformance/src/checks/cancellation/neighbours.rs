//! A cancel has no effect on other requests.

use genset_backend_common::output::Violation;
use genset_backend_common::{CancelReason, GenerateRequest, RequestContext};

use crate::answer::{Answer, Generated};
use crate::check::{CheckResult, Stop, ensure};
use crate::checks::near::{self, Choice};
use crate::checks::pressure::{Begun, ensure_complete, ensure_room_for, long_request, request};
use crate::trial::{Live, Trial};

/// The number of tokens of each survivor.
const SURVIVOR_TOKENS: u32 = 12;

/// Begins a request with the given id.
async fn named(live: &Live, id: &str, seed: u64, max_tokens: u32) -> Result<Begun, Stop> {
    let request = request(live, 4, seed, max_tokens);
    let ctx = RequestContext::new(id).with_prompt_tokens(request.prompt_tokens().unwrap_or(0));
    Begun::of(live.begin(request, ctx).await?).await
}

pub(super) async fn untouched(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    ensure_room_for(&live, 3)?;
    // One id is a prefix of the other: ids must be compared whole.
    let victim = named(&live, "CN08-neighbour-1", 1, SURVIVOR_TOKENS).await?;
    let survivors = [
        named(&live, "CN08-neighbour-10", 2, SURVIVOR_TOKENS).await?,
        named(&live, "CN08-neighbour-2", 3, SURVIVOR_TOKENS).await?,
    ];

    let stranger = RequestContext::new("CN08-never-seen");
    stranger.cancel(CancelReason::Client);
    live.abort(&stranger).await?;
    victim.running.ctx.cancel(CancelReason::Client);
    live.abort(&victim.running.ctx).await?;
    drop(victim);

    for survivor in survivors {
        let answer = survivor.finish().await?;
        ensure!(
            answer.violation != Some(Violation::EndedWithoutTerminal),
            "the neighbour of a cancelled request ended without a terminal item"
        );
        ensure_complete(
            &answer,
            SURVIVOR_TOKENS,
            "the neighbour of a cancelled request",
        )?;
    }
    Ok(())
}

/// The request of a survivor.
fn survivor(live: &Live, seed: u64) -> GenerateRequest {
    near::rated(live, request(live, 4, seed, SURVIVOR_TOKENS))
}

/// The survivors' answers, beside a neighbour that is cancelled midway or not.
async fn beside(live: &Live, is_cancelled: bool) -> Result<Vec<Answer>, Stop> {
    let mut neighbour = live.generate(long_request(live, 9)).await?;
    let mut survivors = Vec::new();
    for seed in [1, 2] {
        survivors.push(Begun::new(live, survivor(live, seed)).await?);
    }
    neighbour.read_tokens(2).await?;
    if is_cancelled {
        neighbour.ctx.cancel(CancelReason::Client);
        live.abort(&neighbour.ctx).await?;
    }
    let mut answers = Vec::new();
    for survivor in survivors {
        answers.push(survivor.finish().await?);
    }
    Ok(answers)
}

/// If an engine's greedy answers depend on their batch, as on some devices, compares their length, and if it declares that,
/// their log probabilities. CC04 judges whether they may differ.
pub(super) async fn unchanged(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    ensure_room_for(&live, 3)?;
    let mut alone = Vec::new();
    for seed in [1, 2] {
        alone.push(live.answer(survivor(&live, seed)).await?);
    }
    let without = beside(&live, false).await?;
    let with = beside(&live, true).await?;
    if live.varies_with_batch() {
        for (alone, with) in alone.iter().zip(&with) {
            near::ensure_near(Choice::Greedy, alone, with, "beside one that is cancelled")?;
        }
    }
    let generated = |answers: Vec<Answer>| -> Vec<Generated> {
        answers.iter().map(Answer::generated).collect()
    };
    let (alone, without, with) = (generated(alone), generated(without), generated(with));
    if alone == without && !live.varies_with_batch() {
        ensure!(
            without == with,
            "with a neighbour's cancel the tokens are {with:?}, without it {without:?}"
        );
        return Ok(());
    }
    trial.note_indirect();
    let lens = |answers: &[Generated]| answers.iter().map(Generated::len).collect::<Vec<_>>();
    ensure!(
        lens(&without) == lens(&with),
        "with a neighbour's cancel {:?} tokens came, without it {:?}",
        lens(&with),
        lens(&without)
    );
    Ok(())
}
