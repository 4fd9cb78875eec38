//! A worker in its own process, to be killed and stopped. The test binary runs itself again, and its environment tells it
//! to be the worker.

use futures_util::StreamExt;
use genset_backend_common::ErrorKind;
use genset_runtime::InstanceId;
use genset_runtime::discovery::Address;
use genset_runtime::plane::{NatsConfig, RequestPlane, ResponseStream};
use rustix::process::Signal;
use tokio_util::sync::CancellationToken;

use super::server::{NatsServer, plane};
use crate::child::{Child, say};
use crate::plane::suite::{Pair, erased, hang, name};
use crate::plane::{deaf, wary};
use crate::support::{ctx, soon, until};

/// The server for the child to use.
const SERVER: &str = "GENSET_TEST_NATS_WORKER";

/// Starts a worker that yields one item and hangs.
async fn start(server: &NatsServer) -> (Child, Address) {
    let test = "a_worker_that_is_killed_is_gone_at_once";
    let url = format!("nats://{}", server.address());
    let mut child = Child::start(module_path!(), test, (SERVER, &url));
    let address = Address {
        plane: "nats".into(),
        location: child.said().await,
    };
    (child, address)
}

async fn serve(server: String) {
    let config = NatsConfig {
        servers: vec![server],
        ..NatsConfig::default()
    };
    let plane = plane(config, deaf());
    let handler =
        erased(|(): (), _ctx| std::future::ready(hang(CancellationToken::new().drop_guard())));
    let endpoint = name("generate");
    let served = plane.serve(&endpoint, InstanceId(1), handler);
    let served = served.await.unwrap();
    say(&served.address.location);
    std::future::pending().await
}

/// A stream of the worker, read up to where it hangs.
async fn call(pair: &Pair, address: &Address) -> ResponseStream<u32> {
    let mut response = pair.call_at::<(), u32>(address, (), ctx()).await.unwrap();
    assert_eq!(soon(response.next()).await.unwrap().unwrap(), 0);
    response
}

/// The caller would wait forever for a peer that is only silent.
#[tokio::test]
async fn a_worker_that_is_killed_is_gone_at_once() {
    if let Ok(server) = std::env::var(SERVER) {
        return serve(server).await;
    }
    let server = NatsServer::start().await;
    let pair = super::pair(&server, deaf());
    let (mut worker, address) = start(&server).await;
    let mut response = call(&pair, &address).await;
    worker.kill().await;
    let error = soon(response.next()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Disconnected);
    assert!(error.message().contains("the peer is gone"), "{error}");
    let error = pair.call_at::<(), u32>(&address, (), ctx()).await;
    assert_eq!(error.err().unwrap().kind(), ErrorKind::CannotConnect);
}

#[tokio::test]
async fn a_worker_that_hangs_is_given_up_and_found_again_when_it_goes_on() {
    let server = NatsServer::start().await;
    let pair = super::pair(&server, wary());
    let (worker, address) = start(&server).await;
    let mut response = call(&pair, &address).await;
    worker.signal(Signal::STOP);
    let error = soon(response.next()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Disconnected);
    assert!(error.message().contains("silent"), "{error}");
    worker.signal(Signal::CONT);
    until(|| pair.caller.is_reachable(&address)).await;
    drop(call(&pair, &address).await);
}
