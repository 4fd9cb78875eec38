//! Workers in their own processes that really die: killed, or stopped.
//!
//! Each test is both ends. Run again as a process with [`CHILD`] set, it is the worker, and sends its address to its parent.

use std::time::Duration;

use futures_util::{StreamExt, stream};
use genset_backend_common::{EngineError, ErrorKind, MetricsRegistry, RequestContext};
use genset_runtime::discovery::Address;
use genset_runtime::plane::{ResponseStream, WireConfig};
use rustix::process::Signal;

use super::suite::{Pair, streaming};
use super::{deaf, wary};
use crate::child::{Child, say};
use crate::support::{ctx, over_tcp, soon, until};

/// Set in the environment of a worker.
const CHILD: &str = "GENSET_TEST_PLANE_CHILD";

/// Serves an endless stream of numbers, until it is killed.
async fn be_the_worker() {
    let pair = Pair::calling(over_tcp(deaf(), &MetricsRegistry::default()));
    let served = pair
        .serve(|(): (), _ctx: RequestContext| {
            streaming(stream::unfold(0u32, |next| async move {
                tokio::time::sleep(Duration::from_millis(1)).await;
                Some((Ok(next), next.wrapping_add(1)))
            }))
        })
        .await;
    say(&served.address.location);
    std::future::pending::<()>().await;
}

/// A worker's process and its address.
struct Worker {
    process: Child,
    address: Address,
}

impl Worker {
    /// Runs `test` of this file as a worker.
    async fn start(test: &str) -> Self {
        let mut process = Child::start(module_path!(), test, (CHILD, "1"));
        let address = Address {
            plane: "tcp".into(),
            location: process.said().await,
        };
        Self { process, address }
    }

    /// Calls it from a plane with these limits, and reads some items.
    async fn streaming(&self, config: WireConfig) -> (Pair, ResponseStream<u32>) {
        let pair = Pair::calling(over_tcp(config, &MetricsRegistry::default()));
        let response = pair.call_at::<(), u32>(&self.address, (), ctx()).await;
        let mut response = response.unwrap();
        for item in 0..10 {
            assert_eq!(soon(response.next()).await.unwrap().unwrap(), item);
        }
        (pair, response)
    }
}

/// Reads up to the error that ends a stream.
async fn end_of(mut response: ResponseStream<u32>) -> EngineError {
    soon(async {
        loop {
            if let Err(error) = response.next().await.expect("it has no end of its own") {
                return error;
            }
        }
    })
    .await
}

/// The caller tolerates any silence: the death of the process is noticed at once.
#[tokio::test]
async fn a_killed_worker_disconnects_its_streams() {
    if std::env::var_os(CHILD).is_some() {
        return be_the_worker().await;
    }
    let mut worker = Worker::start("a_killed_worker_disconnects_its_streams").await;
    let (pair, response) = worker.streaming(deaf()).await;
    worker.process.kill().await;
    let error = end_of(response).await;
    assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
    assert!(!pair.caller.is_reachable(&worker.address));
}

/// Its connection stays open: only its silence shows.
#[tokio::test]
async fn a_stopped_worker_counts_as_dead_after_its_time() {
    if std::env::var_os(CHILD).is_some() {
        return be_the_worker().await;
    }
    let worker = Worker::start("a_stopped_worker_counts_as_dead_after_its_time").await;
    let (pair, response) = worker.streaming(wary()).await;
    worker.process.signal(Signal::STOP);
    let error = end_of(response).await;
    assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
    assert!(error.message().contains("silent"), "{error}");
    assert!(!pair.caller.is_reachable(&worker.address));
    // It resumes, and is found again.
    worker.process.signal(Signal::CONT);
    until(|| pair.caller.is_reachable(&worker.address)).await;
    let again = pair.call_at::<(), u32>(&worker.address, (), ctx()).await;
    assert_eq!(soon(again.unwrap().next()).await.unwrap().unwrap(), 0);
}
