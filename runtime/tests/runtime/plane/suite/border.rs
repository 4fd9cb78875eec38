//! Behaviour between two processes: ends that go away, limits, connections.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{StreamExt, TryStreamExt, stream};
use genset_backend_common::{EngineError, ErrorKind, MetricsRegistry, RequestContext};
use genset_runtime::InstanceId;
use genset_runtime::plane::{ResponseStream, WireConfig};

use super::{Pair, PlaneKind, count, erased, items, name, serve, serve_hanging, streaming};
use crate::support::{PATIENCE, ctx, soon, until};

/// Tolerates silence longer than any test: a lost peer must be noticed in another way.
pub(crate) fn deaf() -> WireConfig {
    WireConfig {
        peer_timeout: 10 * PATIENCE,
        write_timeout: 10 * PATIENCE,
        ..WireConfig::default()
    }
}

/// Detects a silent peer, but tolerates one that waits for a CPU.
pub(crate) fn wary() -> WireConfig {
    WireConfig {
        peer_timeout: Duration::from_secs(5),
        ..deaf()
    }
}

pub(crate) async fn a_panic_is_an_error_of_its_own_request(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let served = pair
        .serve(|when: u32, _ctx: RequestContext| async move {
            assert_ne!(when, 0, "a panic on purpose");
            items((0..3u32).inspect(move |item| assert_ne!(*item, when, "a panic on purpose")))
        })
        .await;
    let mut beside = pair.call::<u32, u32>(&served, 9).await.unwrap();
    for when in [0, 1, 2] {
        let error = pair.ask::<u32, u32>(&served, when).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
    }
    for item in 0..3 {
        assert_eq!(soon(beside.next()).await.unwrap().unwrap(), item);
    }
    assert!(soon(beside.next()).await.is_none());
}

pub(crate) async fn a_process_that_ends_disconnects_its_streams_at_once(kind: &dyn PlaneKind) {
    let pair = Pair::with(kind, deaf()).await;
    let (served, dropped) = serve_hanging(&pair).await;
    let mut responses = Vec::new();
    for _ in 0..20 {
        let mut response = pair.call::<(), u32>(&served, ()).await.unwrap();
        assert_eq!(soon(response.next()).await.unwrap().unwrap(), 0);
        responses.push(response);
    }
    assert!(pair.caller.is_reachable(&served.address));
    let Pair { caller, callee } = pair;
    drop(callee);
    for mut response in responses {
        let error = soon(response.next()).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        assert!(soon(response.next()).await.is_none());
    }
    soon(dropped.cancelled()).await;
    assert!(!caller.is_reachable(&served.address));
}

pub(crate) async fn a_process_that_came_back_is_called_again(kind: &dyn PlaneKind) {
    let pair = Pair::with(kind, deaf()).await;
    let served = pair.serve(count).await;
    let address = served.address.clone();
    pair.count_to(&served, 2).await;
    let Pair { caller, callee } = pair;
    drop((served, callee));
    until(|| !caller.is_reachable(&address)).await;
    let Some(callee) = kind.plane_at(&address, deaf()).await else {
        return;
    };
    let endpoint = name("generate");
    // The previous process may hold the address a moment longer than its connections.
    let served = soon(async {
        loop {
            let handler = erased(count);
            let served = callee.serve(&endpoint, InstanceId(1), handler);
            if let Ok(served) = served.await {
                return served;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(served.address, address);
    // There are no calls, but it is found.
    until(|| caller.is_reachable(&address)).await;
    let pair = Pair { caller, callee };
    pair.count_to(&served, 3).await;
}

/// Every open stream ends properly, then the connection closes, and the next call connects again or
/// reports that nobody is there.
pub(crate) async fn a_process_that_shuts_down_finishes_its_streams(kind: &dyn PlaneKind) {
    let pair = Pair::with(kind, deaf()).await;
    let go_on = Arc::new(tokio::sync::Semaphore::new(0));
    let held = Arc::clone(&go_on);
    let served = pair
        .serve(move |(): (), _ctx: RequestContext| {
            let held = Arc::clone(&held);
            let rest = stream::once(async move {
                held.acquire().await.unwrap().forget();
                Ok(1u32)
            });
            streaming(stream::iter([Ok(0)]).chain(rest))
        })
        .await;
    let mut responses = Vec::new();
    for _ in 0..200 {
        responses.push(pair.call::<(), u32>(&served, ()).await.unwrap());
    }
    let address = served.address.clone();
    drop(served);
    let read = join_all(responses.into_iter().map(|response| {
        let all = response.try_collect::<Vec<u32>>();
        async move { soon(all).await.unwrap() }
    }));
    let finish = async {
        tokio::task::yield_now().await;
        go_on.add_permits(200);
        read.await
    };
    let ((), all) = soon(async { tokio::join!(pair.callee.shutdown(), finish) }).await;
    assert!(all.iter().all(|got| got == &[0, 1]));
    let error = pair.call_at::<(), u32>(&address, (), ctx()).await;
    let error = error.err().expect("it is gone");
    let is_gone = matches!(
        error.kind(),
        ErrorKind::CannotConnect | ErrorKind::Disconnected
    );
    assert!(is_gone, "{error}");
}

pub(crate) async fn one_stream_too_many_is_overloaded(kind: &dyn PlaneKind) {
    let config = WireConfig {
        max_streams: 3,
        ..deaf()
    };
    let pair = Pair::with(kind, config).await;
    let (served, _) = serve_hanging(&pair).await;
    let mut open = Vec::new();
    for _ in 0..3 {
        open.push(pair.call::<(), u32>(&served, ()).await.unwrap());
    }
    let error = pair.ask::<(), u32>(&served, ()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overloaded, "{error}");
    assert!(error.details().retry_after.is_some());
    drop(open.pop());
    // Its place is free as soon as the cancellation has arrived.
    soon(async {
        while pair.call::<(), u32>(&served, ()).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

pub(crate) async fn what_no_frame_holds_is_refused_and_nothing_else(kind: &dyn PlaneKind) {
    let config = WireConfig {
        max_frame_bytes: 64 << 10,
        ..deaf()
    };
    let pair = Pair::with(kind, config).await;
    let served = pair
        .serve(|text: String, _ctx| async move { items([text.len().to_string(), text.repeat(9)]) })
        .await;
    let mut beside = pair
        .call::<_, String>(&served, "x".to_owned())
        .await
        .unwrap();
    let request = pair.ask::<_, String>(&served, "y".repeat(70_000)).await;
    assert_eq!(request.unwrap_err().kind(), ErrorKind::InvalidArgument);
    let mut response = pair.call(&served, "z".repeat(10_000)).await.unwrap();
    let fits: String = soon(response.next()).await.unwrap().unwrap();
    assert_eq!(fits, "10000");
    let too_large = soon(response.next()).await.unwrap().unwrap_err();
    assert_eq!(too_large.kind(), ErrorKind::Internal);
    for fits in ["1", "xxxxxxxxx"] {
        assert_eq!(soon(beside.next()).await.unwrap().unwrap(), fits);
    }
}

pub(crate) async fn a_connection_made_ahead_serves_the_first_request(kind: &dyn PlaneKind) {
    let metrics = MetricsRegistry::default();
    let callee = kind.plane(deaf(), &MetricsRegistry::default()).await;
    let pair = Pair::new(kind.plane(deaf(), &metrics).await, callee);
    let served = pair.serve(count).await;
    let one = "genset_wire_connections{role=\"caller\"} 1";
    for _ in 0..10 {
        pair.caller.prepare(&served.address, &name("generate"));
    }
    until(|| metrics.encode().contains(one)).await;
    pair.count_to(&served, 2).await;
    assert!(metrics.encode().contains(one), "{}", metrics.encode());
}

pub(crate) async fn two_processes_call_each_other(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let there = pair.serve(count).await;
    let here = serve(&*pair.caller, &name("generate"), 2, count).await;
    let back = Pair::new(Arc::clone(&pair.callee), Arc::clone(&pair.caller));
    let both = join_all((0..100).map(|index| {
        let (pair, served) = if index % 2 == 0 {
            (&pair, &there)
        } else {
            (&back, &here)
        };
        pair.ask::<u32, u32>(served, 200)
    }));
    for got in both.await {
        assert!(got.unwrap().into_iter().eq(0..200));
    }
}

/// However responses end, both ends forget them.
pub(crate) async fn nothing_stays_open_after_the_last_response(kind: &dyn PlaneKind) {
    let (calling, serving) = (MetricsRegistry::default(), MetricsRegistry::default());
    let callee = kind.plane(deaf(), &serving).await;
    let pair = Pair::new(kind.plane(deaf(), &calling).await, callee);
    let served = pair
        .serve(|how: u32, _ctx: RequestContext| async move {
            let all: ResponseStream<u32> = match how {
                0 => Box::pin(stream::iter([Ok(1)])),
                1 => Box::pin(stream::iter([Ok(1), Err(EngineError::internal("no"))])),
                2 => Box::pin(stream::iter([Ok(1)]).chain(stream::pending())),
                3 => return Err(EngineError::internal("refused")),
                _ => panic!("a panic on purpose"),
            };
            Ok(all)
        })
        .await;
    for how in 0..5 {
        if let Ok(mut response) = pair.call::<u32, u32>(&served, how).await {
            assert_eq!(soon(response.next()).await.unwrap().unwrap(), 1);
        }
    }
    let none = |metrics: &MetricsRegistry, role: &str| {
        let line = format!("genset_wire_streams{{role=\"{role}\"}} 0");
        metrics.encode().contains(&line)
    };
    until(|| none(&calling, "caller") && none(&serving, "callee")).await;
    soon(tokio::time::timeout(
        Duration::from_secs(30),
        pair.callee.shutdown(),
    ))
    .await
    .unwrap();
}
