//! An engine's answer: [`Output`] items in an [`OutputStream`], and two helpers that follow the rules: [`stream`] for async
//! engines and [`channel`] for engine threads.
//!
//! The rules of a stream: exactly one terminal item ([`Output::Finished`] or an error), and nothing after it; usage agrees with
//! the tokens streamed; a cancellation leads to a terminal soon; dropping the stream frees what it held. The helpers follow the
//! rules by construction. [`OutputStream`] enforces the terminal on any stream, in every build; the Worker's adapter enforces the
//! rest and counts each [`Violation`] by name.

mod channel;
mod item;
mod stream;
mod token_ids;
mod violation;

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use futures_core::stream::FusedStream;

pub use channel::{SendError, TokenSink, TrySendError, channel, channel_with_capacity};
pub use item::{
    Finish, FinishReason, Finished, Output, PredictionTokens, TextChunk, TokenChunk, TokenIds,
    TokenLogprob, TopLogprob, Usage,
};
pub use stream::{OutputWriter, stream};
pub use violation::Violation;

use crate::error::{EngineError, ErrorKind};

/// A stream of outputs before any rule is enforced.
pub type RawOutputStream = Pin<Box<dyn Stream<Item = Result<Output, EngineError>> + Send>>;

/// The outputs of one request: any number of items, then exactly one terminal, then nothing.
///
/// Created from any stream by [`OutputStream::from_raw`]; fused, with its terminal enforced. A raw stream that just ends yields
/// an [`ErrorKind::StreamIncomplete`] error. Items after the terminal are dropped and reported by [`OutputStream::violation`].
///
/// # Cancel safety
/// Dropping it at any point cancels the request and frees everything it held.
#[must_use = "a stream does nothing until it is polled, and dropping it cancels the request"]
pub struct OutputStream {
    raw: Option<RawOutputStream>,
    is_terminated: bool,
    violation: Option<Violation>,
}

impl OutputStream {
    /// Wraps any stream and enforces its terminal.
    ///
    /// # Examples
    /// ```
    /// use futures_util::StreamExt;
    /// use genset_backend_common::{ErrorKind, output::OutputStream};
    ///
    /// # futures_util::future::FutureExt::now_or_never(async {
    /// let mut outputs = OutputStream::from_raw(Box::pin(futures_util::stream::empty()));
    /// let error = outputs.next().await.unwrap().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::StreamIncomplete);
    /// assert!(outputs.next().await.is_none());
    /// # }).unwrap();
    /// ```
    pub fn from_raw(raw: RawOutputStream) -> Self {
        Self {
            raw: Some(raw),
            is_terminated: false,
            violation: None,
        }
    }

    /// Returns the rule that the raw stream broke, if any. Complete once the stream has returned `None`.
    #[must_use]
    pub fn violation(&self) -> Option<Violation> {
        self.violation
    }

    /// After the terminal: poll once for an item that must not exist, then drop the raw stream.
    fn poll_after_terminal(&mut self, cx: &mut Context<'_>) {
        if let Some(mut raw) = self.raw.take()
            && let Poll::Ready(Some(_)) = raw.as_mut().poll_next(cx)
        {
            self.violation = Some(Violation::ItemAfterTerminal);
        }
    }
}

impl Stream for OutputStream {
    type Item = Result<Output, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_terminated {
            self.poll_after_terminal(cx);
            return Poll::Ready(None);
        }
        let Some(raw) = self.raw.as_mut() else {
            return Poll::Ready(None);
        };
        let item = match raw.as_mut().poll_next(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Some(item)) => item,
            Poll::Ready(None) => {
                self.raw = None;
                self.violation = Some(Violation::EndedWithoutTerminal);
                Err(EngineError::new(
                    ErrorKind::StreamIncomplete,
                    "the engine's stream ended without saying how the request finished",
                ))
            }
        };
        self.is_terminated = !matches!(&item, Ok(output) if !output.is_terminal());
        Poll::Ready(Some(item))
    }
}

impl FusedStream for OutputStream {
    fn is_terminated(&self) -> bool {
        self.is_terminated
    }
}

crate::debug_as!(|it| OutputStream {
    is_terminated: it.is_terminated,
    violation: it.violation,
    ..
});

#[cfg(test)]
mod tests;
