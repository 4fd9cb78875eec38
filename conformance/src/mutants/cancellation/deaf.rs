//! Engines that notice a cancel late or not at all, or report it wrongly.

use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use genset_backend_common::{
    CancelReason, EngineError, FinishReason, GenerateRequest, LLMEngine, Output, OutputStream,
    RequestContext, async_trait,
};

use crate::mutants::fault::Fault;

/// A context of the engine's own, without the client's cancellation.
pub(super) fn deaf(ctx: &RequestContext) -> RequestContext {
    RequestContext::new(ctx.id()).with_prompt_tokens(ctx.prompt_tokens())
}

/// A stream changed by a fault.
pub(super) fn raw(
    items: impl Stream<Item = Result<Output, EngineError>> + Send + 'static,
) -> OutputStream {
    OutputStream::from_raw(Box::pin(items))
}

pub(super) struct Always;

#[async_trait]
impl Fault for Always {
    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        inner.generate(request, deaf(&ctx)).await
    }
}

pub(super) struct UntilFirstToken;

#[async_trait]
impl Fault for UntilFirstToken {
    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let own = deaf(&ctx);
        let mut outputs = inner.generate(request, own.clone()).await?;
        let first = async move {
            let first = outputs.next().await;
            stream::iter(first).chain(hearing(outputs, ctx, own))
        };
        Ok(raw(stream::once(first).flatten()))
    }
}

/// The rest of a stream, which ends when `ctx` is cancelled.
fn hearing(
    mut outputs: OutputStream,
    ctx: RequestContext,
    own: RequestContext,
) -> impl Stream<Item = Result<Output, EngineError>> + Send + 'static {
    let mut cancel = Ear::new(ctx);
    stream::poll_fn(move |cx| {
        if cancel.hears(cx) {
            own.cancel(CancelReason::Client);
        }
        outputs.poll_next_unpin(cx)
    })
}

/// Waits for a cancel.
pub(super) struct Ear(Pin<Box<dyn Future<Output = ()> + Send>>);

impl Ear {
    pub(super) fn new(ctx: RequestContext) -> Self {
        Self(Box::pin(async move { ctx.cancelled().await }))
    }

    /// Whether the cancel has just come.
    pub(super) fn hears(&mut self, cx: &mut Context<'_>) -> bool {
        let is_heard = self.0.as_mut().poll(cx).is_ready();
        if is_heard {
            // A completed future must not be polled again.
            self.0 = Box::pin(std::future::pending());
        }
        is_heard
    }
}

pub(super) struct OnceStreaming;

#[async_trait]
impl Fault for OnceStreaming {
    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let own = deaf(&ctx);
        let mut outputs = inner.generate(request, own.clone()).await?;
        let mut cancel = Ear::new(ctx);
        let mut is_streaming = false;
        Ok(raw(stream::poll_fn(move |cx| {
            if !is_streaming && cancel.hears(cx) {
                own.cancel(CancelReason::Client);
            }
            let item = outputs.poll_next_unpin(cx);
            is_streaming |= item.is_ready();
            item
        })))
    }
}

pub(super) struct ReportsStop;

#[async_trait]
impl Fault for ReportsStop {
    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let outputs = inner.generate(request, ctx).await?;
        Ok(raw(outputs.map(|item| item.map(as_stop))))
    }
}

fn as_stop(mut output: Output) -> Output {
    if let Output::Finished(finished) = &mut output
        && finished.reason == FinishReason::Cancelled
    {
        finished.reason = FinishReason::Stop;
    }
    output
}

/// The time per prompt token.
const PREFILL: Duration = Duration::from_millis(1);

pub(super) struct WhilePrefilling;

#[async_trait]
impl Fault for WhilePrefilling {
    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let prompt_tokens = request.prompt_tokens().unwrap_or(0);
        let outputs = inner.generate(request, ctx).await?;
        let prefilled = async move {
            tokio::time::sleep(PREFILL * prompt_tokens).await;
            outputs
        };
        Ok(raw(stream::once(prefilled).flatten()))
    }
}

pub(super) struct LosesTerminal;

#[async_trait]
impl Fault for LosesTerminal {
    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let max_tokens = request.stop.max_tokens;
        let outputs = inner.generate(request, ctx.clone()).await?;
        let mut streamed = 0;
        let kept = outputs.take_while(move |item| {
            let is_terminal = item.as_ref().is_ok_and(Output::is_terminal);
            let is_lost = is_terminal && Some(streamed) == max_tokens && ctx.is_cancelled();
            streamed += item.as_ref().map_or(0, Output::token_count);
            std::future::ready(!is_lost)
        });
        Ok(raw(kept))
    }
}

/// Ignores cancels for a deadline.
pub(super) struct ToDeadlines;

#[async_trait]
impl Fault for ToDeadlines {
    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let own = deaf(&ctx);
        let mut outputs = inner.generate(request, own.clone()).await?;
        let mut cancel = Ear::new(ctx.clone());
        Ok(raw(stream::poll_fn(move |cx| {
            if cancel.hears(cx) && ctx.cancel_reason() != Some(CancelReason::Deadline) {
                own.cancel(CancelReason::Client);
            }
            outputs.poll_next_unpin(cx)
        })))
    }
}
