//! Faults that the rules of the reader catch: each shows in a stream that no other check examines closely.

use futures_util::StreamExt;
use genset_backend_common::{
    EngineError, FinishReason, HealthReporter, Output, OutputStream, RequestContext, StartContext,
    async_trait,
};
use parking_lot::Mutex;

use super::Mutant;
use super::capable::{Flaw, with_flaw};
use super::fault::{Call, Fault, Inner, at_end, at_tokens, ended, is_last, raw, with_fault};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "padding-in-long-answers",
        stands_for: "a second tile of a kernel that is not masked: from there on padding of the vocabulary can win",
        killed_by: &["RD01"],
        build: |clean, scenario| with_fault(clean, scenario, PaddingWins),
    },
    Mutant {
        name: "padding-ranked",
        stands_for: "candidates ranked over the padded rows of the output layer",
        killed_by: &["RD01"],
        build: |_, _| with_flaw(Flaw::PaddingRanked),
    },
    Mutant {
        name: "least-tokens-free",
        stands_for: "tokens counted where a stop token is looked for, which begins after min_tokens",
        killed_by: &["RD02"],
        build: |clean, scenario| with_fault(clean, scenario, LeastTokensFree),
    },
    Mutant {
        name: "sampled-without-logprobs",
        stands_for: "log probabilities on the greedy path only, which is the one that tests take",
        killed_by: &["RD03"],
        build: |_, _| with_flaw(Flaw::SampledWithoutLogprobs),
    },
    Mutant {
        name: "abort-reported-as-death",
        stands_for: "a watchdog that takes the end of an aborted request's task for the engine's",
        killed_by: &["RD04"],
        build: |clean, scenario| with_fault(clean, scenario, AbortIsDeath::default()),
    },
    Mutant {
        name: "stores-after-clear",
        stands_for: "a sequence that goes on over a cleared cache and publishes blocks after parents that are gone",
        killed_by: &["RD05"],
        build: |_, _| with_flaw(Flaw::StoresAfterClear),
    },
    Mutant {
        name: "drop-reported-as-death",
        stands_for: "a channel whose reader is gone, taken for the loss of the whole server",
        killed_by: &["MT05", "RD04"],
        build: |clean, scenario| with_fault(clean, scenario, DropIsDeath::default()),
    },
    Mutant {
        name: "stop-token-of-padding",
        stands_for: "the token that ended a sequence read from a buffer that is a row longer than the vocabulary",
        killed_by: &["RD01"],
        build: |clean, scenario| {
            ended(clean, scenario, |finished| {
                if finished.reason == FinishReason::Length && finished.usage.completion_tokens > 128
                {
                    finished.stop_token = Some(1 << 20);
                }
            })
        },
    },
    Mutant {
        name: "cached-more-than-the-prompt",
        stands_for: "reuse counted in whole blocks, also of a prompt that is shorter than one",
        killed_by: &["RD02"],
        build: |clean, scenario| {
            ended(clean, scenario, |finished| {
                let is_short = finished.usage.prompt_tokens == 9;
                finished.usage.cached_tokens = Some(if is_short { 16 } else { 0 });
            })
        },
    },
    Mutant {
        name: "rushes-after-a-stall",
        stands_for: "back-pressure that gives way once a client is slow: the rest of its answer is computed at once, before all others",
        killed_by: &["RD06"],
        build: |_, _| with_flaw(Flaw::RushesAfterStall),
    },
];

/// The position of the padding token in each answer, from 0.
const PADDED_PLACE: usize = 128;

struct PaddingWins;

impl Fault for PaddingWins {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        let mut place = 0;
        at_tokens(outputs, move |chunk| {
            for token in &mut chunk.token_ids {
                if place == PADDED_PLACE {
                    *token = u32::MAX;
                }
                place += 1;
            }
        })
    }
}

struct LeastTokensFree;

impl Fault for LeastTokensFree {
    fn answer(&self, call: &Call, outputs: OutputStream) -> OutputStream {
        let least = call.request.stop.min_tokens;
        at_end(outputs, move |finished| {
            let counted = &mut finished.usage.completion_tokens;
            *counted = counted.saturating_sub(least);
        })
    }
}

#[derive(Default)]
struct AbortIsDeath {
    health: Mutex<HealthReporter>,
}

#[async_trait]
impl Fault for AbortIsDeath {
    fn begin(&self, ctx: &StartContext) {
        *self.health.lock() = ctx.health.clone();
    }

    async fn abort(&self, inner: &Inner, ctx: &RequestContext) {
        inner.abort(ctx).await;
        self.health.lock().report_dead("a request's task has ended");
    }
}

#[derive(Default)]
struct DropIsDeath {
    health: Mutex<HealthReporter>,
}

/// Reports the engine dead if a stream is dropped before its end.
struct Reader {
    health: HealthReporter,
    is_over: bool,
}

impl Reader {
    fn saw(&mut self, item: &Result<Output, EngineError>) {
        self.is_over |= is_last(item);
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if !self.is_over {
            self.health.report_dead("nobody reads");
        }
    }
}

impl Fault for DropIsDeath {
    fn begin(&self, ctx: &StartContext) {
        *self.health.lock() = ctx.health.clone();
    }

    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        let mut reader = Reader {
            health: self.health.lock().clone(),
            is_over: false,
        };
        raw(outputs.inspect(move |item| reader.saw(item)))
    }
}
