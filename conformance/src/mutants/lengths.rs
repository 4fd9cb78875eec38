//! Faults that show only after the first dozen tokens: of an answer, of a list, of a prompt, of the context.

use futures_util::{StreamExt, stream};
use genset_backend_common::output::{Finish, TokenChunk};
use genset_backend_common::{
    EngineError, GenerateRequest, Input, Output, OutputStream, TokenId, async_trait,
};
use parking_lot::Mutex;

use super::Mutant;
use super::capable::{Flaw, with_flaw};
use super::fault::{Call, Fault, Inner, asked, ended, raw, with_fault};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "eight-stop-tokens",
        stands_for: "a tensor with room for eight stop tokens a sequence",
        killed_by: &["FN11"],
        build: |clean, scenario| {
            asked(clean, scenario, |request| {
                request.stop.stop_token_ids.truncate(8);
            })
        },
    },
    Mutant {
        name: "stop-tokens-in-a-word",
        stands_for: "the stop tokens that matched as the bits of a signed word",
        killed_by: &["FN11"],
        build: |clean, scenario| {
            asked(clean, scenario, |request| {
                request.stop.stop_token_ids.truncate(63);
            })
        },
    },
    Mutant {
        name: "stop-list-from-its-end",
        stands_for: "a ring of 32 stop tokens: the later ones of a list are written over the earlier ones",
        killed_by: &["FN11"],
        build: |clean, scenario| {
            asked(clean, scenario, |request| {
                let list = &mut request.stop.stop_token_ids;
                let surplus = list.len().saturating_sub(32);
                list.drain(..surplus);
            })
        },
    },
    Mutant {
        name: "min-tokens-in-a-byte",
        stands_for: "a least length in a field that was wide enough for tests",
        killed_by: &["FN14"],
        build: |clean, scenario| asked(clean, scenario, |request| request.stop.min_tokens %= 256),
    },
    Mutant {
        name: "answers-capped-at-512",
        stands_for: "a server's own limit for an answer, over the one that was asked for",
        killed_by: &["US08"],
        build: |clean, scenario| {
            asked(clean, scenario, |request| {
                let most = &mut request.stop.max_tokens;
                *most = most
                    .filter(|most| !(513..4096).contains(most))
                    .or(most.map(|_| 512));
            })
        },
    },
    Mutant {
        name: "only-the-first-eos",
        stands_for: "eos_token_id of a model's config read as a number, where it is a list",
        killed_by: &["FN12"],
        build: |clean, scenario| {
            asked(clean, scenario, |request| {
                request.stop.eos_token_ids.truncate(1);
            })
        },
    },
    Mutant {
        name: "eos-replaces-stop-tokens",
        stands_for: "the model's end tokens written over the client's stop tokens",
        killed_by: &["FN12"],
        build: |clean, scenario| asked(clean, scenario, eos_replaces_stops),
    },
    Mutant {
        name: "stop-token-of-the-prompt",
        stands_for: "the stop tokens looked for in prompt and answer, and taken as met once: only new ones count",
        killed_by: &["FN12"],
        build: |clean, scenario| asked(clean, scenario, drop_stops_of_the_prompt),
    },
    Mutant {
        name: "deaf-behind-64",
        stands_for: "stop tokens compared with the first block of a sequence's output",
        killed_by: &["DG16", "FN13"],
        build: |clean, scenario| {
            let stops: Stops = |stop, token, place| place < 64 && stop.is_stop(token, place);
            with_fault(clean, scenario, Stopping(stops))
        },
    },
    Mutant {
        name: "deaf-behind-a-byte",
        stands_for: "a place in the answer kept in a byte, with the last value for none",
        killed_by: &["DG16", "FN13"],
        build: |clean, scenario| {
            let stops: Stops = |stop, token, place| place < 255 && stop.is_stop(token, place);
            with_fault(clean, scenario, Stopping(stops))
        },
    },
    Mutant {
        name: "min-tokens-one-more",
        stands_for: "min_tokens compared after the token was counted, by the wrong sign",
        killed_by: &["DG16", "FN14"],
        build: |clean, scenario| {
            let stops: Stops = |stop, token, place| {
                stop.is_stop(token, place) && (stop.min_tokens == 0 || place > stop.min_tokens)
            };
            with_fault(clean, scenario, Stopping(stops))
        },
    },
    Mutant {
        name: "min-tokens-one-less",
        stands_for: "min_tokens compared with a count that has the token that stops in it",
        killed_by: &["DG16", "FN14"],
        build: |clean, scenario| {
            let stops: Stops = |stop, token, place| stop.is_stop(token, place + 1);
            with_fault(clean, scenario, Stopping(stops))
        },
    },
    Mutant {
        name: "sixteen-by-default",
        stands_for: "OpenAI's old default for max_tokens, in the engine",
        killed_by: &["FN15"],
        build: |clean, scenario| {
            asked(clean, scenario, |request| {
                request.stop.max_tokens.get_or_insert(16);
            })
        },
    },
    Mutant {
        name: "one-short-of-the-context",
        stands_for: "a KV slot kept for a token that never comes",
        killed_by: &["FN15"],
        build: |clean, scenario| with_fault(clean, scenario, OneShort),
    },
    Mutant {
        name: "answers-counted-in-a-byte",
        stands_for: "a count of tokens in a field that was wide enough for tests",
        killed_by: &["RD02", "US08"],
        build: |clean, scenario| {
            ended(clean, scenario, |finished| {
                finished.usage.completion_tokens %= 256;
            })
        },
    },
    Mutant {
        name: "prompt-counted-by-chunk",
        stands_for: "prompt tokens taken from the last chunk of a chunked prefill",
        killed_by: &["RD02", "US08"],
        build: |clean, scenario| {
            ended(clean, scenario, |finished| {
                let tokens = &mut finished.usage.prompt_tokens;
                *tokens = (*tokens).saturating_sub(1) % 128 + 1;
            })
        },
    },
    Mutant {
        name: "own-blocks-counted-as-cached",
        stands_for: "the prefix looked up after the prompt's own blocks were stored",
        killed_by: &["KV06", "KV08", "KV12", "US09"],
        build: |_, _| with_flaw(Flaw::OwnBlocksCached),
    },
    Mutant {
        name: "whole-prompt-cached",
        stands_for: "a prompt reused to its last token, which is then computed at the next one's position",
        killed_by: &["CC14", "DT10"],
        build: |clean, scenario| with_fault(clean, scenario, Warm::new(|prompt| prompt.to_vec())),
    },
    Mutant {
        name: "blocks-hashed-without-parent",
        stands_for: "a block found by its own tokens, whatever came before it",
        killed_by: &["CC14", "DT10"],
        build: |clean, scenario| {
            let tail = |prompt: &[TokenId]| prompt[prompt.len() - BLOCK..].to_vec();
            with_fault(clean, scenario, Warm::new(tail))
        },
    },
];

fn eos_replaces_stops(request: &mut GenerateRequest) {
    let stop = &mut request.stop;
    if !stop.ignore_eos && !stop.eos_token_ids.is_empty() {
        stop.stop_token_ids = stop.eos_token_ids.clone();
    }
}

fn drop_stops_of_the_prompt(request: &mut GenerateRequest) {
    let Input::Tokens(prompt) = &request.input else {
        return;
    };
    let prompt = prompt.clone();
    request
        .stop
        .stop_token_ids
        .retain(|token| !prompt.contains(token));
}

/// Whether a token at a position of the answer ends it.
type Stops = fn(&genset_backend_common::StopConditions, TokenId, u32) -> bool;

/// Determines the end itself.
struct Stopping(Stops);

#[async_trait]
impl Fault for Stopping {
    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let (mut request, ctx) = (call.request, call.ctx);
        let stop = std::mem::take(&mut request.stop);
        request.stop.max_tokens = stop.max_tokens;
        request.stop.ignore_eos = true;
        let (stops, prompt) = (self.0, ctx.prompt_tokens());
        let mut place = 0;
        let outputs = inner.generate(request, ctx).await?.map(move |item| {
            let Ok(Output::Tokens(chunk)) = &item else {
                return vec![item];
            };
            let mut items = Vec::new();
            for token in &chunk.token_ids {
                if stops(&stop, *token, place) {
                    let end = Finish::stop_token(*token).into_finished(prompt, place);
                    items.push(Ok(Output::Finished(Box::new(end))));
                    return items;
                }
                items.push(Ok(Output::Tokens(TokenChunk::from(*token))));
                place += 1;
            }
            items
        });
        let mut is_over = false;
        let outputs = outputs.flat_map(stream::iter).take_while(move |item| {
            let goes_on = !is_over;
            is_over |= !matches!(item, Ok(Output::Tokens(_)));
            std::future::ready(goes_on)
        });
        Ok(raw(outputs))
    }
}

/// Leaves the last token of the context unused.
struct OneShort;

impl Fault for OneShort {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        let config = call.config.as_ref();
        let context = config.map_or(u32::MAX, |config| config.context_length_tokens);
        let prompt_tokens = call.ctx.prompt_tokens();
        let room = context.saturating_sub(prompt_tokens + 1).max(1);
        let max_tokens = &mut call.request.stop.max_tokens;
        *max_tokens = Some(max_tokens.unwrap_or(room).min(room));
        Ok(())
    }
}

/// The prompt length from which on a prompt is cached.
const BLOCK: usize = 16;

/// Answers differently if a part of the prompt is cached.
pub(super) struct Warm {
    key: fn(&[TokenId]) -> Vec<TokenId>,
    known: Mutex<Vec<Vec<TokenId>>>,
}

impl Warm {
    pub(super) fn new(key: fn(&[TokenId]) -> Vec<TokenId>) -> Self {
        Self {
            key,
            known: Mutex::default(),
        }
    }

    /// Whether a prompt is cached; caches it.
    fn knows(&self, prompt: &[TokenId]) -> bool {
        let key = (self.key)(prompt);
        let mut known = self.known.lock();
        let is_known = known.contains(&key);
        if !is_known {
            known.push(key);
        }
        is_known
    }
}

impl Fault for Warm {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        if let Input::Tokens(prompt) = &mut call.request.input
            && prompt.len() >= 2 * BLOCK
            && self.knows(prompt)
            && let Some(last) = prompt.last_mut()
        {
            let vocab_size = call.config.as_ref().and_then(|config| config.vocab_size);
            *last = (*last + 1) % vocab_size.unwrap_or(std::num::NonZeroU32::MIN);
        }
        Ok(())
    }
}
