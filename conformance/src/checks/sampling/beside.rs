//! Requests with different options in one batch.

use genset_backend_common::{GenerateRequest, config::SamplingOption};

use super::{answered, free, greedy};
use crate::check::CheckResult;
use crate::checks::near::{self, Choice, Pair};
use crate::checks::pressure::{ensure_room_for, slots};
use crate::trial::{Live, Trial};

/// The maximum number of requests beside the one that is judged.
const NEIGHBOURS: u32 = 3;

fn neighbours(live: &Live) -> u64 {
    u64::from(NEIGHBOURS.min(slots(live).saturating_sub(1)))
}

/// The number of prompts: `wanted`, or more for an engine whose answers depend on the batch.
fn prompts(live: &Live, wanted: u64) -> u64 {
    match live.varies_with_batch() {
        true => near::ENOUGH,
        false => wanted,
    }
}

pub(super) async fn seeded_beside_seeded(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    ensure_room_for(&live, 2)?;
    live.needs(SamplingOption::Seed)?;
    let seeded = |prompt, seed| {
        let mut request = near::rated(&live, free(&live, prompt));
        request.sampling.seed = Some(seed);
        request
    };
    let mut pairs: Vec<Pair> = Vec::new();
    for prompt in 0..prompts(&live, 2) {
        let alone = answered(&live, seeded(prompt, 7)).await?;
        let others = (1..=neighbours(&live)).map(|seed| seeded(prompt, seed + 7));
        // First among its neighbours, and last.
        let mut batch: Vec<GenerateRequest> = others.collect();
        batch.push(seeded(prompt, 7));
        for _ in 0..2 {
            let mut answers = live.answers(batch.clone()).await?;
            let place = batch.iter().position(|r| r.sampling.seed == Some(7));
            if let Some(place) = place {
                pairs.push((alone.clone(), answers.swap_remove(place)));
            }
            batch.reverse();
        }
    }
    let when = "beside others with seeds of their own";
    near::ensure_as_alone(&live, Choice::Seeded, &pairs, when)
}

pub(super) async fn greedy_beside_hot(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    ensure_room_for(&live, 2)?;
    live.needs(SamplingOption::Temperature)?;
    let mut pairs: Vec<Pair> = Vec::new();
    for prompt in 0..prompts(&live, 3) {
        let own = near::rated(&live, greedy(&live, prompt));
        let alone = answered(&live, own.clone()).await?;
        let hot = (1..=neighbours(&live)).map(|seed| free(&live, prompt + 10 * seed));
        let mut batch: Vec<GenerateRequest> = hot.collect();
        let place = batch.len() / 2;
        batch.insert(place, own);
        pairs.push((alone, live.answers(batch).await?.swap_remove(place)));
    }
    let when = "beside others at a temperature";
    near::ensure_as_alone(&live, Choice::Greedy, &pairs, when)
}
