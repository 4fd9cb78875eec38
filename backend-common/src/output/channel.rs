//! [`channel`]: an engine thread writes to it, and an [`OutputStream`] reads from it.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use futures_core::Stream;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::{Finish, Output, OutputStream, TokenChunk};
use crate::context::RequestContext;
use crate::error::{EngineError, ErrorKind};

/// Items that may wait for a slow reader before the engine gets `Full`: a few decode steps, so that an engine step never waits
/// for one client. A client that stops reading holds a few kilobytes at most.
pub(super) const DEFAULT_CAPACITY: usize = 64;

type Terminal = Arc<Mutex<Option<Result<Finish, EngineError>>>>;

/// Creates a bounded channel between an engine thread and a stream, with room for 64 items.
///
/// The stream counts the items read and computes the usage; the sink knows nothing of the request. On cancellation the stream
/// ends as cancelled at once, and the sink is closed.
///
/// # Examples
/// ```
/// use futures_util::StreamExt;
/// use genset_backend_common::RequestContext;
/// use genset_backend_common::output::{self, Finish, Output};
///
/// # futures_util::future::FutureExt::now_or_never(async {
/// let (sink, mut outputs) = output::channel(RequestContext::new("r"));
/// std::thread::spawn(move || {
///     sink.try_send(7.into()).unwrap();
///     sink.finish(Finish::stop());
/// }).join().unwrap();
/// assert_eq!(outputs.next().await.unwrap().unwrap(), Output::from(7));
/// assert!(outputs.next().await.unwrap().unwrap().is_terminal());
/// # }).unwrap();
/// ```
///
/// Two terminals do not compile: `finish` consumes the sink.
/// ```compile_fail
/// use genset_backend_common::RequestContext;
/// use genset_backend_common::output::{self, Finish};
///
/// let (sink, _outputs) = output::channel(RequestContext::new("r"));
/// sink.finish(Finish::stop());
/// sink.finish(Finish::length()); // use of moved value
/// ```
/// Neither does a token after the terminal.
/// ```compile_fail
/// use genset_backend_common::RequestContext;
/// use genset_backend_common::output::{self, Finish};
///
/// let (sink, _outputs) = output::channel(RequestContext::new("r"));
/// sink.finish(Finish::stop());
/// sink.try_send(7.into()); // use of moved value
/// ```
pub fn channel(ctx: RequestContext) -> (TokenSink, OutputStream) {
    channel_with_capacity(ctx, DEFAULT_CAPACITY)
}

/// Like [`channel`], with room for `capacity` items, at least 1.
pub fn channel_with_capacity(ctx: RequestContext, capacity: usize) -> (TokenSink, OutputStream) {
    let (items, receiver) = mpsc::channel(capacity.max(1));
    let terminal = Terminal::default();
    let sink = TokenSink {
        items,
        terminal: Arc::clone(&terminal),
        ctx: ctx.clone(),
    };
    let cancelled = Box::pin(ctx.cancelled_owned());
    let stream = ChannelStream {
        items: receiver,
        terminal,
        ctx,
        cancelled,
        streamed_tokens: 0,
        is_done: false,
    };
    (sink, OutputStream::from_raw(Box::pin(stream)))
}

/// Why [`TokenSink::send`] failed: the request was cancelled or its stream dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the request was cancelled or its stream dropped; free what it holds")]
pub struct SendError;

/// Why [`TokenSink::try_send`] failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TrySendError {
    /// The reader is behind; keep the tokens and retry at the next step.
    #[error("the reader is behind; keep the tokens and send them with the next step")]
    Full(TokenChunk),
    /// The request was cancelled or its stream dropped; free what the request holds.
    #[error("the request was cancelled or its stream dropped; free what it holds")]
    Closed,
}

/// The writing side of [`channel`]. If it is dropped without [`finish`](Self::finish) or [`fail`](Self::fail), the stream ends
/// with `StreamIncomplete`.
#[derive(Debug)]
#[must_use = "dropping the sink unfinished ends the stream with StreamIncomplete"]
pub struct TokenSink {
    items: mpsc::Sender<Output>,
    terminal: Terminal,
    ctx: RequestContext,
}

impl TokenSink {
    /// Sends tokens; waits while the reader is behind.
    ///
    /// # Errors
    /// [`SendError`] when the request was cancelled or the stream dropped.
    ///
    /// # Cancel safety
    /// If another branch wins, the tokens are not sent.
    pub async fn send(&self, chunk: TokenChunk) -> Result<(), SendError> {
        let chunk = match self.try_send(chunk) {
            Ok(()) => return Ok(()),
            Err(TrySendError::Closed) => return Err(SendError),
            Err(TrySendError::Full(chunk)) => chunk,
        };
        // A stream that is held but not polled does not close the channel on cancellation.
        tokio::select! {
            biased;
            () = self.ctx.cancelled() => Err(SendError),
            room = self.items.reserve() => {
                room.map_err(|_| SendError)?.send(Output::Tokens(chunk));
                Ok(())
            }
        }
    }

    /// Sends tokens if there is room; never waits. For engine threads, once per step.
    ///
    /// # Errors
    /// [`TrySendError::Full`] returns the tokens; [`TrySendError::Closed`] means that nobody reads them.
    pub fn try_send(&self, chunk: TokenChunk) -> Result<(), TrySendError> {
        if self.is_closed() {
            return Err(TrySendError::Closed);
        }
        self.items
            .try_send(Output::Tokens(chunk))
            .map_err(|error| match error {
                mpsc::error::TrySendError::Full(Output::Tokens(chunk)) => TrySendError::Full(chunk),
                mpsc::error::TrySendError::Full(_) | mpsc::error::TrySendError::Closed(_) => {
                    TrySendError::Closed
                }
            })
    }

    /// Sends tokens from an engine's own thread; blocks while the reader is behind.
    ///
    /// # Errors
    /// [`SendError`] when the request was cancelled or the stream dropped.
    ///
    /// # Panics
    /// When called on an async thread, as [`mpsc::Sender::blocking_send`] does.
    pub fn blocking_send(&self, chunk: TokenChunk) -> Result<(), SendError> {
        if self.is_closed() {
            return Err(SendError);
        }
        if !self.is_full() {
            let sent = self.items.blocking_send(Output::Tokens(chunk));
            return sent.map_err(|_| SendError);
        }
        block_on(self.send(chunk))
    }

    /// Ends the sequence. Never waits.
    pub fn finish(self, finish: Finish) {
        *self.terminal.lock() = Some(Ok(finish));
    }

    /// Ends the sequence with an error. Never waits.
    pub fn fail(self, error: EngineError) {
        *self.terminal.lock() = Some(Err(error));
    }

    /// Returns whether the channel is closed: the request was cancelled or its stream dropped.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.items.is_closed() || self.ctx.is_cancelled()
    }

    /// Returns whether the reader is so far behind that there is no room for another item. Only the sink adds items, so if it is
    /// not full, the next [`try_send`](Self::try_send) has room, however late: an engine can skip a sequence in its next step
    /// instead of buffering tokens.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.items.capacity() == 0
    }

    /// Waits until there is room for an item or the channel is closed.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn has_room(&self) {
        tokio::select! {
            // Only the wait matters: release the permit at once.
            permit = self.items.reserve() => drop(permit),
            () = self.ctx.cancelled() => {}
        }
    }

    /// Waits until the request is cancelled or its stream is dropped.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn closed(&self) {
        tokio::select! {
            () = self.items.closed() => {}
            () = self.ctx.cancelled() => {}
        }
    }

    /// Returns the request's context.
    #[must_use]
    pub fn context(&self) -> &RequestContext {
        &self.ctx
    }
}

/// Blocks a non-async thread on a future.
///
/// # Panics
/// On an async thread, which must not block.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    // Already complete: called only for its panic.
    let (ready, is_ready) = oneshot::channel();
    let _ = ready.send(());
    let _ = is_ready.blocking_recv();
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        std::thread::park();
    }
}

/// Unparks a thread when woken.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

struct ChannelStream<C> {
    items: mpsc::Receiver<Output>,
    terminal: Terminal,
    ctx: RequestContext,
    cancelled: Pin<Box<C>>,
    streamed_tokens: u32,
    is_done: bool,
}

impl<C> ChannelStream<C> {
    fn finish(&mut self, finish: Finish) -> Output {
        self.is_done = true;
        self.items.close();
        Output::Finished(Box::new(
            finish.into_finished(self.ctx.prompt_tokens(), self.streamed_tokens),
        ))
    }
}

impl<C: Future<Output = ()>> Stream for ChannelStream<C> {
    type Item = Result<Output, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.is_done {
            return Poll::Ready(None);
        }
        if this.ctx.is_cancelled() {
            return Poll::Ready(Some(Ok(this.finish(Finish::cancelled()))));
        }
        match this.items.poll_recv(cx) {
            Poll::Ready(Some(item)) => {
                this.streamed_tokens = this.streamed_tokens.saturating_add(item.token_count());
                Poll::Ready(Some(Ok(item)))
            }
            // The sink is gone, with or without a terminal.
            Poll::Ready(None) => {
                let terminal = this.terminal.lock().take();
                Poll::Ready(terminal.map(|result| match result {
                    Err(error)
                        if error.kind() == ErrorKind::Cancelled && this.ctx.is_cancelled() =>
                    {
                        Ok(this.finish(Finish::cancelled()))
                    }
                    result => result.map(|finish| this.finish(finish)),
                }))
            }
            Poll::Pending => match this.cancelled.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(Some(Ok(this.finish(Finish::cancelled())))),
                Poll::Pending => Poll::Pending,
            },
        }
    }
}
