//! Faults that the checks of US catch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use futures_util::StreamExt;
use genset_backend_common::output::Usage;
use genset_backend_common::{FinishReason, Output, OutputStream};

use super::Mutant;
use super::fault::{Call, Fault, ended, others, raw, with_fault};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "no-usage-on-stop",
        stands_for: "usage filled in where the limit is looked at, and not where a stop token is",
        killed_by: &["RD02", "US01", "US03", "US04"],
        build: |clean, scenario| {
            ended(clean, scenario, |finished| {
                if finished.stop_token.is_some() {
                    finished.usage = Usage::default();
                }
            })
        },
    },
    Mutant {
        name: "prompt-counted-in-blocks",
        stands_for: "prompt tokens taken from the KV blocks allocated, the last of them half empty",
        killed_by: &["RD02", "US02", "US08"],
        build: |clean, scenario| {
            ended(clean, scenario, |finished| {
                let tokens = &mut finished.usage.prompt_tokens;
                *tokens = tokens.next_multiple_of(if *tokens > 32 { 16 } else { 1 });
            })
        },
    },
    Mutant {
        name: "stop-token-counted",
        stands_for: "usage counted where tokens are sampled: the stop token is billed and not delivered",
        killed_by: &["RD02", "US03", "US04"],
        build: |clean, scenario| {
            ended(clean, scenario, |finished| {
                finished.usage.completion_tokens += u32::from(finished.stop_token.is_some());
            })
        },
    },
    Mutant {
        name: "count-below-zero",
        stands_for: "one taken off the count for the stop token, whether or not it was counted",
        killed_by: &["RD02", "US04"],
        build: |clean, scenario| {
            ended(clean, scenario, |finished| {
                if finished.stop_token.is_some() && finished.usage.completion_tokens == 0 {
                    finished.usage.completion_tokens =
                        finished.usage.completion_tokens.wrapping_sub(1);
                }
            })
        },
    },
    Mutant {
        name: "cached-in-whole-blocks",
        stands_for: "cached tokens reported in whole blocks, more than the prompt has",
        killed_by: &["RD02", "US05", "US09"],
        build: |clean, scenario| {
            ended(clean, scenario, |finished| {
                finished.usage.cached_tokens =
                    Some(finished.usage.prompt_tokens.next_multiple_of(16));
            })
        },
    },
    Mutant {
        name: "cancelled-work-billed",
        stands_for: "tokens in the pipeline billed to a client that cancelled before they came",
        killed_by: &["RD02", "US06"],
        build: |clean, scenario| {
            ended(clean, scenario, |finished| {
                if finished.reason == FinishReason::Cancelled {
                    finished.usage.completion_tokens += 2;
                }
            })
        },
    },
    Mutant {
        name: "one-counter-for-all",
        stands_for: "a counter in the engine instead of one in each request",
        killed_by: &["RD02", "US07"],
        build: |clean, scenario| with_fault(clean, scenario, OneCounter::default()),
    },
];

/// Counts correctly only if one request runs at a time.
#[derive(Default)]
struct OneCounter {
    /// Cloned by each request.
    tokens: Arc<AtomicU32>,
}

impl Fault for OneCounter {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        if others(&self.tokens) == 0 {
            self.tokens.store(0, Ordering::Relaxed);
        }
        let tokens = Arc::clone(&self.tokens);
        raw(outputs.map(move |mut item| {
            if let Ok(output) = &mut item {
                tokens.fetch_add(output.token_count(), Ordering::Relaxed);
                if let Output::Finished(finished) = output {
                    finished.usage.completion_tokens = tokens.load(Ordering::Relaxed);
                }
            }
            item
        }))
    }
}
