//! Requests of different options in one batch.

use genset_backend_common::{GenerateRequest, SamplingOption};

use super::{free, generated, greedy};
use crate::check::{CheckResult, ensure, skip};
use crate::checks::pressure::{ensure_room_for, slots};
use crate::trial::{Live, Trial};

/// Requests beside the one that is looked at, up to.
const NEIGHBOURS: u32 = 3;

fn neighbours(live: &Live) -> u64 {
    u64::from(NEIGHBOURS.min(slots(live).saturating_sub(1)))
}

pub(super) async fn seeded_beside_seeded(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs_batch_invariance()?;
    ensure_room_for(&live, 2)?;
    if !live.can(SamplingOption::Seed) {
        skip!(NotDeclared, "the engine does not declare seed");
    }
    let seeded = |prompt, seed| {
        let mut request = free(&live, prompt);
        request.sampling.seed = Some(seed);
        request
    };
    for prompt in 0..2 {
        let alone = generated(&live, seeded(prompt, 7)).await?;
        let others = (1..=neighbours(&live)).map(|seed| seeded(prompt, seed + 7));
        // First among its neighbours, and last.
        let mut batch: Vec<GenerateRequest> = others.collect();
        batch.push(seeded(prompt, 7));
        for _ in 0..2 {
            let place = batch.iter().position(|r| r.sampling.seed == Some(7));
            let answers = live.answers(batch.clone()).await?;
            let beside = place.map(|place| answers[place].generated());
            ensure!(
                beside.as_ref() == Some(&alone),
                "a seed gave {alone:?} alone, and {beside:?} beside others with seeds of their own"
            );
            batch.reverse();
        }
    }
    Ok(())
}

pub(super) async fn greedy_beside_hot(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs_batch_invariance()?;
    ensure_room_for(&live, 2)?;
    if !live.can(SamplingOption::Temperature) {
        skip!(NotDeclared, "the engine does not declare temperature");
    }
    for prompt in 0..3 {
        let alone = generated(&live, greedy(&live, prompt)).await?;
        let hot = (1..=neighbours(&live)).map(|seed| free(&live, prompt + 10 * seed));
        let mut batch: Vec<GenerateRequest> = hot.collect();
        let place = batch.len() / 2;
        batch.insert(place, greedy(&live, prompt));
        let beside = live.answers(batch).await?[place].generated();
        ensure!(
            beside == alone,
            "a greedy request gave {alone:?} alone, and {beside:?} beside others at a temperature"
        );
    }
    Ok(())
}
