//! Options that narrow a free choice to one token, and that a choice without them is free.

use genset_backend_common::{GenerateRequest, config::SamplingOption};

use super::{TRIES, free, generated, greedy, has_a_choice, only_answer, only_unseeded, seeded};
use crate::check::{CheckResult, Stop, ensure, fail, skip};
use crate::trial::{Live, Trial};

/// A `top_p` that keeps only the best token.
const HARDLY_ANY: f32 = 1e-6;

pub(super) async fn narrowed_to_one(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    type Narrow = (SamplingOption, &'static str, fn(&mut GenerateRequest));
    let options: [Narrow; 2] = [
        (SamplingOption::TopP, "top_p near 0", |request| {
            request.sampling.top_p = Some(HARDLY_ANY);
        }),
        (SamplingOption::MinP, "min_p = 1", |request| {
            request.sampling.min_p = Some(1.0);
        }),
    ];
    let declared = options.iter().filter(|(option, _, _)| live.can(*option));
    if declared.clone().next().is_none() {
        skip!(NotDeclared, "the engine declares neither top_p nor min_p");
    }
    for (_, name, narrow) in declared {
        for seed in 0..3 {
            live.warm(&greedy(&live, seed)).await?;
            let reference = generated(&live, greedy(&live, seed)).await?;
            let mut request = free(&live, seed);
            narrow(&mut request);
            let narrowed = generated(&live, request).await?;
            ensure!(
                narrowed == reference,
                "{name} gave {narrowed:?}, greedy {reference:?}"
            );
        }
    }
    Ok(())
}

pub(super) async fn unseeded_differ(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs(SamplingOption::Temperature)?;
    if !has_a_choice(&live).await? && !seeds_differ(&live).await? {
        skip!(
            NotDeclared,
            "the engine seems to have one possible next token"
        );
    }
    match only_unseeded(&live).await? {
        Some(answer) => {
            fail!("{TRIES} requests without a seed were all answered by {answer:?}")
        }
        None => Ok(()),
    }
}

async fn seeds_differ(live: &Live) -> Result<bool, Stop> {
    if !live.can(SamplingOption::Seed) {
        return Ok(false);
    }
    let seeded = (0..TRIES).map(|seed| seeded(live, seed));
    Ok(only_answer(live, seeded).await?.is_none())
}
