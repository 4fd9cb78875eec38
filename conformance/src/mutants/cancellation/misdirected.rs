//! Engines in which a cancel or an abort affects the wrong request, or has a wrong effect.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use futures_util::{StreamExt, stream};
use genset_backend_common::{
    CancelReason, EngineError, OutputStream, RequestContext, StartContext, async_trait,
};
use parking_lot::Mutex;

use super::deaf::heeding;
use crate::mutants::fault::{Call, Fault, Inner, at_tokens, deaf, raw};

/// Records the last request that ended by itself: its context, and the request that came after it.
#[derive(Default)]
pub(super) struct NextTenant {
    /// The ended request's context, unless a cancel ended it.
    ended: Arc<Mutex<Option<RequestContext>>>,
}

#[async_trait]
impl Fault for NextTenant {
    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let (request, ctx) = (call.request, call.ctx);
        let before = self.ended.lock().take();
        let own = ctx.child();
        let mut outputs = inner.generate(request, own.clone()).await?;
        let ended = Arc::clone(&self.ended);
        Ok(raw(stream::poll_fn(move |cx| {
            if before.as_ref().is_some_and(RequestContext::is_cancelled) {
                own.cancel(CancelReason::Client);
            }
            let item = outputs.poll_next_unpin(cx);
            if let std::task::Poll::Ready(None) = item
                && !ctx.is_cancelled()
            {
                *ended.lock() = Some(ctx.clone());
            }
            item
        })))
    }
}

/// The requests whose abort was called an even number of times.
#[derive(Default)]
pub(super) struct Toggle {
    aborts: Mutex<BTreeMap<String, u64>>,
    revived: Arc<Mutex<Vec<String>>>,
}

#[async_trait]
impl Fault for Toggle {
    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let (own, id) = (deaf(&call.ctx), call.ctx.id().to_owned());
        let outputs = inner.generate(call.request, own.clone()).await?;
        let revived = Arc::clone(&self.revived);
        let heeds = move |_| !revived.lock().contains(&id);
        Ok(raw(heeding(outputs, call.ctx, own, heeds)))
    }

    async fn abort(&self, inner: &Inner, ctx: &RequestContext) {
        self.note(ctx.id());
        inner.abort(ctx).await;
    }
}

impl Toggle {
    fn note(&self, id: &str) {
        let mut aborts = self.aborts.lock();
        let count = aborts.entry(id.to_owned()).or_default();
        *count += 1;
        if count.is_multiple_of(2) {
            self.revived.lock().push(id.to_owned());
        }
    }
}

/// Whether an aborted id refers to a request's id.
pub(super) type Matching = fn(id: &str, aborted: &str) -> bool;

/// Finds the request to abort with a wrong lookup.
pub(super) struct ByLookup {
    running: Mutex<Vec<RequestContext>>,
    matching: Matching,
    falls_back: bool,
}

impl ByLookup {
    pub(super) fn new(matching: Matching, falls_back: bool) -> Self {
        Self {
            running: Mutex::default(),
            matching,
            falls_back,
        }
    }
}

#[async_trait]
impl Fault for ByLookup {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        call.ctx = call.ctx.child();
        self.running.lock().push(call.ctx.clone());
        Ok(())
    }

    async fn abort(&self, inner: &Inner, ctx: &RequestContext) {
        let running = self.running.lock().clone();
        let mut is_found = false;
        for own in &running {
            if (self.matching)(own.id(), ctx.id()) {
                own.cancel(CancelReason::Client);
                is_found = true;
            }
        }
        if let Some(newest) = running.last()
            && self.falls_back
            && !is_found
        {
            newest.cancel(CancelReason::Client);
        }
        inner.abort(ctx).await;
    }
}

/// After a cancel of another request, the next token is read from the wrong row.
#[derive(Default)]
pub(super) struct ShiftedBatch {
    aborts: Arc<AtomicU64>,
}

#[async_trait]
impl Fault for ShiftedBatch {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        let aborts = Arc::clone(&self.aborts);
        let mut seen = aborts.load(Ordering::Relaxed);
        at_tokens(outputs, move |chunk| {
            let now = aborts.load(Ordering::Relaxed);
            if std::mem::replace(&mut seen, now) != now {
                chunk.token_ids.iter_mut().for_each(|token| *token ^= 1);
            }
        })
    }

    async fn abort(&self, inner: &Inner, ctx: &RequestContext) {
        self.aborts.fetch_add(1, Ordering::Relaxed);
        inner.abort(ctx).await;
    }
}

/// After this number of aborts, no further request is served.
pub(super) struct StallsAfterAborts {
    pub(super) left: AtomicUsize,
}

#[async_trait]
impl Fault for StallsAfterAborts {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        match self.left.load(Ordering::Relaxed) {
            0 => raw(stream::pending()),
            _ => outputs,
        }
    }

    async fn abort(&self, inner: &Inner, ctx: &RequestContext) {
        let fewer = |left: usize| Some(left.saturating_sub(1));
        let _ = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer);
        inner.abort(ctx).await;
    }
}

/// Whether the engine runs, which abort takes for granted.
#[derive(Default)]
pub(super) struct AbortNeedsStart {
    is_started: AtomicBool,
}

#[async_trait]
impl Fault for AbortNeedsStart {
    fn begin(&self, _ctx: &StartContext) {
        self.is_started.store(true, Ordering::Release);
    }

    async fn abort(&self, inner: &Inner, ctx: &RequestContext) {
        assert!(self.is_started.load(Ordering::Acquire), "no scheduler");
        inner.abort(ctx).await;
    }
}

/// Waits for an answer from the scheduler, which no longer comes.
#[derive(Default)]
pub(super) struct LateAbortWaits {
    is_over: AtomicBool,
}

#[async_trait]
impl Fault for LateAbortWaits {
    async fn abort(&self, inner: &Inner, ctx: &RequestContext) {
        if self.is_over.load(Ordering::Acquire) {
            std::future::pending::<()>().await;
        }
        inner.abort(ctx).await;
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        self.is_over.store(true, Ordering::Release);
        inner.cleanup().await
    }
}
