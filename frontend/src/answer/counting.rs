//! [`Prompt`] is what an answer knows of its prompt. [`Counting`] waits for the prompt's token count if only the engine
//! knows it and a stop string cut the answer.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::Stream;
use genset_backend_common::context::{CancelReason, RequestContext};
use genset_backend_common::{Output, OutputStream};

use super::AnswerEnd;

/// The prompt of an answer.
pub(super) struct Prompt {
    /// Its tokens; 0 if only the engine knows them.
    pub(super) tokens: u32,
    /// The request's context, if only the engine counts the prompt.
    pub(super) counted_by_engine: Option<RequestContext>,
    /// Whether this answer pays for it.
    pub(super) is_paid: bool,
}

impl Prompt {
    pub(super) fn of(tokens: u32) -> Self {
        Self {
            tokens,
            counted_by_engine: None,
            is_paid: true,
        }
    }
}

/// A cancelled request, read to its end for the usage. A stream ends soon after its request is cancelled, also a remote one.
pub(super) struct Counting {
    outputs: OutputStream,
    end: AnswerEnd,
}

impl Counting {
    pub(super) fn new(outputs: OutputStream, end: AnswerEnd, ctx: &RequestContext) -> Self {
        ctx.cancel(CancelReason::Client);
        Self { outputs, end }
    }

    /// Returns the end with the engine's usage. If the engine reports none, the prompt's tokens stay 0.
    pub(super) fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<AnswerEnd> {
        loop {
            match ready!(Pin::new(&mut self.outputs).poll_next(cx)) {
                Some(Ok(Output::Finished(finished))) => {
                    self.end.usage.prompt_tokens = finished.usage.prompt_tokens;
                    self.end.usage.cached_tokens = finished.usage.cached_tokens;
                    return Poll::Ready(self.end);
                }
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return Poll::Ready(self.end),
            }
        }
    }
}
