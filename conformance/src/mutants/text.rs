//! [`spelled`]: a clean engine that takes and returns text, for running the checks without tokens. Also the faults that only
//! such engines have.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use futures_util::{StreamExt, stream};
use genset_backend_common::output::TextChunk;
use genset_backend_common::{
    EngineConfig, EngineError, FinishReason, GenerateRequest, Input, Output, OutputStream, TokenId,
    async_trait, config::InputKind,
};
use parking_lot::Mutex;

use super::fault::{Call, Fault, Inner, faulty, raw};
use super::{Clean, Mutant};
use crate::subject::{Detokenize, Scenario, Subject};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "text-counts-characters",
        stands_for: "usage of an engine behind an HTTP API, which knows the text's length and nothing of tokens",
        killed_by: &[
            "CC01", "CC02", "CC03", "CC05", "CC07", "CC09", "CC10", "CC11", "CC13", "CC14", "CC15",
            "CN06", "CN07", "CN08", "CN12", "CN16", "FN01", "FN02", "FN05", "RD02", "ST07", "ST11",
            "US03", "US06", "US07", "US08",
        ],
        build: |clean, scenario| with_flaw(clean, scenario, Flaw::CountsCharacters),
    },
    Mutant {
        name: "text-without-a-count",
        stands_for: "chunks of text passed on as they come, with nobody to say how many tokens they are",
        killed_by: &[
            "CC01", "CC02", "CC03", "CC05", "CC07", "CC09", "CC10", "CC11", "CC13", "CC14", "CC15",
            "CN02", "CN03", "CN06", "CN07", "CN08", "CN09", "CN10", "CN12", "CN14", "CN16", "ER05",
            "FN01", "FN02", "FN05", "FN09", "FN10", "MT01", "MT02", "MT03", "MT05", "MT09", "RD02",
            "RD04", "RD06", "SH05", "SH06", "SH09", "SH15", "SH16", "ST02", "ST04", "ST05", "ST07",
            "ST08", "ST10", "ST11", "US03", "US06", "US07", "US08",
        ],
        build: |clean, scenario| with_flaw(clean, scenario, Flaw::CountsNothing),
    },
    Mutant {
        name: "text-ends-whatever-is-asked",
        stands_for: "an engine behind an API that has no ignore_eos: benchmarks measure answers of any length",
        killed_by: &["FN01", "FN05", "ST11", "US08"],
        build: |clean, scenario| with_flaw(clean, scenario, Flaw::EndsAnyway),
    },
    Mutant {
        name: "text-forgets-min-tokens",
        stands_for: "a minimum that is turned into banned stop tokens, where there are no token ids to ban",
        killed_by: &["FN10"],
        build: |clean, scenario| with_flaw(clean, scenario, Flaw::ForgetsMinTokens),
    },
    Mutant {
        name: "text-prompt-is-free",
        stands_for: "prompt_tokens taken from the context of the request, which counts token ids and finds none",
        killed_by: &["US02"],
        build: |clean, scenario| with_flaw(clean, scenario, Flaw::CountsNoPrompt),
    },
    Mutant {
        name: "text-prompt-is-free-when-cancelled",
        stands_for: "the prompt counted where an answer ends, which a cancelled one does elsewhere",
        killed_by: &["US06"],
        build: |clean, scenario| with_flaw(clean, scenario, Flaw::CountsNoCancelledPrompt),
    },
    Mutant {
        name: "text-is-cut-to-fit",
        stands_for: "a tokenizer that truncates by default: the end of a long prompt, where the question is, is lost",
        killed_by: &["FN04"],
        build: |clean, scenario| with_flaw(clean, scenario, Flaw::CutsPrompts),
    },
    Mutant {
        name: "text-of-chats-is-lost",
        stands_for: "a chat template that renders without its messages, in an engine that tests ask for completions only",
        killed_by: &["US02"],
        build: |clean, scenario| with_flaw(clean, scenario, Flaw::LosesChats),
    },
    Mutant {
        name: "text-differs-in-its-spaces",
        stands_for: "a detokenizer whose state is shared: whether a word gets its space depends on who else was there",
        killed_by: &[
            "CC04", "DT01", "DT02", "DT04", "DT05", "DT11", "DT15", "DT16",
        ],
        build: |clean, scenario| with_flaw(clean, scenario, Flaw::LosesSpaces),
    },
];

/// The faults of an engine of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    CountsCharacters,
    CountsNothing,
    EndsAnyway,
    ForgetsMinTokens,
    CountsNoPrompt,
    CountsNoCancelledPrompt,
    CutsPrompts,
    LosesChats,
    LosesSpaces,
}

/// Converts an engine of tokens to an engine of text: token 7 is the word "7", in both directions. An answer ends by itself
/// after some words, unless it must not.
#[must_use]
pub fn spelled(subject: Subject) -> Subject {
    wrapped(subject, Flaw::None)
}

fn with_flaw(clean: &Clean, scenario: &Scenario, flaw: Flaw) -> Subject {
    wrapped(clean.build(scenario), flaw)
}

fn wrapped(subject: Subject, flaw: Flaw) -> Subject {
    let spelled = Spelled {
        config: Mutex::new(None),
        read: subject.text.clone(),
        chunks: Arc::default(),
        flaw,
    };
    faulty(subject, spelled)
}

/// The number of words after which an answer ends by itself.
const OWN_END_WORDS: u32 = 24;

struct Spelled {
    /// The declaration of the engine of tokens.
    config: Mutex<Option<EngineConfig>>,
    /// Decodes its tokens, if they have texts of their own.
    read: Option<Detokenize>,
    /// The total number of chunks sent.
    chunks: Arc<AtomicU32>,
    flaw: Flaw,
}

#[async_trait]
impl Fault for Spelled {
    fn declare(&self, config: &mut EngineConfig) {
        *self.config.lock() = Some(config.clone());
        config.vocab_size = None;
        config.canary = None;
        let can = &mut config.capabilities;
        can.inputs.remove(&InputKind::Tokens);
        can.inputs.extend([InputKind::Text, InputKind::Chat]);
        (can.resume, can.resume_as_prompt, can.max_logprobs) = (false, false, None);
    }

    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let (mut request, ctx) = (call.request, call.ctx);
        if matches!(&request.input, Input::Embed(_) | Input::Score(_)) {
            return inner.generate(request, ctx).await;
        }
        let is_chat = matches!(&request.input, Input::Chat(_));
        let mut prompt = if is_chat && self.flaw == Flaw::LosesChats {
            vec![0]
        } else {
            read(&request.input)
        };
        let config = self.config.lock().clone();
        if let Some(config) = &config {
            self.fit(&mut prompt, config);
        }
        let words = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        request.input = Input::Tokens(prompt.into());
        if let Some(config) = &config {
            config.check(&request)?;
        }
        let ends_itself = self.limit(&mut request);
        let counted = if self.flaw == Flaw::CountsNoPrompt {
            0
        } else {
            words
        };
        let ctx = ctx.with_prompt_tokens(counted);
        let outputs = inner.generate(request, ctx).await?;
        let writer = Writer {
            flaw: self.flaw,
            ends_itself,
            chunks: Arc::clone(&self.chunks),
            read: self.read.clone(),
        };
        Ok(raw(outputs.flat_map(move |item| {
            let items = match item {
                Ok(output) => writer.text_of(output),
                Err(error) => vec![Err(error)],
            };
            stream::iter(items)
        })))
    }
}

impl Spelled {
    /// Maps words that are no tokens of the engine to tokens; with the fault, truncates a prompt that is too long.
    fn fit(&self, prompt: &mut Vec<TokenId>, config: &EngineConfig) {
        let vocab_size = config
            .vocab_size
            .map_or(u32::MAX, std::num::NonZeroU32::get);
        for token in prompt.iter_mut() {
            *token %= vocab_size;
        }
        if self.flaw == Flaw::CutsPrompts {
            let most = config.context_length_tokens.saturating_sub(5);
            prompt.truncate(usize::try_from(most).unwrap_or(usize::MAX));
        }
    }

    /// Sets where the answer ends by itself. Returns whether that is before the requested limit.
    fn limit(&self, request: &mut GenerateRequest) -> bool {
        // A grammar determines where its texts end.
        if request.guided.is_some() {
            return false;
        }
        let stop = &mut request.stop;
        if stop.ignore_eos && self.flaw != Flaw::EndsAnyway {
            return false;
        }
        let least = if self.flaw == Flaw::ForgetsMinTokens {
            0
        } else {
            stop.min_tokens
        };
        let own_end = OWN_END_WORDS.max(least);
        stop.ignore_eos = true;
        let is_sooner = stop.max_tokens.is_none_or(|most| own_end < most);
        if is_sooner {
            stop.max_tokens = Some(own_end);
            stop.min_tokens = stop.min_tokens.min(own_end);
        }
        is_sooner
    }
}

/// The tokens of a text. An empty text becomes the token at the beginning of every text.
fn read(input: &Input) -> Vec<TokenId> {
    let text = match input {
        Input::Text(text) => text.to_string(),
        Input::Chat(chat) => chat
            .messages
            .iter()
            .filter_map(|message| message["content"].as_str())
            .collect(),
        Input::Tokens(_) | Input::Embed(_) | Input::Score(_) => String::new(),
    };
    let word = |word: &str| word.parse().unwrap_or_else(|_| sum(word));
    let tokens: Vec<TokenId> = text.split_whitespace().map(word).collect();
    if tokens.is_empty() { vec![0] } else { tokens }
}

fn sum(word: &str) -> TokenId {
    word.bytes().map(u32::from).sum()
}

/// Writes the items of one request.
struct Writer {
    flaw: Flaw,
    /// Whether its limit is its own end.
    ends_itself: bool,
    chunks: Arc<AtomicU32>,
    read: Option<Detokenize>,
}

impl Writer {
    /// Converts an item.
    fn text_of(&self, output: Output) -> Vec<Result<Output, EngineError>> {
        match output {
            Output::Tokens(chunk) => vec![Ok(self.chunk(&chunk.token_ids))],
            Output::Finished(mut finished) => {
                let last = std::mem::take(&mut finished.last);
                let before = (!last.is_empty()).then(|| Ok(self.chunk(&last.token_ids)));
                if self.ends_itself && finished.reason == FinishReason::Length {
                    finished.reason = FinishReason::Stop;
                }
                let is_cancelled = finished.reason == FinishReason::Cancelled;
                if self.flaw == Flaw::CountsNoCancelledPrompt && is_cancelled {
                    finished.usage.prompt_tokens = 0;
                }
                before
                    .into_iter()
                    .chain([Ok(Output::Finished(finished))])
                    .collect()
            }
            other @ (Output::Text(_) | Output::Embeddings(_) | Output::Scores(_)) => {
                vec![Ok(other)]
            }
        }
    }

    fn chunk(&self, tokens: &[TokenId]) -> Output {
        let text = match &self.read {
            Some(read) => read(tokens),
            None => self.words(tokens),
        };
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        let token_count = if self.flaw == Flaw::CountsCharacters {
            count(text.len())
        } else if self.flaw == Flaw::CountsNothing {
            0
        } else {
            count(tokens.len())
        };
        Output::Text(TextChunk { text, token_count })
    }

    fn words(&self, tokens: &[TokenId]) -> String {
        let number = self.chunks.fetch_add(1, Ordering::Relaxed);
        let space = match self.flaw == Flaw::LosesSpaces && number % 7 == 3 {
            true => "",
            false => " ",
        };
        tokens
            .iter()
            .map(|token| format!("{space}{token}"))
            .collect()
    }
}
