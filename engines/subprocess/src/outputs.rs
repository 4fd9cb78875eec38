//! [`Outputs`]: the process's answer to a request, checked against an engine's contract.

use std::num::NonZeroU32;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_core::Stream;
use genset_backend_common::output::{Finish, Finished, TokenChunk};
use genset_backend_common::{CancelReason, EngineError, Output, OutputStream, RequestContext};
use genset_wire::decode_payload;

use crate::call::Call;

type Answer = Option<Result<Output, EngineError>>;

/// The outputs of one request. A cancelled request ends at once: the process receives a Cancel; its later items are dropped.
pub(crate) struct Outputs {
    /// `None` after the terminal.
    call: Option<Call>,
    ctx: RequestContext,
    cancelled: Pin<Box<dyn Future<Output = ()> + Send>>,
    vocab_size: Option<NonZeroU32>,
    /// The terminal, kept until the process has ended the stream: nothing may follow it.
    finished: Option<Box<Finished>>,
    prompt_tokens: u32,
    streamed_tokens: u32,
}

impl Outputs {
    pub(crate) fn stream(
        call: Call,
        ctx: RequestContext,
        vocab_size: Option<NonZeroU32>,
        prompt_tokens: u32,
    ) -> OutputStream {
        OutputStream::from_raw(Box::pin(Self {
            call: Some(call),
            cancelled: Box::pin(ctx.cancelled_owned()),
            ctx,
            vocab_size,
            finished: None,
            prompt_tokens,
            streamed_tokens: 0,
        }))
    }

    fn end_as_cancelled(&mut self) -> Answer {
        let reason = self.ctx.cancel_reason().unwrap_or(CancelReason::Client);
        if let Some(call) = self.call.take() {
            call.cancel(reason);
        }
        let finished = Finish::cancelled().into_finished(self.prompt_tokens, self.streamed_tokens);
        Some(Ok(Output::Finished(Box::new(finished))))
    }

    /// Ends the request because the process sent something invalid, and cancels it there.
    fn refuse(&mut self, problem: impl std::fmt::Display) -> Answer {
        self.call = None;
        let message = format!("the engine's process broke the contract: {problem}");
        Some(Err(
            EngineError::internal(message).with_request_id(self.ctx.id())
        ))
    }

    /// Converts an item to an answer; `None` for a terminal, which is held until the stream ends.
    fn take(&mut self, item: &Bytes) -> Option<Answer> {
        let output = match decode_payload(item) {
            Ok(output) => output,
            Err(error) => {
                return Some(self.refuse(format!("an item is no output: {}", error.detail())));
            }
        };
        if self.finished.is_some() {
            return Some(self.refuse("an item follows the terminal"));
        }
        if let Some(problem) = self.problem(&output) {
            return Some(self.refuse(problem));
        }
        match output {
            Output::Finished(finished) => {
                self.finished = Some(finished);
                None
            }
            Output::Tokens(_) | Output::Text(_) | Output::Embeddings(_) | Output::Scores(_) => {
                self.streamed_tokens = self.streamed_tokens.saturating_add(output.token_count());
                Some(Some(Ok(output)))
            }
        }
    }

    /// Checks an output by itself.
    fn problem(&self, output: &Output) -> Option<String> {
        let chunk = match output {
            Output::Tokens(chunk) if chunk.is_empty() => {
                return Some("an item without a token".to_owned());
            }
            Output::Tokens(chunk) => chunk,
            Output::Finished(finished) => &finished.last,
            Output::Text(_) | Output::Embeddings(_) | Output::Scores(_) => return None,
        };
        self.outside_vocabulary(chunk)
    }

    fn outside_vocabulary(&self, chunk: &TokenChunk) -> Option<String> {
        let vocab_size = self.vocab_size?.get();
        let token = chunk.token_ids.iter().find(|token| **token >= vocab_size)?;
        Some(format!(
            "token id {token} is not in the vocabulary, which ends at {}",
            vocab_size - 1
        ))
    }

    fn end(&mut self, result: Result<(), EngineError>) -> Answer {
        self.call = None;
        match (result, self.finished.take()) {
            (Ok(()), finished) => finished.map(|finished| Ok(Output::Finished(finished))),
            // The terminal arrived; the request does not depend on how the process ended after it.
            (Err(_), Some(finished)) => Some(Ok(Output::Finished(finished))),
            (Err(error), None) => Some(Err(error)),
        }
    }
}

impl Stream for Outputs {
    type Item = Result<Output, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.call.is_some() && this.ctx.is_cancelled() {
            return Poll::Ready(this.end_as_cancelled());
        }
        while let Some(call) = &mut this.call {
            match call.poll_item(cx) {
                Poll::Ready(Ok(Some(item))) => {
                    if let Some(answer) = this.take(&item) {
                        return Poll::Ready(answer);
                    }
                }
                Poll::Ready(Ok(None)) => return Poll::Ready(this.end(Ok(()))),
                Poll::Ready(Err(error)) => return Poll::Ready(this.end(Err(error))),
                Poll::Pending if this.cancelled.as_mut().poll(cx).is_ready() => {
                    return Poll::Ready(this.end_as_cancelled());
                }
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(None)
    }
}
