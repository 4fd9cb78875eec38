//! [`TwoLegs`]: one answer, from the prefill instance and then from the decode instance.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use futures_core::Stream;
use genset_backend_common::output::{Finished, TokenChunk};
use genset_backend_common::{
    EngineError, FinishReason, GenerateRequest, Output, OutputStream, RequestContext, TokenId,
    transfer::{KvTransfers, TransferParams},
};
use genset_runtime::InstanceId;
use tokio::time::Instant;

use super::Parts;
use super::handing::{Handing, Taken, Untaken};
use super::metrics::Leg;
use crate::migrating::without_seam;
use crate::route::{Holder, Route, Routed};

type Item = Result<Output, EngineError>;
type Handed = Pin<Box<dyn Future<Output = Result<Taken, Untaken>> + Send>>;

/// An answer in two legs.
pub(super) struct TwoLegs {
    parts: Arc<Parts>,
    decode: Arc<dyn Route>,
    request: GenerateRequest,
    ctx: RequestContext,
    left_out: Vec<InstanceId>,
    stage: Stage,
    /// When the search for the current leg's instance began.
    since: Instant,
    /// The instance that currently has the request, for the layers above.
    now: Arc<AtomicU64>,
    /// Tokens from the prefill leg, which the decode leg repeats.
    first: TokenChunk,
    /// Whether they were streamed to the client; otherwise the decode leg's are.
    passes_first: bool,
    /// The number of them that the decode leg has at the end of its prompt.
    resumed: u32,
    /// Prompt tokens that the prefill instance had cached.
    cached_tokens: Option<u32>,
    /// Blocks that perhaps have not been fetched yet.
    held: Option<TransferParams>,
}

/// The progress of an answer.
enum Stage {
    Prefill(OutputStream),
    /// The prefill leg has ended; the search for a decode instance runs, beside the wait for a cancellation.
    Handing(Handed, Pin<Box<dyn Future<Output = ()> + Send>>),
    Decode(Decode),
    Ended,
}

struct Decode {
    holder: Holder,
    outputs: OutputStream,
    /// Tokens that it has yet to repeat.
    again: usize,
    /// Whether its first tokens confirm that it has fetched the blocks.
    is_fetching: bool,
}

impl TwoLegs {
    /// Creates an answer; `since` is when the search for a prefill instance began.
    pub(super) fn new(
        parts: Arc<Parts>,
        decode: Arc<dyn Route>,
        request: GenerateRequest,
        ctx: RequestContext,
        since: Instant,
    ) -> Self {
        Self {
            parts,
            decode,
            request,
            ctx,
            left_out: Vec::new(),
            stage: Stage::Ended,
            since,
            now: Arc::default(),
            first: TokenChunk::default(),
            passes_first: true,
            resumed: 0,
            cached_tokens: None,
            held: None,
        }
    }

    /// Returns the answer, once a prefill instance has taken the request. `passes_first`: whether both legs choose the same first
    /// token.
    pub(super) fn begin(
        mut self,
        prefill: Routed,
        passes_first: bool,
        left_out: &[InstanceId],
    ) -> Routed {
        self.holds(&prefill.holder);
        self.stage = Stage::Prefill(prefill.outputs);
        self.passes_first = passes_first;
        self.left_out = left_out.to_vec();
        let holder = Holder::Now(Arc::clone(&self.now));
        Routed {
            holder,
            began: prefill.began,
            outputs: OutputStream::from_raw(Box::pin(self)),
        }
    }

    /// Publishes the instance that has the request.
    fn holds(&self, holder: &Holder) {
        self.now.store(id_of(holder), Ordering::Relaxed);
    }

    /// Records tokens from the prefill leg; returns the item to stream, if any.
    fn take_first(&mut self, chunk: TokenChunk) -> Option<Item> {
        self.first.token_ids.extend_from_slice(&chunk.token_ids);
        if self.passes_first {
            return Some(Ok(Output::Tokens(chunk)));
        }
        self.first.logprobs.extend(chunk.logprobs);
        None
    }

    /// Handles the end of the prefill leg; returns the item to stream, if any.
    fn prefilled(&mut self, mut finished: Finished) -> Option<Item> {
        if finished.reason != FinishReason::Cancelled {
            self.parts.metrics.prefilled_in(self.since.elapsed());
        }
        let transfer = finished.transfer.take();
        let goes_on = finished.reason == FinishReason::Length
            && self.first.len() + finished.last.len() < self.most_tokens();
        if goes_on && !self.ctx.is_cancelled() {
            self.cached_tokens = finished.usage.cached_tokens;
            let item = match finished.last.is_empty() {
                true => None,
                false => self.take_first(finished.last),
            };
            let transfer = transfer.unwrap_or_else(|| self.without_blocks());
            self.hand_over(transfer);
            return item;
        }
        if let Some(transfer) = transfer {
            self.parts.release(&transfer);
        }
        if !self.passes_first {
            let mut all = std::mem::take(&mut self.first);
            all.token_ids.extend_from_slice(&finished.last.token_ids);
            all.logprobs.append(&mut finished.last.logprobs);
            finished.last = all;
        }
        self.stage = Stage::Ended;
        Some(Ok(Output::Finished(Box::new(finished))))
    }

    /// Returns the parameters of a prefill that named no blocks, which its engine must: the decode instance computes the prompt.
    fn without_blocks(&self) -> TransferParams {
        if let Some(unlogged) = self.parts.logged.unlogged("no blocks") {
            tracing::warn!(
                request_id = self.ctx.id(),
                unlogged,
                "a prefill instance ended without transfer parameters; further requests are only counted for a minute"
            );
        }
        TransferParams::none()
    }

    /// The maximum length of the answer, in tokens.
    fn most_tokens(&self) -> u32 {
        self.request.max_tokens(self.parts.context_length_tokens)
    }

    /// The number of tokens of the prefill leg that were streamed to the client.
    fn passed(&self) -> u32 {
        match self.passes_first {
            true => self.first.len(),
            false => 0,
        }
    }

    /// The tokens of the prefill leg after which an instance that does not get its blocks continues. Such an instance may have
    /// other weights, and choose another first token. Empty if the engine cannot continue.
    fn given(&self) -> &[TokenId] {
        match self.passes_first && self.parts.can.resumes(&self.request).is_ok() {
            true => &self.first.token_ids,
            false => &[],
        }
    }

    /// Starts the search for a decode instance.
    fn hand_over(&mut self, transfer: TransferParams) {
        self.since = Instant::now();
        self.held = (!transfer.is_none()).then(|| transfer.clone());
        let handing = Handing {
            parts: Arc::clone(&self.parts),
            decode: Arc::clone(&self.decode),
            request: self.request.clone(),
            given: self.given().to_vec(),
            ctx: self.ctx.clone(),
            left_out: self.left_out.clone(),
        };
        let cancelled = Box::pin(self.ctx.cancelled_owned());
        self.stage = Stage::Handing(Box::pin(handing.run(transfer)), cancelled);
    }

    fn begin_decode(&mut self, taken: Taken) {
        let routed = match taken {
            Taken::Blocks(routed) => routed,
            Taken::Whole(routed) => {
                if let Some(transfer) = self.held.take() {
                    self.parts.release(&transfer);
                }
                self.resumed = u32::try_from(self.given().len()).unwrap_or(u32::MAX);
                routed
            }
        };
        self.holds(&routed.holder);
        self.stage = Stage::Decode(Decode {
            holder: routed.holder,
            outputs: routed.outputs,
            again: usize::try_from(self.passed() - self.resumed).unwrap_or(usize::MAX),
            is_fetching: self.held.is_some(),
        });
    }

    /// Passes an item of the decode leg to the client, without repeated tokens.
    fn pass(&mut self, output: Output) -> Option<Item> {
        match output {
            Output::Tokens(chunk) => {
                let chunk = match self.without_again(chunk) {
                    Ok(chunk) => chunk,
                    Err(error) => return Some(self.end(Err(error))),
                };
                (!chunk.is_empty()).then_some(Ok(Output::Tokens(chunk)))
            }
            Output::Finished(mut finished) => {
                finished.last = match self.without_again(finished.last) {
                    Ok(last) => last,
                    Err(error) => return Some(self.end(Err(error))),
                };
                without_seam(&mut finished, self.resumed);
                let passed = self.passed();
                let usage = &mut finished.usage;
                usage.completion_tokens = usage.completion_tokens.max(passed);
                // The decode instance reports the whole prompt as cached, since it just fetched it.
                usage.cached_tokens = self.cached_tokens;
                Some(self.end(Ok(Output::Finished(finished))))
            }
            other @ (Output::Text(_) | Output::Embeddings(_) | Output::Scores(_)) => {
                Some(Ok(other))
            }
        }
    }

    /// Returns the tokens of a chunk that the prefill leg did not stream.
    fn without_again(&mut self, mut chunk: TokenChunk) -> Result<TokenChunk, EngineError> {
        let Stage::Decode(decode) = &mut self.stage else {
            return Ok(chunk);
        };
        let count = decode.again.min(chunk.token_ids.len());
        if count == 0 {
            return Ok(chunk);
        }
        let start = self.first.token_ids.len() - decode.again;
        let given: &[TokenId] = &self.first.token_ids[start..start + count];
        if chunk.token_ids[..count] != *given {
            if let Some(unlogged) = self.parts.logged.unlogged("another first token") {
                tracing::error!(
                    request_id = self.ctx.id(),
                    unlogged,
                    "prefill and decode instance chose another first token; do they serve the same model? further requests are only counted for a minute"
                );
            }
            return Err(KvTransfers::lost(
                "the decode instance answers otherwise than the prefill instance",
            ));
        }
        decode.again -= count;
        chunk.token_ids.drain(..count);
        let logprobs = count.min(chunk.logprobs.len());
        chunk.logprobs.drain(..logprobs);
        Ok(chunk)
    }

    fn end(&mut self, item: Item) -> Item {
        self.stage = Stage::Ended;
        item
    }

    /// Returns the terminal of a request that was cancelled between its legs.
    fn cancelled(&mut self) -> Item {
        self.stage = Stage::Ended;
        let prompt = self.request.prompt_tokens().unwrap_or(0);
        Output::cancelled(&self.ctx, prompt, self.passed())
    }

    /// Returns the terminal of an answer whose leg failed.
    fn failed(&mut self, leg: Leg, error: EngineError) -> Option<Item> {
        self.parts.metrics.failed(leg, error.kind());
        Some(self.end(Err(error)))
    }

    fn poll_prefill(&mut self, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        let Stage::Prefill(outputs) = &mut self.stage else {
            return Poll::Ready(None);
        };
        Poll::Ready(match ready!(Pin::new(outputs).poll_next(cx)) {
            Some(Ok(Output::Tokens(chunk))) => self.take_first(chunk),
            Some(Ok(Output::Finished(finished))) => self.prefilled(*finished),
            Some(Ok(other)) => Some(Ok(other)),
            Some(Err(error)) => self.failed(Leg::Prefill, error),
            None => {
                self.stage = Stage::Ended;
                None
            }
        })
    }

    fn poll_handing(&mut self, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        let Stage::Handing(handing, cancelled) = &mut self.stage else {
            return Poll::Ready(None);
        };
        if let Poll::Ready(handed) = handing.as_mut().poll(cx) {
            return Poll::Ready(match handed {
                Ok(taken) => {
                    self.begin_decode(taken);
                    None
                }
                Err(_) if self.ctx.is_cancelled() => Some(self.cancelled()),
                Err(untaken) => {
                    let error = match untaken {
                        Untaken::Refused(error) => error,
                        Untaken::Nobody(error) => {
                            self.now.store(Holder::NOBODY, Ordering::Relaxed);
                            error
                        }
                    };
                    self.failed(Leg::Decode, error)
                }
            });
        }
        ready!(cancelled.as_mut().poll(cx));
        Poll::Ready(Some(self.cancelled()))
    }

    fn poll_decode(&mut self, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        let Stage::Decode(decode) = &mut self.stage else {
            return Poll::Ready(None);
        };
        let item = ready!(Pin::new(&mut decode.outputs).poll_next(cx));
        self.now.store(id_of(&decode.holder), Ordering::Relaxed);
        if std::mem::take(&mut decode.is_fetching) && matches!(item, Some(Ok(Output::Tokens(_)))) {
            self.held = None;
            self.parts.metrics.handed_over_in(self.since.elapsed());
        }
        Poll::Ready(match item {
            Some(Ok(output)) => self.pass(output),
            Some(Err(error)) => self.failed(Leg::Decode, error),
            None => {
                self.stage = Stage::Ended;
                None
            }
        })
    }
}

impl Stream for TwoLegs {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        let this = &mut *self;
        loop {
            let polled = match this.stage {
                Stage::Ended => return Poll::Ready(None),
                Stage::Prefill(_) => ready!(this.poll_prefill(cx)),
                Stage::Handing(..) => ready!(this.poll_handing(cx)),
                Stage::Decode(_) => ready!(this.poll_decode(cx)),
            };
            // Otherwise the item had nothing for the client, or its leg ended.
            if polled.is_some() {
                return Poll::Ready(polled);
            }
        }
    }
}

impl Drop for TwoLegs {
    fn drop(&mut self) {
        // End the decode leg before releasing its blocks.
        self.stage = Stage::Ended;
        if let Some(transfer) = self.held.take() {
            self.parts.release(&transfer);
        }
    }
}

/// Returns the id as the layers above read it.
fn id_of(holder: &Holder) -> u64 {
    holder.id().map_or(Holder::NOBODY, |instance| instance.0)
}
