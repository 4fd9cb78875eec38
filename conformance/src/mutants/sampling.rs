//! Faults that the checks of DT catch.

use std::sync::Arc;

use genset_backend_common::{
    EngineConfig, EngineError, GenerateRequest, LLMEngine, OutputStream, RequestContext,
    StartContext, async_trait,
};

use super::Mutant;
use super::capable::{Flaw, with_flaw};
use super::fault::{Fault, with_fault};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "greedy-draws",
        stands_for: "a sampler that clamps temperature 0 to a small number and draws from an unseeded generator",
        killed_by: &["DT01", "DT04", "DT05", "DT08", "MG01", "MG05"],
        build: |_, _| with_flaw(Flaw::GreedyDraws),
    },
    Mutant {
        name: "temperature-zero-divides",
        stands_for: "the seeded path divides logits by a temperature of 0: not a number everywhere, and token 0 wins",
        killed_by: &["DT04"],
        build: |_, _| with_flaw(Flaw::ZeroTemperatureDivides),
    },
    Mutant {
        name: "seed-ignored",
        stands_for: "one generator for all requests: a seed changes nothing",
        killed_by: &["DT02"],
        build: |_, _| with_flaw(Flaw::SeedIgnored),
    },
    Mutant {
        name: "seed-constant",
        stands_for: "a generator that is made anew, with its default seed, for each request",
        killed_by: &["DT03"],
        build: |_, _| with_flaw(Flaw::SeedConstant),
    },
    Mutant {
        name: "top-k-ignored",
        stands_for: "a sampler that draws first and filters afterwards",
        killed_by: &["DT05"],
        build: |_, _| with_flaw(Flaw::TopKAfterDraw),
    },
    Mutant {
        name: "bias-ignored",
        stands_for: "a logit bias that is declared, parsed and never added",
        killed_by: &["DT06"],
        build: |_, _| with_flaw(Flaw::BiasIgnored),
    },
    Mutant {
        name: "logprobs-unsorted",
        stands_for: "candidates in the order a partial sort left them",
        killed_by: &["DT07"],
        build: |_, _| with_flaw(Flaw::LogprobsUnsorted),
    },
    Mutant {
        name: "penalties-ignored",
        stands_for: "penalties that are declared and never applied",
        killed_by: &["DT08"],
        build: |_, _| with_flaw(Flaw::PenaltiesIgnored),
    },
    Mutant {
        name: "undeclared-options-dropped",
        stands_for: "a worker that reads the options it knows and drops the others in silence",
        killed_by: &["DT09", "ER01"],
        build: |clean, scenario| {
            with_fault(clean, scenario, OptionsDropped::default()).checking_itself()
        },
    },
];

/// Checks requests on its own side, after it has forgotten what they ask for.
#[derive(Default)]
struct OptionsDropped {
    config: parking_lot::Mutex<Option<EngineConfig>>,
}

#[async_trait]
impl Fault for OptionsDropped {
    async fn start(
        &self,
        inner: &Arc<dyn LLMEngine>,
        ctx: StartContext,
    ) -> Result<EngineConfig, EngineError> {
        let config = inner.start(ctx).await?;
        *self.config.lock() = Some(config.clone());
        Ok(config)
    }

    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        mut request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        request.sampling.presence_penalty = None;
        request.sampling.frequency_penalty = None;
        let config = self.config.lock().clone();
        if let Some(config) = config {
            config.check(&request)?;
        }
        inner.generate(request, ctx).await
    }
}
