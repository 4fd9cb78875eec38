//! [`RemoteOutputs`]: a remote worker's outputs, adapted to an engine's contract.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;
use futures_util::StreamExt;
use genset_backend_common::output::Finish;
use genset_backend_common::{CancelReason, EngineError, Output, OutputStream, RequestContext};
use tokio_util::sync::CancellationToken;

type Signal = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How long to wait for the worker's terminal after a cancellation, if only it tells the length of the prompt.
const USAGE_WAIT: Duration = Duration::from_secs(1);

/// The outputs of one request. On cancellation or engine shutdown, yields the terminal at once and drops what the worker
/// sent meanwhile. If the prompt is not tokens, only the worker knows its length, so waits briefly for the worker's
/// terminal. Dropping the worker's stream ends its work.
pub(super) struct RemoteOutputs {
    /// `None` after the terminal.
    outputs: Option<OutputStream>,
    ctx: RequestContext,
    /// The request's context for the worker.
    far: RequestContext,
    cancelled: Signal,
    stopped: Signal,
    /// `None` if only the worker knows the number.
    prompt_tokens: Option<u32>,
    streamed_tokens: u32,
    /// When to stop waiting for the worker's terminal, once waiting.
    patience: Option<Signal>,
}

impl RemoteOutputs {
    /// The outputs of a request; without `outputs`, of one that was cancelled before it had any.
    pub(super) fn stream(
        outputs: Option<OutputStream>,
        (ctx, far): (RequestContext, RequestContext),
        stop: &CancellationToken,
        prompt_tokens: Option<u32>,
    ) -> OutputStream {
        let prompt_tokens = prompt_tokens.or(outputs.is_none().then_some(0));
        let outputs = outputs
            .unwrap_or_else(|| OutputStream::from_raw(Box::pin(futures_util::stream::pending())));
        OutputStream::from_raw(Box::pin(Self {
            outputs: Some(outputs),
            cancelled: Box::pin(ctx.cancelled_owned()),
            ctx,
            far,
            stopped: Box::pin(stop.clone().cancelled_owned()),
            prompt_tokens,
            streamed_tokens: 0,
            patience: None,
        }))
    }

    fn end_as_cancelled(&mut self) -> Output {
        self.outputs = None;
        let prompt_tokens = self.prompt_tokens.unwrap_or_default();
        let finished = Finish::cancelled().into_finished(prompt_tokens, self.streamed_tokens);
        Output::Finished(Box::new(finished))
    }

    /// Ready when the terminal of a cancelled request is known.
    fn poll_usage(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let (None, Some(outputs)) = (self.prompt_tokens, &mut self.outputs) else {
            return Poll::Ready(());
        };
        let (ctx, far) = (&self.ctx, &self.far);
        let patience = self.patience.get_or_insert_with(|| {
            far.cancel(ctx.cancel_reason().unwrap_or(CancelReason::Client));
            Box::pin(tokio::time::sleep(USAGE_WAIT))
        });
        while let Poll::Ready(item) = outputs.poll_next_unpin(cx) {
            match item {
                Some(Ok(Output::Finished(finished))) => {
                    self.prompt_tokens = Some(finished.usage.prompt_tokens);
                    return Poll::Ready(());
                }
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return Poll::Ready(()),
            }
        }
        match self.stopped.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => patience.as_mut().poll(cx),
        }
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

/// The error of a request to a stopped engine.
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
            return this
                .poll_usage(cx)
                .map(|()| Some(Ok(this.end_as_cancelled())));
        }
        if let Poll::Ready(item) = outputs.poll_next_unpin(cx) {
            return Poll::Ready(this.pass_on(item));
        }
        if this.stopped.as_mut().poll(cx).is_ready() {
            this.outputs = None;
            return Poll::Ready(Some(Err(stopped())));
        }
        if this.cancelled.as_mut().poll(cx).is_ready() {
            return this
                .poll_usage(cx)
                .map(|()| Some(Ok(this.end_as_cancelled())));
        }
        Poll::Pending
    }
}
