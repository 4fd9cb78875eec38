//! Readers that leave, and cancelled requests.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::{StreamExt, stream};
use genset_backend_common::{CancelReason, EngineError, RequestContext};
use genset_runtime::plane::{ResponseStream, call};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{Pair, PlaneKind, name, serve_hanging, streaming};
use crate::plane::deaf;
use crate::support::{ctx, soon, until};

pub(crate) async fn dropping_the_response_ends_the_handlers_stream(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let (served, dropped) = serve_hanging(&pair).await;
    let mut response = pair.call::<(), u32>(&served, ()).await.unwrap();
    assert_eq!(soon(response.next()).await.unwrap().unwrap(), 0);
    assert!(!dropped.is_cancelled());
    drop(response);
    soon(dropped.cancelled()).await;
}

pub(crate) async fn dropping_the_call_ends_the_handler(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let (begun, dropped) = (Arc::new(Notify::new()), CancellationToken::new());
    let seen = (Arc::clone(&begun), dropped.clone());
    let served = pair
        .serve(move |(): (), _ctx: RequestContext| {
            let (begun, dropped) = seen.clone();
            async move {
                let _dropped = dropped.drop_guard();
                begun.notify_one();
                std::future::pending::<Result<ResponseStream<u32>, EngineError>>().await
            }
        })
        .await;
    let endpoint = name("generate");
    let call = call::<(), u32>(&*pair.caller, &served.address, &endpoint, (), ctx());
    tokio::select! {
        _ = call => panic!("nothing answers"),
        () = soon(begun.notified()) => {}
    }
    soon(dropped.cancelled()).await;
}

/// A handler that yields items until it is cancelled, and then reports the reason.
async fn until_cancelled(
    first: u32,
    ctx: RequestContext,
) -> Result<ResponseStream<u32>, EngineError> {
    let items = stream::iter(0..first).map(Ok);
    let end = stream::once(async move {
        ctx.cancelled().await;
        let reason = ctx.cancel_reason().unwrap();
        Err(EngineError::new(
            reason.error_kind(),
            "cancelled, and said so",
        ))
    });
    Ok(Box::pin(items.chain(end)))
}

pub(crate) async fn cancelling_reaches_the_handler_and_the_terminal_still_comes(
    kind: &dyn PlaneKind,
) {
    for reason in [
        CancelReason::Client,
        CancelReason::Deadline,
        CancelReason::Shutdown,
    ] {
        let pair = Pair::of(kind).await;
        let served = pair.serve(until_cancelled).await;
        let ctx = ctx();
        let response = pair.call_at::<u32, u32>(&served.address, 1, ctx.clone());
        let mut response = response.await.unwrap();
        assert_eq!(soon(response.next()).await.unwrap().unwrap(), 0);
        ctx.cancel(reason);
        let error = soon(response.next()).await.unwrap().unwrap_err();
        assert_eq!(
            (error.kind(), error.message()),
            (reason.error_kind(), "cancelled, and said so")
        );
        assert!(soon(response.next()).await.is_none());
    }
}

/// A reader that never finds its inbox empty must still forward a cancellation to the handler.
pub(crate) async fn cancelling_reaches_the_handler_of_a_stream_that_has_unread_items(
    kind: &dyn PlaneKind,
) {
    let config = deaf();
    let window = config.window_items as usize;
    let pair = Pair::with(kind, config).await;
    let (asked, seen) = (Arc::new(AtomicUsize::new(0)), Arc::new(OnceLock::new()));
    let told = (Arc::clone(&asked), Arc::clone(&seen));
    let served = pair
        .serve(move |(): (), ctx: RequestContext| {
            let (asked, seen) = told.clone();
            let _: &RequestContext = seen.get_or_init(|| ctx);
            streaming(stream::repeat_with(move || {
                Ok(asked.fetch_add(1, Ordering::SeqCst))
            }))
        })
        .await;
    let ctx = ctx();
    let response = pair.call_at::<(), usize>(&served.address, (), ctx.clone());
    let mut response = response.await.unwrap();
    until(|| asked.load(Ordering::SeqCst) >= window).await;
    // Later requests get their responses later: the window is full of unread items now.
    let mut beside = pair.call::<(), usize>(&served, ()).await.unwrap();
    assert!(soon(beside.next()).await.is_some());
    ctx.cancel(CancelReason::Client);
    assert_eq!(soon(response.next()).await.unwrap().unwrap(), 0);
    until(|| seen.get().is_some_and(RequestContext::is_cancelled)).await;
}

/// Counts how often a task would have run.
#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A reader that has read a response to its end cancels its request to free it: that must not wake the reader again.
pub(crate) async fn a_response_that_ended_listens_to_no_cancellation(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let gate = Arc::new(Notify::new());
    let opened = Arc::clone(&gate);
    let served = pair
        .serve(move |(): (), _ctx: RequestContext| {
            let gate = Arc::clone(&gate);
            async move {
                let last = stream::once(async move {
                    gate.notified().await;
                    Ok(1)
                });
                let items: ResponseStream<u32> = Box::pin(stream::iter([Ok(0)]).chain(last));
                Ok(items)
            }
        })
        .await;
    let (endpoint, request) = (name("generate"), ctx());
    let called = call::<(), u32>(
        &*pair.caller,
        &served.address,
        &endpoint,
        (),
        request.clone(),
    );
    let mut response = called.await.unwrap();
    let wakes = Arc::new(Wakes::default());
    let waker = Waker::from(Arc::clone(&wakes));
    let mut cx = Context::from_waker(&waker);
    assert!(response.poll_next_unpin(&mut cx).is_ready());
    assert!(response.poll_next_unpin(&mut cx).is_pending());
    opened.notify_one();
    soon(async {
        loop {
            match response.poll_next_unpin(&mut cx) {
                Poll::Ready(Some(item)) => assert_eq!(item.unwrap(), 1),
                Poll::Ready(None) => break,
                Poll::Pending => tokio::task::yield_now().await,
            }
        }
    })
    .await;
    let before = wakes.0.load(Ordering::SeqCst);
    request.cancel(CancelReason::Client);
    assert_eq!(wakes.0.load(Ordering::SeqCst), before);
}
