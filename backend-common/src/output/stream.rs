//! [`stream`]: turns an async body into an [`OutputStream`]; the body's return value *is* the terminal.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures_core::Stream;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{Finish, Output, OutputStream, TextChunk, TokenChunk};
use crate::context::RequestContext;
use crate::error::{EngineError, ErrorKind};
use crate::request::TokenId;

/// Turns an async body into a stream. The body writes items and returns how the sequence finished. Tokens are counted as they are
/// read, so the usage is correct by construction. On cancellation the body is dropped at its current await point and the stream
/// ends as cancelled.
///
/// The body never runs ahead of the reader: a write waits until its item was read.
///
/// # Examples
/// ```
/// use futures_util::StreamExt;
/// use genset_backend_common::output::{self, Finish, FinishReason, Output};
/// use genset_backend_common::RequestContext;
///
/// # futures_util::future::FutureExt::now_or_never(async {
/// let ctx = RequestContext::new("r").with_prompt_tokens(3);
/// let mut outputs = output::stream(ctx, |out| async move {
///     out.token(7).await?;
///     out.token(8).await?;
///     Ok(Finish::length())
/// });
/// assert_eq!(outputs.next().await.unwrap().unwrap(), Output::from(7));
/// assert_eq!(outputs.next().await.unwrap().unwrap(), Output::from(8));
/// let Output::Finished(finished) = outputs.next().await.unwrap().unwrap() else { panic!() };
/// assert_eq!(finished.reason, FinishReason::Length);
/// assert_eq!(finished.usage.total_tokens(), 5);
/// # }).unwrap();
/// ```
///
/// Two terminals do not compile: the terminal is the body's return value.
/// ```compile_fail
/// use genset_backend_common::output::{self, Finish};
/// use genset_backend_common::RequestContext;
///
/// let outputs = output::stream(RequestContext::new("r"), |out| async move {
///     out.finish(Finish::stop()).await?; // no such method
///     Ok(Finish::length())
/// });
/// ```
/// ```compile_fail
/// use genset_backend_common::output::{self, Finish};
/// use genset_backend_common::RequestContext;
///
/// let outputs = output::stream(RequestContext::new("r"), |out| async move {
///     (Ok(Finish::stop()), Ok(Finish::length())) // not one terminal
/// });
/// ```
pub fn stream<F, Fut>(ctx: RequestContext, body: F) -> OutputStream
where
    F: FnOnce(OutputWriter) -> Fut,
    Fut: Future<Output = Result<Finish, EngineError>> + Send + 'static,
{
    let slot = Arc::new(Slot::default());
    let writer = OutputWriter {
        slot: Arc::clone(&slot),
        ctx: ctx.clone(),
    };
    let cancelled = ctx.cancelled_owned();
    OutputStream::from_raw(Box::pin(BodyStream {
        body: Some(Box::pin(body(writer))),
        cancelled: Box::pin(cancelled),
        slot,
        ctx,
        streamed_tokens: 0,
        terminal: None,
    }))
}

/// The writing side of [`stream`], passed to its body. It can be shared within the body, and moved into a separate task that does
/// not read the stream. Once the stream has ended, a write fails.
#[derive(Debug)]
pub struct OutputWriter {
    slot: Arc<Slot>,
    ctx: RequestContext,
}

impl OutputWriter {
    /// Streams one token.
    ///
    /// # Errors
    /// `Cancelled` when the request was cancelled or its stream has ended; propagate it with `?`.
    ///
    /// # Cancel safety
    /// A write dropped before it completes may or may not have streamed its item.
    pub async fn token(&self, token: TokenId) -> Result<(), EngineError> {
        self.send(Output::from(token)).await
    }

    /// Streams tokens that became ready together. Skips an empty chunk.
    ///
    /// # Errors
    /// As [`Self::token`].
    ///
    /// # Cancel safety
    /// As [`Self::token`].
    pub async fn tokens(&self, chunk: TokenChunk) -> Result<(), EngineError> {
        if chunk.is_empty() {
            return Ok(());
        }
        self.send(Output::Tokens(chunk)).await
    }

    /// Streams text with `token_count` tokens, from engines that detokenize themselves.
    ///
    /// # Errors
    /// As [`Self::token`].
    ///
    /// # Cancel safety
    /// As [`Self::token`].
    pub async fn text(&self, text: impl Into<String>, token_count: u32) -> Result<(), EngineError> {
        self.send(Output::Text(TextChunk {
            text: text.into(),
            token_count,
        }))
        .await
    }

    /// Streams the embeddings of an `Embed` request, one for each input.
    ///
    /// # Errors
    /// As [`Self::token`].
    ///
    /// # Cancel safety
    /// As [`Self::token`].
    pub async fn embeddings(&self, embeddings: Vec<Vec<f32>>) -> Result<(), EngineError> {
        self.send(Output::Embeddings(embeddings)).await
    }

    /// Streams the scores of a `Score` request, one for each pair.
    ///
    /// # Errors
    /// As [`Self::token`].
    ///
    /// # Cancel safety
    /// As [`Self::token`].
    pub async fn scores(&self, scores: Vec<f32>) -> Result<(), EngineError> {
        self.send(Output::Scores(scores)).await
    }

    async fn send(&self, output: Output) -> Result<(), EngineError> {
        let mut output = Some(output);
        std::future::poll_fn(|cx| {
            if self.ctx.is_cancelled() {
                return Poll::Ready(Err(self.cancelled()));
            }
            self.slot
                .poll_put(&mut output, cx)
                .map_err(|Closed| self.cancelled())
        })
        .await
    }

    fn cancelled(&self) -> EngineError {
        EngineError::new(ErrorKind::Cancelled, "the request was cancelled")
            .with_request_id(self.ctx.id())
    }
}

/// A slot for one item between the writers and their stream.
///
/// The stream polls a body that writes directly, right after an item was read; no wake is needed. Wakers are kept for writers
/// that are polled elsewhere: in a task or a set of futures.
#[derive(Debug, Default)]
struct Slot {
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    item: Option<Output>,
    /// The stream has ended or was dropped.
    is_closed: bool,
    /// The stream's waker, registered when it found no item.
    reader: Option<Waker>,
    /// Wakers of the writers that have waited since the last wake.
    writers: SmallVec<[Waker; 1]>,
}

/// The stream has ended or was dropped.
struct Closed;

impl Slot {
    /// Puts an item, and waits until it was read.
    fn poll_put(
        &self,
        output: &mut Option<Output>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Closed>> {
        let mut held = self.held.lock();
        if held.item.is_none() && output.is_none() {
            return Poll::Ready(Ok(()));
        }
        if held.is_closed {
            return Poll::Ready(Err(Closed));
        }
        let mut reader = None;
        if held.item.is_none() {
            held.item = output.take();
            reader = held.reader.take_if(|reader| !reader.will_wake(cx.waker()));
        }
        let is_known = |writer: &Waker| writer.will_wake(cx.waker());
        if !held.writers.iter().any(is_known) {
            held.writers.push(cx.waker().clone());
        }
        drop(held);
        if let Some(reader) = reader {
            reader.wake();
        }
        Poll::Pending
    }

    /// Takes the item, if there is one; otherwise registers the stream's waker.
    fn take(&self, cx: &Context<'_>) -> Option<Output> {
        let mut held = self.held.lock();
        let is_own = |waker: &Waker| waker.will_wake(cx.waker());
        let Some(item) = held.item.take() else {
            if !held.reader.as_ref().is_some_and(is_own) {
                held.reader = Some(cx.waker().clone());
            }
            return None;
        };
        if !held.writers.iter().all(is_own) {
            let writers = std::mem::take(&mut held.writers);
            drop(held);
            writers.into_iter().for_each(Waker::wake);
        }
        Some(item)
    }

    /// Closes the slot and wakes all writers.
    fn close(&self) {
        let mut held = self.held.lock();
        held.is_closed = true;
        let writers = std::mem::take(&mut held.writers);
        drop(held);
        writers.into_iter().for_each(Waker::wake);
    }
}

struct BodyStream<Fut, C> {
    body: Option<Pin<Box<Fut>>>,
    cancelled: Pin<Box<C>>,
    slot: Arc<Slot>,
    ctx: RequestContext,
    streamed_tokens: u32,
    terminal: Option<Result<Finish, EngineError>>,
}

impl<Fut, C> BodyStream<Fut, C> {
    fn finish(&mut self, result: Result<Finish, EngineError>) -> Result<Output, EngineError> {
        self.body = None;
        self.slot.close();
        let finish = match result {
            Err(error) if error.kind() == ErrorKind::Cancelled && self.ctx.is_cancelled() => {
                Finish::cancelled()
            }
            other => other?,
        };
        let finished = finish.into_finished(self.ctx.prompt_tokens(), self.streamed_tokens);
        Ok(Output::Finished(Box::new(finished)))
    }
}

impl<Fut, C> Drop for BodyStream<Fut, C> {
    fn drop(&mut self) {
        self.slot.close();
    }
}

impl<Fut, C> Stream for BodyStream<Fut, C>
where
    Fut: Future<Output = Result<Finish, EngineError>>,
    C: Future<Output = ()>,
{
    type Item = Result<Output, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if let Some(result) = this.terminal.take() {
            return Poll::Ready(Some(this.finish(result)));
        }
        let Some(body) = this.body.as_mut() else {
            return Poll::Ready(None);
        };
        if this.ctx.is_cancelled() {
            return Poll::Ready(Some(this.finish(Ok(Finish::cancelled()))));
        }
        if let Poll::Ready(result) = body.as_mut().poll(cx) {
            this.body = None;
            this.terminal = Some(result);
        }
        if let Some(item) = this.slot.take(cx) {
            this.streamed_tokens = this.streamed_tokens.saturating_add(item.token_count());
            return Poll::Ready(Some(Ok(item)));
        }
        if let Some(result) = this.terminal.take() {
            return Poll::Ready(Some(this.finish(result)));
        }
        match this.cancelled.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Some(this.finish(Ok(Finish::cancelled())))),
            Poll::Pending => Poll::Pending,
        }
    }
}
