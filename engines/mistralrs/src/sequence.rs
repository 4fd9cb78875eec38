//! [`Sequence`]: one request, shared by the stream that a client reads and the computing thread of mistral.rs.
//!
//! In each step mistral.rs shows the sequence's logits to a [`Chooser`]. It chooses the token, puts it into the stream, and returns
//! logits of which the greedy sampler of mistral.rs can only take that token. The text that mistral.rs streams is discarded.
//!
//! mistral.rs has two ways to end a sequence early. An error of a processor loses the tokens of the sequence's neighbours. So
//! this engine uses the other: a sequence drops its receiver when it ends, or when its client leaves.

use std::sync::Arc;

use genset_backend_common::output::{Finish, OutputWriter, TokenChunk};
use genset_backend_common::{EngineError, ErrorKind, StopConditions, TokenId};
use genset_sampling::Sampler;
use genset_sampling::guided::Guide;
use mistralrs::{
    CustomLogitsProcessor, Device, NormalRequest, Request, RequestMessage, Response,
    SamplingParams, Tensor,
};
use parking_lot::Mutex;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The most tokens that wait for a reader. If its reader is further behind, a sequence gives up its place. It is computed again
/// from its tokens when the reader is back.
const AHEAD_TOKENS: usize = 32;

/// Capacity for what mistral.rs sends before the next step makes room: one chunk per step, or an error.
const RESPONSES: usize = 8;

enum Item {
    Token(TokenChunk),
    End(Result<Finish, EngineError>),
}

/// A request in progress.
pub(crate) struct Sequence(Arc<Mutex<State>>);

pub(crate) struct State {
    /// The prompt and the chosen tokens.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) sampler: Sampler,
    pub(crate) guide: Option<Guide>,
    pub(crate) stop: StopConditions,
    pub(crate) max_tokens: u32,
    /// The receiver of what mistral.rs sends. Dropping it tells mistral.rs to end the sequence.
    pub(crate) responses: Option<Receiver<Response>>,
    /// The sequence gave up its place; no token was lost.
    pub(crate) is_parked: bool,
}

impl Sequence {
    pub(crate) fn new(state: State) -> Self {
        Self(Arc::new(Mutex::new(state)))
    }

    /// Lets mistral.rs compute the answer, and writes it.
    ///
    /// # Cancel safety
    /// If dropped, it frees its place in mistral.rs within a step.
    pub(crate) async fn run(
        self,
        id: usize,
        places: Arc<Semaphore>,
        requests: &Sender<Request>,
        out: &OutputWriter,
    ) -> Result<Finish, EngineError> {
        // The grammar allows only the empty text.
        if self.0.lock().guide.as_ref().is_some_and(Guide::is_finished) {
            return Ok(Finish::stop());
        }
        loop {
            let place = Arc::clone(&places).acquire_owned().await;
            let (request, mut items) = self.ask(id, place.map_err(|_| has_stopped())?);
            requests.send(request).await.map_err(|_| has_stopped())?;
            while let Some(item) = items.recv().await {
                match item {
                    Item::Token(chunk) => out.tokens(chunk).await?,
                    Item::End(end) => return end,
                }
            }
            // mistral.rs has dropped the sequence.
            let mut state = self.0.lock();
            if !std::mem::take(&mut state.is_parked) {
                return Err(state.failure(requests));
            }
        }
    }

    /// The request to mistral.rs for the rest of the answer.
    fn ask(&self, id: usize, place: OwnedSemaphorePermit) -> (Request, Receiver<Item>) {
        let (sender, items) = channel(AHEAD_TOKENS);
        let (responses, receiver) = channel(RESPONSES);
        let mut state = self.0.lock();
        state.responses = Some(receiver);
        let left = state.max_tokens - state.sampler.generated();
        let chooser = Chooser {
            state: Arc::clone(&self.0),
            items: sender,
            _place: place,
        };
        let tokens = state.tokens.clone();
        let request = asked(id, tokens, left, responses, Arc::new(chooser));
        (request, items)
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.0.lock().responses = None;
    }
}

/// A request to mistral.rs for at most `max_tokens` greedy tokens of the logits that `chooser` returns.
pub(crate) fn asked(
    id: usize,
    tokens: Vec<TokenId>,
    max_tokens: u32,
    responses: Sender<Response>,
    chooser: Arc<dyn CustomLogitsProcessor>,
) -> Request {
    let sampling = SamplingParams {
        temperature: Some(0.0),
        max_len: usize::try_from(max_tokens).ok(),
        ..SamplingParams::neutral()
    };
    let message = RequestMessage::CompletionTokens(tokens);
    Request::Normal(Box::new(NormalRequest {
        is_streaming: true,
        logits_processors: Some(vec![chooser]),
        ..NormalRequest::new_simple(message, sampling, responses, id, None, None)
    }))
}

/// Chooses a sequence's tokens, on the thread of mistral.rs.
struct Chooser {
    state: Arc<Mutex<State>>,
    /// Dropped when mistral.rs drops the sequence, for whatever reason.
    items: Sender<Item>,
    /// Released at the same time.
    _place: OwnedSemaphorePermit,
}

impl CustomLogitsProcessor for Chooser {
    fn apply(&self, logits: &Tensor, _: &[TokenId]) -> mistralrs::Result<Tensor> {
        let mut state = self.state.lock();
        let state = &mut *state;
        // Nobody sees what is chosen for a sequence that has ended.
        let over = Ok(logits.clone());
        let Some(responses) = &mut state.responses else {
            return over;
        };
        while responses.try_recv().is_ok() {}
        let Ok(place) = self.items.try_reserve() else {
            state.is_parked = true;
            state.responses = None;
            return over;
        };
        let row = logits.to_vec1().map_err(|error| {
            EngineError::internal("the logits of mistral.rs are no row").with_source(error)
        });
        let item = row.and_then(|row| state.next(row));
        let item = item.unwrap_or_else(|error| Item::End(Err(error)));
        if let Item::End(_) = &item {
            state.responses = None;
        }
        place.send(item);
        only(state.tokens.last(), logits.elem_count())
    }
}

/// Logits whose best token is `token`.
fn only(token: Option<&TokenId>, vocab_size: usize) -> mistralrs::Result<Tensor> {
    let ids: std::ops::RangeFrom<TokenId> = 0..;
    let logits = ids.map(|id| f32::from(u8::from(Some(&id) == token)));
    let logits: Vec<f32> = logits.take(vocab_size).collect();
    Tensor::from_vec(logits, vocab_size, &Device::Cpu)
}

impl State {
    /// Chooses the next token, and returns the item for the reader.
    fn next(&mut self, mut row: Vec<f32>) -> Result<Item, EngineError> {
        let mask = self.guide.as_mut().map(Guide::mask).transpose()?;
        let sampled = self.sampler.sample(&mut row, mask.as_ref())?;
        let guide = self.guide.as_mut();
        let (chunk, end) =
            (self.sampler).accept_sampled(sampled, guide, &self.stop, self.max_tokens)?;
        self.tokens.extend_from_slice(&chunk.token_ids);
        Ok(match end {
            Some(finish) => Item::End(Ok(finish.with_last(chunk))),
            None => Item::Token(chunk),
        })
    }

    /// The reason why mistral.rs dropped the sequence before its end.
    fn failure(&mut self, requests: &Sender<Request>) -> EngineError {
        let mut responses = self.responses.take();
        let last = std::iter::from_fn(|| responses.as_mut()?.try_recv().ok()).last();
        match last.map(Response::as_result) {
            Some(Err(error)) => EngineError::internal("mistral.rs failed").with_source(*error),
            _ if requests.is_closed() => has_stopped(),
            _ => EngineError::new(ErrorKind::Disconnected, "mistral.rs lost the request"),
        }
    }
}

fn has_stopped() -> EngineError {
    EngineError::engine_shutdown("mistral.rs has stopped; send the request again")
}
