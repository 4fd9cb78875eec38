//! A process whose main threads are all busy with requests: its peers, its leases and its health are not affected.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::{MetricsRegistry, RequestContext};
use genset_runtime::discovery::MemoryDiscovery;
use genset_runtime::plane::{self, ResponseStream, WireConfig};
use genset_runtime::{Readiness, Runtime, StatusServer, VitalRuntime};
use tokio::sync::Notify;

use crate::plane::{name, serve, sevens};
use crate::status_control::exchange;
use crate::support::{ctx, over_tcp, soon, until};

/// Threads of the busy process.
const THREADS: usize = 2;

/// Twice as long as a peer may be silent.
const BUSY: Duration = Duration::from_secs(3);

pub(crate) fn busy_process() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .unwrap()
}

/// Blocks every thread of the process until it is dropped, like requests that never yield.
pub(crate) struct Occupied(
    #[expect(dead_code, reason = "dropping them is what counts")] Vec<SyncSender<()>>,
);

impl Occupied {
    pub(crate) async fn by_requests(process: &tokio::runtime::Runtime) -> Self {
        let busy = Arc::new(AtomicUsize::new(0));
        let occupy = |_| {
            let (release, released) = sync_channel(0);
            let busy = Arc::clone(&busy);
            process.spawn(async move {
                busy.fetch_add(1, Ordering::SeqCst);
                // Nothing is sent: it ends when the other end is dropped.
                let _ = released.recv();
            });
            release
        };
        let releases = (0..THREADS).map(occupy).collect();
        until(|| busy.load(Ordering::SeqCst) == THREADS).await;
        Self(releases)
    }
}

/// A busy frontend: the worker it calls does not consider it dead, and its streams continue.
#[tokio::test]
async fn a_busy_callers_streams_go_on() {
    let metrics = MetricsRegistry::default();
    let callee = over_tcp(WireConfig::default(), &metrics);
    let go_on = Arc::new(Notify::new());
    let told = Arc::clone(&go_on);
    let handler = move |(): (), _ctx: RequestContext| sevens(&told);
    let served = serve(&*callee, &name("wait"), 1, handler).await;
    let process = busy_process();
    let address = served.address.clone();
    let mut open = soon(process.spawn(async move {
        let caller = over_tcp(WireConfig::default(), &MetricsRegistry::default());
        let endpoint = name("wait");
        let mut open: ResponseStream<u32> = plane::call(&*caller, &address, &endpoint, (), ctx())
            .await
            .unwrap();
        assert_eq!(open.next().await.unwrap().unwrap(), 0);
        (caller, open)
    }))
    .await
    .unwrap();
    let occupied = Occupied::by_requests(&process).await;
    tokio::time::sleep(BUSY).await;
    let ended = "genset_wire_ended_connections_total{";
    assert!(!metrics.encode().contains(ended), "{}", metrics.encode());
    drop(occupied);
    go_on.notify_one();
    assert_eq!(soon(open.1.next()).await.unwrap().unwrap(), 7);
    process.shutdown_background();
}

/// A busy worker: its callers do not consider it dead.
#[tokio::test]
async fn a_busy_callees_streams_go_on() {
    let metrics = MetricsRegistry::default();
    let caller = over_tcp(WireConfig::default(), &metrics);
    let process = busy_process();
    let go_on = Arc::new(Notify::new());
    let told = Arc::clone(&go_on);
    let handler = move |(): (), _ctx: RequestContext| sevens(&told);
    let served = soon(process.spawn(async move {
        let callee = over_tcp(WireConfig::default(), &MetricsRegistry::default());
        let served = serve(&*callee, &name("wait"), 1, handler).await;
        (callee, served)
    }))
    .await
    .unwrap();
    let endpoint = name("wait");
    let call = plane::call(&*caller, &served.1.address, &endpoint, (), ctx());
    let mut open: ResponseStream<u32> = soon(call).await.unwrap();
    assert_eq!(soon(open.next()).await.unwrap().unwrap(), 0);
    let occupied = Occupied::by_requests(&process).await;
    tokio::time::sleep(BUSY).await;
    let ended = "genset_wire_ended_connections_total{";
    assert!(!metrics.encode().contains(ended), "{}", metrics.encode());
    drop(occupied);
    go_on.notify_one();
    assert_eq!(soon(open.next()).await.unwrap().unwrap(), 7);
    process.shutdown_background();
}

#[tokio::test]
async fn a_busy_process_says_that_it_lives() {
    let process = busy_process();
    let status = soon(process.spawn(async {
        let runtime = Runtime::on(
            Some(VitalRuntime::start().unwrap()),
            Arc::new(MemoryDiscovery::new()),
            Arc::new(plane::MemoryPlane::new()),
            MetricsRegistry::default(),
        );
        let ready: Readiness = Arc::new(|| true);
        let address = "127.0.0.1:0".parse().unwrap();
        let server = StatusServer::bind(address, &runtime, ready.into(), None).await;
        (runtime, server.unwrap())
    }))
    .await
    .unwrap();
    let occupied = Occupied::by_requests(&process).await;
    for path in ["/live", "/ready", "/metrics"] {
        let answer = exchange(status.1.address(), "GET", path, "", "");
        assert_eq!(soon(answer).await.0, 200, "{path}");
    }
    drop(occupied);
    process.shutdown_background();
}
