//! Many concurrent streams: each is correct, and none waits for another.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use futures_util::{StreamExt, TryStreamExt, stream};
use genset_backend_common::RequestContext;
use genset_runtime::plane::{WireConfig, call};

use super::{Pair, PlaneKind, count, name, serve, streaming};
use crate::plane::deaf;
use crate::support::{ctx, soon};

pub(crate) async fn thousands_of_streams_at_once_are_all_right(kind: &dyn PlaneKind) {
    const STREAMS: u32 = 5000;
    const ITEMS: u32 = 20;
    let pair = Pair::of(kind).await;
    let all_are_open = Arc::new(tokio::sync::Barrier::new(STREAMS as usize));
    let served = pair
        .serve(move |seed: u32, _ctx: RequestContext| {
            let all_are_open = Arc::clone(&all_are_open);
            let first = async move {
                all_are_open.wait().await;
                Ok(seed)
            };
            let rest = stream::iter(1..ITEMS).then(move |index| async move {
                tokio::task::yield_now().await;
                Ok(seed.wrapping_mul(31).wrapping_add(index))
            });
            streaming(stream::once(first).chain(rest))
        })
        .await;
    let ask = async |seed: u32| {
        let got: Vec<u32> = pair.ask(&served, seed).await.unwrap();
        let rest = (1..ITEMS).map(|index| seed.wrapping_mul(31).wrapping_add(index));
        assert!(got.into_iter().eq([seed].into_iter().chain(rest)), "{seed}");
    };
    join_all((0..STREAMS).map(ask)).await;
}

/// The reader takes one item and stops. Its handler is polled for no more than the window; the other streams on the
/// same connection run to their ends.
pub(crate) async fn a_slow_reader_holds_up_only_its_own_stream(kind: &dyn PlaneKind) {
    const WINDOW: u32 = 16;
    let config = WireConfig {
        window_items: WINDOW,
        ..deaf()
    };
    let pair = Pair::with(kind, config).await;
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    let endless = move |(): (), _ctx: RequestContext| {
        let asked = Arc::clone(&counted);
        streaming(stream::repeat_with(move || {
            Ok(asked.fetch_add(1, Ordering::SeqCst))
        }))
    };
    let endless_name = name("endless");
    let endless = serve(&*pair.callee, &endless_name, 1, endless).await;
    let counting = pair.serve(count).await;

    let slow = call::<(), usize>(&*pair.caller, &endless.address, &endless_name, (), ctx());
    let mut slow = soon(slow).await.unwrap();
    assert_eq!(soon(slow.next()).await.unwrap().unwrap(), 0);
    let others = join_all((0..50).map(|_| pair.ask::<u32, u32>(&counting, 1000))).await;
    for other in others {
        assert!(other.unwrap().into_iter().eq(0..1000));
    }
    let most = WINDOW as usize + 2;
    let asked = asked.load(Ordering::SeqCst);
    assert!(
        asked <= most,
        "asked for {asked} items with a window of {WINDOW}"
    );
    // It resumes where it stopped.
    let more: Vec<usize> = soon(slow.take(1000).try_collect()).await.unwrap();
    assert!(more.into_iter().eq(1..=1000));
}
