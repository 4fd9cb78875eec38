//! [`Prompt`]: what an answer knows of its prompt; [`Counting`]: how it learns what the prompt took, where only the engine knows and a
//! stop string cut it.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::Stream;
use genset_backend_common::context::{CancelReason, RequestContext};
use genset_backend_common::{Output, OutputStream};

use super::AnswerEnd;

/// The prompt of an answer.
pub(super) struct Prompt {
    /// Its tokens; 0 where only the engine knows them.
    pub(super) tokens: u32,
    /// The request, where only its engine does.
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

/// A cancelled request, read to its end for the usage. A stream ends soon once its request is cancelled, a remote one's too.
pub(super) struct Counting {
    outputs: OutputStream,
    end: AnswerEnd,
}

impl Counting {
    pub(super) fn new(outputs: OutputStream, end: AnswerEnd, ctx: &RequestContext) -> Self {
        ctx.cancel(CancelReason::Client);
        Self { outputs, end }
    }

    /// The end, with what the engine counts. Where it does not say, the prompt's tokens stay 0.
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
