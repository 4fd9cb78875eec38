//! Requests that crash every worker that receives them.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use genset_backend_common::ports::Generate;
use genset_backend_common::{ErrorKind, MetricsRegistry};
use genset_runtime::discovery::{Discovery, MemoryDiscovery};
use genset_runtime::{GenerateClient, Runtime, SelectionMode};
use tokio::net::TcpListener;

use super::scripted::Peer;
use crate::plane::deaf;
use crate::support::{ctx, endpoint, over_tcp, record, request, soon, until};

const WORKERS: u64 = 8;

/// Closes its connection on each request, which it counts, and accepts the next connection.
async fn dies(listener: &TcpListener, asked: &AtomicUsize) -> Infallible {
    loop {
        let mut peer = Peer::greeting(listener).await;
        if peer.next().await.is_some() {
            asked.fetch_add(1, Ordering::SeqCst);
        }
    }
}

#[tokio::test]
async fn a_request_that_brings_down_its_worker_goes_to_few() {
    let plane = over_tcp(deaf(), &MetricsRegistry::default());
    let discovery = MemoryDiscovery::new();
    let runtime = Runtime::new(Arc::new(discovery.clone()), plane);
    let endpoint = endpoint(&runtime, "generate");
    let lease = discovery.lease().await.unwrap();
    let mut listeners = Vec::new();
    for id in 1..=WORKERS {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let location = format!("{}/{id:014x}", listener.local_addr().unwrap());
        let record = record(endpoint.name(), id, "tcp", location);
        lease.put(record.to_entry().unwrap()).await.unwrap();
        listeners.push(listener);
    }
    let client = GenerateClient::new(endpoint.client(), SelectionMode::RoundRobin);
    let all = usize::try_from(WORKERS).unwrap();
    until(|| client.instances().len() == all).await;

    let asked = AtomicUsize::new(0);
    let dying = join_all(listeners.iter().map(|listener| dies(listener, &asked)));
    let asks = async {
        // By default, three are lost and the fourth is the last.
        for (ctx, more) in [(ctx(), 4), (ctx().with_loss_limit(1), 2)] {
            let before = asked.load(Ordering::SeqCst);
            let error = soon(client.generate(request(1), ctx)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
            let id = error.details().request_id.as_deref();
            assert!(id.is_some_and(|id| id.starts_with("test")), "{id:?}");
            assert_eq!(asked.load(Ordering::SeqCst) - before, more);
        }
    };
    tokio::select! {
        _ = dying => panic!("they listen for ever"),
        () = asks => {}
    }
}
