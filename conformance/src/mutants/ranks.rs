//! An engine of two data-parallel ranks, and the faults that the checks of RK catch.

use std::sync::Arc;

use genset_backend_common::{
    DrainContext, EngineConfig, EngineControls, EngineError, GenerateRequest, LLMEngine,
    OutputStream, RequestContext, StartContext, async_trait,
};

use super::Mutant;
use super::capable::capable;
use crate::subject::{Scenario, Subject};

pub(super) const CONTROLS: &[Mutant] = &[Mutant {
    name: "two-ranks",
    stands_for: "nothing: two ranks, each with a cache of its own",
    killed_by: &[],
    build: |_, scenario| ranked(scenario, Flaw::None),
}];

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "second-rank-differs",
        stands_for: "a rank whose process was started with other defaults",
        killed_by: &["RK01"],
        build: |_, scenario| ranked(scenario, Flaw::SecondDiffers),
    },
    Mutant {
        name: "events-of-all-ranks-at-one",
        stands_for: "one publisher for the whole process: a router takes every block for the first rank's",
        killed_by: &["RK02"],
        build: |_, scenario| ranked(scenario, Flaw::EventsAtFirst),
    },
    Mutant {
        name: "named-rank-ignored",
        stands_for: "an engine's own balancer in front of its ranks: where a request was sent does not matter",
        killed_by: &["RK02"],
        build: |_, scenario| ranked(scenario, Flaw::NameIgnored),
    },
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    SecondDiffers,
    EventsAtFirst,
    NameIgnored,
}

fn ranked(scenario: &Scenario, flaw: Flaw) -> Subject {
    let subject = capable(scenario);
    let second = capable(scenario);
    let engine = Ranked {
        ranks: [Arc::clone(&subject.engine), second.engine],
        flaw,
    };
    Subject {
        engine: Arc::new(engine),
        probe: None,
        ..subject
    }
}

struct Ranked {
    ranks: [Arc<dyn LLMEngine>; 2],
    flaw: Flaw,
}

#[async_trait]
impl LLMEngine for Ranked {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let mut config = None;
        for (rank, number) in self.ranks.iter().zip(0..) {
            let at = if self.flaw == Flaw::EventsAtFirst {
                0
            } else {
                number
            };
            // Each rank exists from the start.
            drop(ctx.kv_events.of_rank(number));
            let own = StartContext {
                kv_events: ctx.kv_events.of_rank(at),
                ..ctx.clone()
            };
            config = Some(rank.start(own).await?);
        }
        let mut config = config.unwrap_or_else(|| EngineConfig::new("ranked", 1));
        config.data_parallel_size = 2;
        config.kv_total_blocks = config.kv_total_blocks.map(|blocks| blocks * 2);
        config.capabilities.kv_ranks = true;
        config.capabilities.roles.clear();
        Ok(config)
    }

    async fn generate(
        &self,
        mut request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let named = request.data_parallel_rank.take();
        let rank = if self.flaw == Flaw::NameIgnored {
            0
        } else {
            named.unwrap_or(0)
        };
        if self.flaw == Flaw::SecondDiffers && rank == 1 {
            request.sampling.temperature = Some(2.0);
        }
        let place = usize::try_from(rank).unwrap_or(0).min(1);
        self.ranks[place].generate(request, ctx).await
    }

    async fn abort(&self, ctx: &RequestContext) {
        for rank in &self.ranks {
            rank.abort(ctx).await;
        }
    }

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        for rank in &self.ranks {
            rank.drain(ctx.clone()).await?;
        }
        Ok(())
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        for rank in &self.ranks {
            rank.cleanup().await?;
        }
        Ok(())
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        Some(self)
    }
}

#[async_trait]
impl EngineControls for Ranked {
    async fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        for controls in self.ranks.iter().filter_map(|rank| rank.controls()) {
            controls.clear_prefix_cache().await?;
        }
        Ok(())
    }
}
