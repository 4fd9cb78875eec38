//! Answers whose content is constrained to a format, but which may call tools instead.
//!
//! A model calls tools in its own markup, which it cannot write if its answer is constrained from the first token. So the
//! answer begins unconstrained, and the model's parsers read along. If it calls a tool, it continues unchanged. When content
//! begins, the stream is dropped and the engine gets a second, constrained request with the reasoning as part of the prompt.
//! Until that is decided, only reasoning is emitted.
//!
//! The dropped tokens cost time and appear in no usage. Cached tokens are those of the second request: an engine that reuses
//! prefixes finds the whole prompt in its cache.

use std::sync::Arc;

use futures_util::{StreamExt as _, stream};
use genset_backend_common::output::{Finished, TokenChunk, TokenLogprob};
use genset_backend_common::{
    EngineError, FinishReason, GenerateRequest, GuidedDecoding, Input, Output, OutputStream,
    RequestContext, TokenId, ports::Generate, request::Shared,
};

use super::choices::with_clients_field;
use crate::markup::{Delta, Splitter};
use crate::text::Detokenizer;

/// The request to send when content begins.
pub(super) struct BoundRequest {
    pub(super) engine: Arc<dyn Generate>,
    /// The unconstrained request; its prompt is tokens.
    pub(super) request: GenerateRequest,
    pub(super) guided: Option<Shared<GuidedDecoding>>,
    /// The client's field that asks for `guided`.
    pub(super) bound_by: Option<Arc<str>>,
    /// The context of its own request: the other may still be in flight.
    pub(super) ctx: RequestContext,
}

/// An answer that begins with `free`, while the parsers read along, and whose content comes from `bound`.
///
/// # Cancel safety
/// Dropping it cancels its running requests.
pub(super) fn unless_called(
    free: OutputStream,
    detokenizer: Detokenizer,
    splitter: Splitter,
    bound: BoundRequest,
) -> OutputStream {
    let undecided = Undecided {
        free,
        reading: Reading {
            detokenizer,
            splitter,
            text: String::new(),
            thoughts: TokenChunk::default(),
            held: TokenChunk::default(),
        },
        thought: Vec::new(),
        bound,
    };
    let state = State::Undecided(Box::new(undecided));
    OutputStream::from_raw(Box::pin(stream::unfold(state, State::next)))
}

type Item = Result<Output, EngineError>;

enum State {
    Undecided(Box<Undecided>),
    /// Content begins after this reasoning; the constrained request is to be sent.
    Asking(Box<BoundRequest>, Vec<TokenId>),
    /// The constrained content, after this many tokens of reasoning.
    Bound(OutputStream, u32),
    /// It calls tools.
    Free(OutputStream),
    Ended,
}

impl State {
    async fn next(mut self) -> Option<(Item, Self)> {
        loop {
            let (item, next) = match self {
                Self::Undecided(undecided) => undecided.next().await?,
                Self::Asking(bound, thought) => {
                    let thoughts = u32::try_from(thought.len()).unwrap_or(u32::MAX);
                    match bound.ask(&thought).await {
                        Ok(outputs) => (None, Self::Bound(outputs, thoughts)),
                        Err(error) => (Some(Err(error)), Self::Ended),
                    }
                }
                Self::Bound(mut outputs, thoughts) => {
                    let item = outputs.next().await?;
                    let item = item.map(|output| behind_thoughts(output, thoughts));
                    (Some(item), Self::Bound(outputs, thoughts))
                }
                Self::Free(mut outputs) => (Some(outputs.next().await?), Self::Free(outputs)),
                Self::Ended => return None,
            };
            match item {
                Some(item) => return Some((item, next)),
                None => self = next,
            }
        }
    }
}

/// An answer that may still call tools.
struct Undecided {
    free: OutputStream,
    reading: Reading,
    /// The emitted tokens.
    thought: Vec<TokenId>,
    bound: BoundRequest,
}

impl Undecided {
    /// Takes an item and returns what to emit of it.
    async fn next(mut self: Box<Self>) -> Option<(Option<Item>, State)> {
        let (chunk, finished) = match self.free.next().await? {
            Ok(Output::Tokens(chunk)) => (chunk, None),
            Ok(Output::Finished(mut finished)) => {
                (std::mem::take(&mut finished.last), Some(finished))
            }
            // An engine that gets tokens must return tokens.
            other => return Some((Some(other), State::Free(self.free))),
        };
        let mut found = match self.reading.read(chunk) {
            Ok(found) => found,
            Err(error) => return Some((Some(Err(error)), State::Ended)),
        };
        if let (None, Some(_)) = (found, &finished) {
            found = self.reading.finish();
        }
        let is_over = finished.as_ref().is_some_and(|it| !self.may_ask(it));
        if found == Some(Found::Call) || is_over {
            let rest = self.reading.all();
            return Some(match finished {
                Some(finished) => (ended(finished, rest), State::Ended),
                None => (some(rest), State::Free(self.free)),
            });
        }
        let thoughts = std::mem::take(&mut self.reading.thoughts);
        self.thought.extend_from_slice(&thoughts.token_ids);
        // A free answer that ended without content may have room for it.
        let next = if found.is_some() || finished.is_some() {
            State::Asking(Box::new(self.bound), self.thought)
        } else {
            State::Undecided(self)
        };
        Some((some(thoughts), next))
    }

    /// Whether there is room for content after the reasoning of a free answer that ended with `finished`.
    fn may_ask(&self, finished: &Finished) -> bool {
        let thought = self.thought.len() + self.reading.thoughts.token_ids.len();
        let has_room = match finished.reason {
            FinishReason::Stop => {
                let limit = self.bound.request.stop.max_tokens;
                limit.is_none_or(|limit| u32::try_from(thought).is_ok_and(|it| it < limit))
            }
            // The dropped tokens leave room.
            FinishReason::Length => !self.reading.held.is_empty(),
            FinishReason::Cancelled | FinishReason::ContentFilter => false,
        };
        has_room && !self.reading.is_thinking()
    }
}

/// What an answer turns out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Call,
    Content,
}

/// The beginning of an answer, read by the model's parsers.
struct Reading {
    detokenizer: Detokenizer,
    splitter: Splitter,
    /// The text of a token; empty between two.
    text: String,
    /// Reasoning and its markers, to be emitted.
    thoughts: TokenChunk,
    /// Tokens that may be content.
    held: TokenChunk,
}

impl Reading {
    fn is_thinking(&self) -> bool {
        self.splitter.is_thinking() == Some(true)
    }

    /// Reads until the kind of answer is known. Tokens after a call are held.
    fn read(&mut self, chunk: TokenChunk) -> Result<Option<Found>, EngineError> {
        let mut logprobs = chunk.logprobs.into_iter();
        let mut found = None;
        for token in chunk.token_ids {
            push(&mut self.held, token, logprobs.next());
            if found == Some(Found::Call) {
                continue;
            }
            let was_thinking = self.is_thinking();
            self.detokenizer.push(token, &mut self.text);
            self.splitter
                .push(&self.text, |delta| note(delta, &mut found));
            self.text.clear();
            match found {
                Some(Found::Content) if was_thinking => return Err(torn()),
                Some(Found::Content) => break,
                Some(Found::Call) => {}
                None if was_thinking || self.is_thinking() => self.thoughts = self.all(),
                None => {}
            }
        }
        Ok(found)
    }

    /// Ends the text.
    fn finish(&mut self) -> Option<Found> {
        let mut found = None;
        self.detokenizer.finish(&mut self.text);
        self.splitter
            .push(&self.text, |delta| note(delta, &mut found));
        self.text.clear();
        self.splitter.finish(|delta| note(delta, &mut found));
        found
    }

    /// Returns the tokens that were not emitted yet.
    fn all(&mut self) -> TokenChunk {
        let mut all = std::mem::take(&mut self.thoughts);
        let held = std::mem::take(&mut self.held);
        all.token_ids.extend(held.token_ids);
        all.logprobs.extend(held.logprobs);
        all
    }
}

fn push(chunk: &mut TokenChunk, token: TokenId, logprob: Option<TokenLogprob>) {
    chunk.token_ids.push(token);
    chunk.logprobs.extend(logprob);
}

/// The first call or content decides. White space around markup is not content.
fn note(delta: Delta<'_>, found: &mut Option<Found>) {
    let seen = match delta {
        Delta::ToolCall { .. } | Delta::Arguments { .. } => Found::Call,
        Delta::Content(text) if !text.trim().is_empty() => Found::Content,
        Delta::Content(_) | Delta::Reasoning(_) => return,
    };
    found.get_or_insert(seen);
}

fn some(chunk: TokenChunk) -> Option<Item> {
    (!chunk.is_empty()).then(|| Ok(Output::Tokens(chunk)))
}

fn ended(mut finished: Box<Finished>, last: TokenChunk) -> Option<Item> {
    finished.last = last;
    Some(Ok(Output::Finished(finished)))
}

/// An item of the constrained stream, whose prompt ends with `thoughts` tokens of the answer.
fn behind_thoughts(mut output: Output, thoughts: u32) -> Output {
    if let Output::Finished(finished) = &mut output {
        let usage = &mut finished.usage;
        usage.prompt_tokens = usage.prompt_tokens.saturating_sub(thoughts);
        usage.completion_tokens = usage.completion_tokens.saturating_add(thoughts);
        let prompt_tokens = usage.prompt_tokens;
        usage.cached_tokens = usage.cached_tokens.map(|cached| cached.min(prompt_tokens));
    }
    output
}

fn torn() -> EngineError {
    EngineError::internal(
        "one token of this model ends its reasoning and begins its answer, so the answer cannot be bound to a format; leave \
         out 'tools', or send \"tool_choice\": \"none\"",
    )
}

impl BoundRequest {
    /// Requests the content after this reasoning.
    async fn ask(self, thought: &[TokenId]) -> Result<OutputStream, EngineError> {
        let mut request = self.request;
        if let Input::Tokens(prompt) = &mut request.input {
            *prompt = [prompt.as_slice(), thought].concat().into();
        }
        let thoughts = u32::try_from(thought.len()).unwrap_or(u32::MAX);
        let stop = &mut request.stop;
        stop.max_tokens = stop.max_tokens.map(|limit| limit.saturating_sub(thoughts));
        stop.min_tokens = stop.min_tokens.saturating_sub(thoughts);
        request.guided = self.guided;
        let started = self.engine.generate(request, self.ctx).await;
        with_clients_field(started, self.bound_by)
    }
}
