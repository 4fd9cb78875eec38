//! [`mailbox`]: carries one request's tokens from the engine thread to the stream's reader.
//!
//! Each step's tokens are an item. A reader with [`BEHIND_ITEMS`] unread items is [behind](Outlet::is_behind), and its
//! sequence is paused until the reader has taken them all.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use futures_core::Stream;
use genset_backend_common::inbox::{Inbox, Taken};
use genset_backend_common::output::{Finish, Output, OutputStream, TokenChunk};
use genset_backend_common::{EngineError, RequestContext};

/// Unread items after which a sequence is paused: seconds of generation, and a few kilobytes.
const BEHIND_ITEMS: usize = 64;

/// Tells the engine thread to look again, because the reader caught up or left.
pub(crate) type Nudge = Box<dyn Fn() + Send + Sync>;

/// Creates the writing and the reading end of one request's mailbox.
pub(crate) fn mailbox(ctx: RequestContext, nudge: Nudge) -> (Outlet, OutputStream) {
    let mailbox = Arc::new(Mailbox {
        inbox: Inbox::new(BEHIND_ITEMS),
        has_left: AtomicBool::new(false),
        ctx: ctx.clone(),
        nudge,
    });
    let cancelled = Box::pin(ctx.cancelled_owned());
    let inlet = Inlet {
        mailbox: Arc::clone(&mailbox),
        cancelled,
        streamed_tokens: 0,
        is_done: false,
    };
    (Outlet { mailbox }, OutputStream::from_raw(Box::pin(inlet)))
}

struct Mailbox {
    inbox: Inbox<TokenChunk, Result<Finish, EngineError>>,
    /// Whether the reader is gone.
    has_left: AtomicBool,
    ctx: RequestContext,
    nudge: Nudge,
}

/// The engine thread's end. If it is dropped without [`end`](Self::end), the stream ends with an error.
#[must_use]
pub(crate) struct Outlet {
    mailbox: Arc<Mailbox>,
}

impl Outlet {
    /// Adds tokens. Returns the reader to wake, if it waits.
    pub(crate) fn send(&self, chunk: TokenChunk) -> Option<Waker> {
        self.mailbox.inbox.push(chunk).0
    }

    /// Ends the request. Returns the reader to wake, if it waits.
    pub(crate) fn end(self, terminal: Result<Finish, EngineError>) -> Option<Waker> {
        self.mailbox.inbox.end(terminal)
    }

    /// Whether the reader is gone: the request was cancelled or its stream dropped.
    pub(crate) fn is_closed(&self) -> bool {
        self.mailbox.ctx.is_cancelled() || self.mailbox.has_left.load(Ordering::Acquire)
    }

    /// Whether the reader has so many unread items that the sequence should pause until it has taken them.
    pub(crate) fn is_behind(&self) -> bool {
        self.mailbox.inbox.is_behind()
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        let lost = EngineError::lost_with_engine();
        self.mailbox.inbox.end_and_wake(Err(lost));
    }
}

genset_backend_common::debug_as!(|it| Outlet {
    request: it.mailbox.ctx.id(),
    ..
});

/// The reader's end.
struct Inlet<C> {
    mailbox: Arc<Mailbox>,
    cancelled: Pin<Box<C>>,
    streamed_tokens: u32,
    is_done: bool,
}

impl<C> Inlet<C> {
    fn finish(&mut self, finish: Finish) -> Output {
        let prompt_tokens = self.mailbox.ctx.prompt_tokens();
        Output::Finished(Box::new(
            finish.into_finished(prompt_tokens, self.streamed_tokens),
        ))
    }

    /// Takes the next item of the mailbox; if it is empty, registers the reader's waker.
    fn take(&mut self, cx: &mut Context<'_>) -> Option<Result<Output, EngineError>> {
        match self.mailbox.inbox.poll_take(cx) {
            Poll::Ready(Taken::Item {
                item: tokens,
                has_caught_up,
                ..
            }) => {
                self.streamed_tokens = self.streamed_tokens.saturating_add(tokens.len());
                if has_caught_up {
                    (self.mailbox.nudge)();
                }
                Some(Ok(Output::Tokens(tokens)))
            }
            Poll::Ready(Taken::End(terminal)) => {
                self.is_done = true;
                Some(terminal.map(|finish| self.finish(finish)))
            }
            Poll::Pending => None,
        }
    }
}

impl<C: Future<Output = ()>> Stream for Inlet<C> {
    type Item = Result<Output, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.is_done {
            return Poll::Ready(None);
        }
        let is_cancelled = this.mailbox.ctx.is_cancelled();
        if !is_cancelled && let Some(item) = this.take(cx) {
            return Poll::Ready(Some(item));
        }
        if is_cancelled || this.cancelled.as_mut().poll(cx).is_ready() {
            this.is_done = true;
            (this.mailbox.nudge)();
            return Poll::Ready(Some(Ok(this.finish(Finish::cancelled()))));
        }
        Poll::Pending
    }
}

impl<C> Drop for Inlet<C> {
    fn drop(&mut self) {
        self.mailbox.has_left.store(true, Ordering::Release);
        if !self.is_done {
            (self.mailbox.nudge)();
        }
    }
}
