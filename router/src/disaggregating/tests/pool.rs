//! A pool of scripted instances.

use std::collections::VecDeque;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::stream;
use genset_backend_common::output::TokenChunk;
use genset_backend_common::{
    EngineError, ErrorKind, Finish, GenerateRequest, Output, OutputStream, RequestContext,
    RequestField, TokenId,
    transfer::{KvAddress, TransferParams},
};
use genset_runtime::InstanceId;
use parking_lot::Mutex;
use serde_json::json;
use tokio::time::Instant;

use super::{BLOCKS, CONTEXT, HOLDER};
use crate::route::{Holder, Route, Routed};

/// What a pool does with a request.
#[derive(Debug, Clone, Copy)]
pub(super) enum Does {
    /// Streams one token, and returns the location of the blocks.
    Prefills,
    /// Streams one token, and returns no location of blocks.
    NamesNoBlocks,
    /// Streams the first token, which ends the answer.
    Stops,
    /// Ends a cancelled answer before its first token.
    IsCancelled,
    /// Streams the whole answer.
    Answers,
    /// Streams this many tokens, and is then lost.
    Dies(u32, ErrorKind),
    /// Never streams anything.
    Hangs,
    Refuses(ErrorKind),
    /// Refuses the request's adapter.
    LacksAdapter,
    /// Cannot parse the transfer parameters.
    RefusesBlocks,
    /// Streams the whole answer, beginning with another token.
    AnswersOtherwise,
}

/// A pool of instances, numbered from `first`, one for each request.
pub(super) struct Fake {
    first: u64,
    pub(super) does: Mutex<VecDeque<Does>>,
    pub(super) asked: Mutex<Vec<(GenerateRequest, Vec<InstanceId>)>>,
    /// The time at which the last request had begun elsewhere.
    pub(super) began: Mutex<Option<Instant>>,
    pub(super) cached: u32,
}

impl Fake {
    pub(super) fn new(first: u64, does: impl IntoIterator<Item = Does>) -> Arc<Self> {
        Arc::new(Self {
            first,
            does: Mutex::new(does.into_iter().collect()),
            asked: Mutex::default(),
            began: Mutex::default(),
            cached: 0,
        })
    }

    pub(super) fn asked(&self) -> Vec<GenerateRequest> {
        let asked = self.asked.lock();
        asked.iter().map(|(request, _)| request.clone()).collect()
    }

    pub(super) fn count(&self) -> usize {
        self.asked.lock().len()
    }
}

/// Returns the token at a position of the sequence, the same for all instances.
pub(super) fn token(place: usize) -> TokenId {
    u32::try_from(place * 31 % 50 + 100).unwrap()
}

fn answer(request: &GenerateRequest, does: Does) -> Result<OutputStream, EngineError> {
    let prompt = request.tokens()?.len();
    let most = request.stop.max_tokens.unwrap_or(CONTEXT);
    let chunks = |count: u32, shift: u32| -> Vec<Result<Output, EngineError>> {
        let places = prompt..prompt + usize::try_from(count).unwrap();
        let tokens = places.map(|place| Ok(Output::from(token(place) + shift)));
        tokens.collect()
    };
    let prompt_tokens = u32::try_from(prompt).unwrap();
    let end = |finish: Finish, given: u32| {
        let finished = finish
            .with_cached_tokens(2)
            .into_finished(prompt_tokens, given);
        Ok(Output::Finished(Box::new(finished)))
    };
    let whole = |shift| {
        let mut items = chunks(most, shift);
        items.push(end(Finish::length(), most));
        items
    };
    let items = match does {
        Does::Prefills => {
            let source = KvAddress {
                plane: "memory".into(),
                location: format!("{BLOCKS}/{HOLDER}"),
                endpoint: BLOCKS.into(),
            };
            let blocks = TransferParams {
                source_worker_id: HOLDER.0,
                source: Some(Box::new(source)),
                data: json!("blocks"),
            };
            let last = TokenChunk::from(token(prompt));
            vec![end(
                Finish::length().with_last(last).with_transfer(blocks),
                0,
            )]
        }
        Does::NamesNoBlocks => vec![end(Finish::length().with_last(token(prompt)), 0)],
        Does::Stops => vec![end(Finish::stop_token(3).with_last(token(prompt)), 0)],
        Does::IsCancelled => vec![end(Finish::cancelled(), 0)],
        Does::Answers => whole(0),
        Does::AnswersOtherwise => whole(1),
        Does::Dies(count, kind) => {
            let mut items = chunks(count, 0);
            items.push(Err(EngineError::new(kind, "the worker is lost")));
            items
        }
        Does::Hangs => return Ok(OutputStream::from_raw(Box::pin(stream::pending()))),
        Does::Refuses(kind) => return Err(EngineError::new(kind, "refused")),
        Does::LacksAdapter => {
            let refusal = EngineError::new(ErrorKind::NotFound, "no such adapter");
            return Err(refusal.with_at(RequestField::Adapter));
        }
        Does::RefusesBlocks => {
            let problem = "they have another layout";
            return Err(EngineError::invalid_argument(
                RequestField::Transfer,
                problem,
            ));
        }
    };
    Ok(OutputStream::from_raw(Box::pin(stream::iter(items))))
}

#[async_trait]
impl Route for Fake {
    async fn route(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let count = {
            let mut asked = self.asked.lock();
            asked.push((request.clone(), left_out.to_vec()));
            u64::try_from(asked.len()).unwrap()
        };
        *self.began.lock() = ctx.began();
        let does = self.does.lock().pop_front();
        let does = does.unwrap_or(Does::Refuses(ErrorKind::Unavailable));
        if matches!(does, Does::Refuses(ErrorKind::Disconnected)) {
            // As a client of instances does.
            ctx.note_loss();
        }
        Ok(Routed {
            holder: Holder::One(InstanceId(self.first + count)),
            began: Instant::now(),
            outputs: answer(&request, does)?,
        })
    }

    fn cached_tokens(&self, _request: &GenerateRequest) -> u32 {
        self.cached
    }
}
