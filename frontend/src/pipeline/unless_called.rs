//! Answers whose content is bound to a format, and which may call tools instead.
//!
//! A model calls tools in markup of its own, which it cannot write where its answer is bound from the first token on. So such an
//! answer begins free, and the model's parsers read along. If it calls a tool, it goes on as it is. Once content begins, its
//! stream is given up and the engine is asked again, bound, with what was thought as part of the prompt. Until that is
//! decided only thoughts are handed on.
//!
//! The tokens that were given up cost time and are in no usage. Cached tokens are those of the second request: an engine that
//! reuses prefixes finds the whole prompt there.

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

/// What is asked once content begins.
pub(super) struct BoundRequest {
    pub(super) engine: Arc<dyn Generate>,
    /// The free request: its prompt is tokens, and nothing binds it.
    pub(super) request: GenerateRequest,
    pub(super) guided: Option<Shared<GuidedDecoding>>,
    /// The client's field that asks for `guided`.
    pub(super) bound_by: Option<Arc<str>>,
    /// Of a request of its own: the other may still be in flight.
    pub(super) ctx: RequestContext,
}

/// The answer that begins with `free`, which these two read along, and whose content is `bound`.
///
/// # Cancel safety
/// Dropping it cancels what runs of it.
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
    /// Content begins behind these thoughts, and is to be asked for.
    Asking(Box<BoundRequest>, Vec<TokenId>),
    /// The content, behind so many tokens of thoughts.
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
    /// The tokens that were handed on.
    thought: Vec<TokenId>,
    bound: BoundRequest,
}

impl Undecided {
    /// Takes an item, and says what to hand on of it.
    async fn next(mut self: Box<Self>) -> Option<(Option<Item>, State)> {
        let (chunk, finished) = match self.free.next().await? {
            Ok(Output::Tokens(chunk)) => (chunk, None),
            Ok(Output::Finished(mut finished)) => {
                (std::mem::take(&mut finished.last), Some(finished))
            }
            // Who was sent tokens answers so.
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
        // A free answer that ended without content has room for it.
        let next = if found.is_some() || finished.is_some() {
            State::Asking(Box::new(self.bound), self.thought)
        } else {
            State::Undecided(self)
        };
        Some((some(thoughts), next))
    }

    /// Whether there is room for content behind what a free answer that ended so has thought.
    fn may_ask(&self, finished: &Finished) -> bool {
        let thought = self.thought.len() + self.reading.thoughts.token_ids.len();
        let has_room = match finished.reason {
            FinishReason::Stop => {
                let limit = self.bound.request.stop.max_tokens;
                limit.is_none_or(|limit| u32::try_from(thought).is_ok_and(|it| it < limit))
            }
            // It had room for what is given up.
            FinishReason::Length => !self.reading.held.is_empty(),
            FinishReason::Cancelled | FinishReason::ContentFilter => false,
        };
        has_room && !self.reading.is_thinking()
    }
}

/// What an answer turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Call,
    Content,
}

/// The beginning of an answer, as the model's parsers see it.
struct Reading {
    detokenizer: Detokenizer,
    splitter: Splitter,
    /// The text of a token; empty between two.
    text: String,
    /// Thoughts and their markers, to be handed on.
    thoughts: TokenChunk,
    /// What may be content.
    held: TokenChunk,
}

impl Reading {
    fn is_thinking(&self) -> bool {
        self.splitter.is_thinking() == Some(true)
    }

    /// Reads until it is clear what the answer is. What comes after a call is held.
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

    /// The text is over.
    fn finish(&mut self) -> Option<Found> {
        let mut found = None;
        self.detokenizer.finish(&mut self.text);
        self.splitter
            .push(&self.text, |delta| note(delta, &mut found));
        self.text.clear();
        self.splitter.finish(|delta| note(delta, &mut found));
        found
    }

    /// What was not handed on yet.
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

/// The first of both decides. White space around markup is no content.
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

/// An item of the bound stream, whose prompt ended with so many tokens of the answer.
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
        "one token of the model's ends its thoughts and begins its answer, which cannot be bound to a format then; ask \
         without tools, or send \"tool_choice\": \"none\"",
    )
}

impl BoundRequest {
    /// Asks for the content behind these thoughts.
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
