//! Faults that the checks of FN catch.

use genset_backend_common::output::TokenChunk;
use genset_backend_common::{
    CancelReason, EngineConfig, EngineError, FinishReason, GenerateRequest, Input, OutputStream,
    RequestContext, async_trait,
};
use parking_lot::Mutex;

use super::Mutant;
use super::capable::{Flaw, with_flaw};
use super::fault::{Call, Fault, Inner, asked, at_end, deaf, ended, mending, with_fault};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "multi-step-overshoot",
        stands_for: "a scheduler that decodes long answers four steps at a time and looks at max_tokens between them",
        killed_by: &["FN01"],
        build: |clean, scenario| asked(clean, scenario, overshoot),
    },
    Mutant {
        name: "two-tokens-for-one",
        stands_for: "a token from prefill and one from decode before the limit is looked at: prefill instances break",
        killed_by: &["FN02", "DG16", "MG02", "MG03"],
        build: |clean, scenario| asked(clean, scenario, two_for_one),
    },
    Mutant {
        name: "own-end-before-min-tokens",
        stands_for: "min_tokens held against the stop tokens of the request, while the model's own end is looked for elsewhere",
        killed_by: &["FN10"],
        build: |clean, scenario| with_fault(clean, scenario, OwnEnd),
    },
    Mutant {
        name: "ban-list-padded",
        stands_for: "the tokens to ban until min_tokens, padded with 0 to a round number: token 0 is banned too",
        killed_by: &["FN16"],
        build: |_, _| with_flaw(Flaw::BanListPadded),
    },
    Mutant {
        name: "zero-is-unlimited",
        stands_for: "a server that takes max_tokens = 0 for no limit and fills the context",
        killed_by: &["FN03"],
        build: |clean, scenario| mending(clean, scenario, zero_is_unlimited),
    },
    Mutant {
        name: "prompt-cut-silently",
        stands_for: "a server that drops the front of a prompt that is too long (Ollama's num_ctx)",
        killed_by: &["FN04"],
        build: |clean, scenario| mending(clean, scenario, cut_prompt),
    },
    Mutant {
        name: "context-slides",
        stands_for: "max_tokens is honoured at the price of the context: the window slides over the prompt's KV blocks",
        killed_by: &["FN05", "FN15"],
        build: |clean, scenario| with_fault(clean, scenario, ContextSlides),
    },
    Mutant {
        name: "length-on-eos",
        stands_for: "a finished answer reported as cut, so that agents ask for its rest",
        killed_by: &["FN06", "FN12"],
        build: |clean, scenario| with_fault(clean, scenario, LengthOnEos),
    },
    Mutant {
        name: "eos-despite-ignore",
        stands_for: "a benchmark flag lost between the API and the scheduler",
        killed_by: &["FN06"],
        build: |clean, scenario| asked(clean, scenario, |request| request.stop.ignore_eos = false),
    },
    Mutant {
        name: "only-the-first-stop-token",
        stands_for: "a list of stop tokens squeezed into a field for one",
        killed_by: &["FN07", "FN11"],
        build: |clean, scenario| {
            asked(clean, scenario, |request| {
                request.stop.stop_token_ids.truncate(1);
            })
        },
    },
    Mutant {
        name: "stop-token-streamed",
        stands_for: "the stop token sent along with the end, so that its text is shown",
        killed_by: &[
            "DG16", "FN06", "FN07", "FN11", "FN12", "FN13", "FN14", "MG05",
        ],
        build: |clean, scenario| {
            ended(clean, scenario, |finished| {
                if let Some(token) = finished.stop_token {
                    finished.last = TokenChunk::from(token);
                    finished.usage.completion_tokens += 1;
                }
            })
        },
    },
    Mutant {
        name: "empty-prompt-panics",
        stands_for: "a division by the prompt's length",
        killed_by: &["FN08"],
        build: |clean, scenario| mending(clean, scenario, divide_by_prompt),
    },
    Mutant {
        name: "stale-cancel",
        stands_for: "a set of aborted ids that nobody clears: the client's next try under the same id is aborted too",
        killed_by: &["FN09"],
        build: |clean, scenario| with_fault(clean, scenario, StaleCancel::default()),
    },
    Mutant {
        name: "min-tokens-ignored",
        stands_for: "an option that is declared, passed on and never read",
        killed_by: &["FN10", "FN14"],
        build: |clean, scenario| asked(clean, scenario, |request| request.stop.min_tokens = 0),
    },
];

fn overshoot(request: &mut GenerateRequest) {
    if let Some(max_tokens @ 33..64) = &mut request.stop.max_tokens {
        *max_tokens = max_tokens.next_multiple_of(4);
    }
}

fn two_for_one(request: &mut GenerateRequest) {
    if request.stop.max_tokens == Some(1) {
        request.stop.max_tokens = Some(2);
    }
}

fn zero_is_unlimited(_: &EngineConfig, request: &mut GenerateRequest) {
    if request.stop.max_tokens == Some(0) {
        request.stop.max_tokens = None;
    }
}

fn cut_prompt(config: &EngineConfig, request: &mut GenerateRequest) {
    let max_tokens = request.stop.max_tokens.unwrap_or(1);
    let room = config.context_length_tokens.saturating_sub(max_tokens);
    if let Input::Tokens(tokens) = &mut request.input
        && u32::try_from(tokens.len()).is_ok_and(|len| len >= config.context_length_tokens)
    {
        let surplus = tokens.len() - usize::try_from(room).unwrap_or(tokens.len());
        tokens.drain(..surplus);
    }
}

fn divide_by_prompt(_: &EngineConfig, request: &mut GenerateRequest) {
    if let Input::Tokens(tokens) = &mut request.input {
        let _share = 1000 / tokens.len();
    }
}

struct ContextSlides;

impl Fault for ContextSlides {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        let wanted = call.request.stop.max_tokens.unwrap_or(0);
        if let (Some(config), Input::Tokens(tokens)) = (&call.config, &mut call.request.input)
            && call.ctx.prompt_tokens().saturating_add(wanted) > config.context_length_tokens
        {
            let surplus = tokens.len().min(usize::try_from(wanted).unwrap_or(0));
            tokens.drain(..surplus);
        }
        Ok(())
    }
}

/// The number of tokens after which an answer ends by itself.
const OWN_END_TOKENS: u32 = 24;

struct OwnEnd;

#[async_trait]
impl Fault for OwnEnd {
    async fn generate(&self, inner: &Inner, mut call: Call) -> Result<OutputStream, EngineError> {
        let stop = &mut call.request.stop;
        let is_later = stop.max_tokens.is_some_and(|most| most <= OWN_END_TOKENS);
        if stop.ignore_eos || is_later {
            return inner.generate(call.request, call.ctx).await;
        }
        stop.max_tokens = Some(OWN_END_TOKENS);
        stop.min_tokens = stop.min_tokens.min(OWN_END_TOKENS);
        let outputs = inner.generate(call.request, call.ctx).await?;
        Ok(at_end(outputs, |finished| {
            if finished.reason == FinishReason::Length {
                finished.reason = FinishReason::Stop;
            }
        }))
    }
}

struct LengthOnEos;

impl Fault for LengthOnEos {
    fn answer(&self, call: &Call, outputs: OutputStream) -> OutputStream {
        if call.request.stop.eos_token_ids.is_empty() {
            return outputs;
        }
        at_end(outputs, |finished| finished.reason = FinishReason::Length)
    }
}

#[derive(Default)]
struct StaleCancel {
    aborted: Mutex<Vec<String>>,
}

#[async_trait]
impl Fault for StaleCancel {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        let id = call.ctx.id();
        if self.aborted.lock().iter().any(|aborted| aborted == id) {
            // With the fault's own context, so that the request itself is not cancelled.
            call.ctx = deaf(&call.ctx);
            call.ctx.cancel(CancelReason::Client);
        }
        Ok(())
    }

    async fn abort(&self, inner: &Inner, ctx: &RequestContext) {
        self.aborted.lock().push(ctx.id().to_owned());
        inner.abort(ctx).await;
    }
}
