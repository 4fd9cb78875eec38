//! A fleet of scripted instances.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use async_trait::async_trait;
use genset_backend_common::output::{Finish, Finished};
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, Input, Output, OutputStream, RequestContext,
    RequestField, TokenId,
};
use genset_runtime::InstanceId;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::CONTEXT;
use crate::route::{Holder, Route, Routed};

/// What the next instance does with a request.
#[derive(Debug, Clone, Copy)]
pub(super) enum Leg {
    /// Streams this many tokens, then fails.
    Fails(u32, ErrorKind),
    /// Streams everything.
    Finishes,
    /// Streams all tokens, and is lost before the terminal.
    LosesTerminal,
    /// Streams this many tokens; this process then has no memory for the next ones.
    FindsNoRoom(u32),
    /// Refuses the request.
    Refuses(ErrorKind),
    /// Refuses the request's adapter.
    LacksAdapter,
    /// Streams text, then fails.
    Text,
    /// Never streams anything.
    Hangs,
    /// Streams this many tokens; then no instance takes the request over.
    HandsToNobody(u32),
}

/// What an instance received.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    pub(super) request: GenerateRequest,
    pub(super) id: String,
    pub(super) began: Option<Instant>,
    pub(super) left_out: Vec<InstanceId>,
}

/// Instances that take one request each, in order; none is left after the last leg.
#[derive(Debug, Default)]
pub(super) struct Fleet {
    legs: Mutex<VecDeque<Leg>>,
    /// How long a request waits below this layer before an instance gets it.
    pub(super) waits: Mutex<Duration>,
    asked: Mutex<Vec<Asked>>,
}

/// Returns the token at a position of an answer: a function of prompt and position, like a deterministic model.
fn token_at(prompt: &[TokenId], position: u32) -> TokenId {
    let sum: u32 = prompt.iter().sum();
    sum * 31 + position * 7
}

fn disconnected(kind: ErrorKind) -> EngineError {
    EngineError::new(kind, "the worker is lost")
}

/// Returns the answer of an engine with `resume`.
fn answer(request: &GenerateRequest) -> (Vec<TokenId>, Finished) {
    let tokens = request.tokens().unwrap();
    let resumed = usize::try_from(request.resumed_tokens).unwrap();
    let (prompt, _) = tokens.split_at(tokens.len() - resumed);
    let count = request.max_tokens(CONTEXT);
    let given = (0..count).map(|at| token_at(prompt, request.resumed_tokens + at));
    let finish = Finish::length().with_cached_tokens(3 + request.resumed_tokens);
    let finished = finish.into_finished(u32::try_from(tokens.len()).unwrap(), count);
    (given.collect(), finished)
}

impl Fleet {
    pub(super) fn of(legs: impl IntoIterator<Item = Leg>) -> Arc<Self> {
        Arc::new(Self {
            legs: Mutex::new(legs.into_iter().collect()),
            waits: Mutex::default(),
            asked: Mutex::default(),
        })
    }

    pub(super) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().clone()
    }

    fn play(request: &GenerateRequest, leg: Leg) -> Result<OutputStream, EngineError> {
        let (tokens, finished) = match request.input {
            Input::Tokens(_) => answer(request),
            Input::Text(_) | Input::Chat(_) | Input::Embed(_) | Input::Score(_) => {
                (Vec::new(), Finish::stop().into_finished(0, 0))
            }
        };
        let tokens = tokens.into_iter().map(|token| Ok(Output::from(token)));
        let lost = Err(disconnected(ErrorKind::Disconnected));
        let items: Vec<Result<Output, EngineError>> = match leg {
            Leg::Refuses(kind) => return Err(disconnected(kind)),
            Leg::LacksAdapter => {
                let error = EngineError::not_found("nobody has the adapter");
                return Err(error.with_at(RequestField::Adapter));
            }
            Leg::Hangs => {
                let never = futures_util::stream::pending();
                return Ok(OutputStream::from_raw(Box::pin(never)));
            }
            Leg::Fails(count, kind) => {
                let count = usize::try_from(count).unwrap();
                tokens
                    .take(count)
                    .chain([Err(disconnected(kind))])
                    .collect()
            }
            Leg::FindsNoRoom(count) => {
                let full = disconnected(ErrorKind::Overloaded).with_own_shortage();
                let count = usize::try_from(count).unwrap();
                tokens.take(count).chain([Err(full)]).collect()
            }
            Leg::HandsToNobody(count) => {
                let nobody = Err(disconnected(ErrorKind::Unavailable));
                let count = usize::try_from(count).unwrap();
                tokens.take(count).chain([nobody]).collect()
            }
            Leg::Finishes => tokens
                .chain([Ok(Output::Finished(Box::new(finished)))])
                .collect(),
            Leg::LosesTerminal => tokens.chain([lost]).collect(),
            Leg::Text => {
                let text = genset_backend_common::output::TextChunk {
                    text: "a".into(),
                    token_count: 1,
                };
                vec![Ok(Output::Text(text)), lost]
            }
        };
        let items = futures_util::stream::iter(items);
        Ok(OutputStream::from_raw(Box::pin(items)))
    }
}

#[async_trait]
impl Route for Fleet {
    async fn route(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let waits = *self.waits.lock();
        if !waits.is_zero() {
            tokio::time::sleep(waits).await;
        }
        let (id, left_out) = (ctx.id().to_owned(), left_out.to_vec());
        let leg = self.legs.lock().pop_front();
        let count = {
            let mut asked = self.asked.lock();
            asked.push(Asked {
                request: request.clone(),
                id,
                began: ctx.began(),
                left_out,
            });
            asked.len()
        };
        let leg = leg.unwrap_or(Leg::Refuses(ErrorKind::Unavailable));
        if matches!(leg, Leg::Refuses(ErrorKind::Disconnected)) {
            // As a client of instances does.
            ctx.note_loss();
        }
        let holder = match leg {
            Leg::HandsToNobody(_) => Holder::Now(Arc::new(AtomicU64::new(Holder::NOBODY))),
            Leg::Fails(..)
            | Leg::FindsNoRoom(_)
            | Leg::Finishes
            | Leg::LosesTerminal
            | Leg::Refuses(_)
            | Leg::LacksAdapter
            | Leg::Text
            | Leg::Hangs => Holder::One(InstanceId(u64::try_from(count).unwrap())),
        };
        Ok(Routed {
            holder,
            began: Instant::now(),
            outputs: Self::play(&request, leg)?,
        })
    }
}
