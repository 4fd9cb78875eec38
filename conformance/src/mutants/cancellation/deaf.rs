//! Engines that notice a cancel late or not at all, or lose the end of a cancelled request.

use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use genset_backend_common::{
    CancelReason, EngineError, Output, OutputStream, RequestContext, async_trait,
};

use crate::mutants::fault::{Call, Fault, Inner, deaf, raw};

pub(super) struct Always;

impl Fault for Always {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        call.ctx = deaf(&call.ctx);
        Ok(())
    }
}

pub(super) struct UntilFirstToken;

#[async_trait]
impl Fault for UntilFirstToken {
    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let (request, ctx) = (call.request, call.ctx);
        let own = deaf(&ctx);
        let mut outputs = inner.generate(request, own.clone()).await?;
        let first = async move {
            let first = outputs.next().await;
            stream::iter(first).chain(heeding(outputs, ctx, own, |_| true))
        };
        Ok(raw(stream::once(first).flatten()))
    }
}

/// A stream with the context `own`, which is cancelled with `ctx` if `heeds` says so. It is asked once, and told whether an item
/// has come.
pub(super) fn heeding(
    mut outputs: OutputStream,
    ctx: RequestContext,
    own: RequestContext,
    heeds: impl Fn(bool) -> bool + Send + 'static,
) -> impl Stream<Item = Result<Output, EngineError>> + Send + 'static {
    let mut cancel = Ear::new(ctx);
    let mut has_items = false;
    stream::poll_fn(move |cx| {
        if cancel.hears(cx) && heeds(has_items) {
            own.cancel(CancelReason::Client);
        }
        let item = outputs.poll_next_unpin(cx);
        has_items |= item.is_ready();
        item
    })
}

/// Waits for a cancel.
struct Ear(Pin<Box<dyn Future<Output = ()> + Send>>);

impl Ear {
    fn new(ctx: RequestContext) -> Self {
        Self(Box::pin(async move { ctx.cancelled().await }))
    }

    /// Whether the cancel has just come.
    fn hears(&mut self, cx: &mut Context<'_>) -> bool {
        let is_heard = self.0.as_mut().poll(cx).is_ready();
        if is_heard {
            // A completed future must not be polled again.
            self.0 = Box::pin(std::future::pending());
        }
        is_heard
    }
}

/// Notices a cancel only if this says so. It is asked as [`heeding`] asks.
pub(super) struct Heeds(pub(super) fn(&RequestContext, bool) -> bool);

#[async_trait]
impl Fault for Heeds {
    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let (own, theirs, heeds) = (deaf(&call.ctx), call.ctx.clone(), self.0);
        let outputs = inner.generate(call.request, own.clone()).await?;
        let heeds = move |has_items| heeds(&theirs, has_items);
        Ok(raw(heeding(outputs, call.ctx, own, heeds)))
    }
}

/// The time per prompt token.
const PREFILL: Duration = Duration::from_millis(1);

pub(super) struct WhilePrefilling;

impl Fault for WhilePrefilling {
    fn answer(&self, call: &Call, outputs: OutputStream) -> OutputStream {
        let prompt_tokens = call.request.prompt_tokens().unwrap_or(0);
        let prefilled = async move {
            tokio::time::sleep(PREFILL * prompt_tokens).await;
            outputs
        };
        raw(stream::once(prefilled).flatten())
    }
}

pub(super) struct LosesTerminal;

impl Fault for LosesTerminal {
    fn answer(&self, call: &Call, outputs: OutputStream) -> OutputStream {
        let (max_tokens, ctx) = (call.request.stop.max_tokens, call.ctx.clone());
        let mut streamed = 0;
        raw(outputs.take_while(move |item| {
            let is_terminal = item.as_ref().is_ok_and(Output::is_terminal);
            let is_lost = is_terminal && Some(streamed) == max_tokens && ctx.is_cancelled();
            streamed += item.as_ref().map_or(0, Output::token_count);
            std::future::ready(!is_lost)
        }))
    }
}
