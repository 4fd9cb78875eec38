//! [`RemoteOutputs`]: what a remote worker answers, kept to the contract of an engine.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use futures_util::StreamExt;
use genset_backend_common::output::Finish;
use genset_backend_common::{EngineError, Output, OutputStream, RequestContext};
use tokio_util::sync::CancellationToken;

type Signal = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The outputs of one request until it is cancelled or the engine stops; then the terminal that says so, at once: what the
/// worker sent meanwhile was asked for by nobody any more. Dropping the worker's stream ends its work.
pub(super) struct RemoteOutputs {
    /// `None` after the terminal.
    outputs: Option<OutputStream>,
    ctx: RequestContext,
    cancelled: Signal,
    stopped: Signal,
    prompt_tokens: u32,
    streamed_tokens: u32,
}

impl RemoteOutputs {
    /// The outputs of a request; without `outputs`, of one that was cancelled before there were any.
    pub(super) fn stream(
        outputs: Option<OutputStream>,
        ctx: RequestContext,
        stop: &CancellationToken,
        prompt_tokens: u32,
    ) -> OutputStream {
        let outputs = outputs
            .unwrap_or_else(|| OutputStream::from_raw(Box::pin(futures_util::stream::pending())));
        OutputStream::from_raw(Box::pin(Self {
            outputs: Some(outputs),
            cancelled: Box::pin(ctx.cancelled_owned()),
            ctx,
            stopped: Box::pin(stop.clone().cancelled_owned()),
            prompt_tokens,
            streamed_tokens: 0,
        }))
    }

    fn end_as_cancelled(&mut self) -> Output {
        self.outputs = None;
        let finished = Finish::cancelled().into_finished(self.prompt_tokens, self.streamed_tokens);
        Output::Finished(Box::new(finished))
    }

    fn pass_on(
        &mut self,
        item: Option<Result<Output, EngineError>>,
    ) -> Option<Result<Output, EngineError>> {
        match &item {
            Some(Ok(output)) if !output.is_terminal() => {
                self.streamed_tokens = self.streamed_tokens.saturating_add(output.token_count());
            }
            Some(_) | None => self.outputs = None,
        }
        item
    }
}

/// The error of what is asked of an engine that was stopped.
pub(super) fn stopped() -> EngineError {
    EngineError::engine_shutdown("the engine was stopped")
}

impl Stream for RemoteOutputs {
    type Item = Result<Output, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(outputs) = &mut this.outputs else {
            return Poll::Ready(None);
        };
        if this.ctx.is_cancelled() {
            return Poll::Ready(Some(Ok(this.end_as_cancelled())));
        }
        if let Poll::Ready(item) = outputs.poll_next_unpin(cx) {
            return Poll::Ready(this.pass_on(item));
        }
        if this.stopped.as_mut().poll(cx).is_ready() {
            this.outputs = None;
            return Poll::Ready(Some(Err(stopped())));
        }
        if this.cancelled.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Ok(this.end_as_cancelled())));
        }
        Poll::Pending
    }
}
