//! Servers that die, restart and hang, and lost messages: no item may be lost without an error.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_nats::{Client, Message, Request, RequestErrorKind, Subscriber, ToSubject};
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::{StreamExt, stream};
use genset_backend_common::output::{Output, OutputStream};
use genset_backend_common::worker::{CanaryConfig, WorkerConfig};
use genset_backend_common::{ErrorKind, GenerateRequest, RequestContext};
use genset_runtime::discovery::MemoryDiscovery;
use genset_runtime::plane::WireConfig;
use genset_runtime::{EndpointName, Runtime};

use super::pair;
use super::server::NatsServer;
use crate::plane::deaf;
use crate::plane::suite::{count, serve_hanging, streaming};
use crate::support::{
    PATIENCE, Publishing, ctx, finish, request, soon, start, until, worker_config,
};

/// Detects a silent peer quickly.
fn alert() -> WireConfig {
    WireConfig {
        ping_interval: Duration::from_millis(100),
        peer_timeout: Duration::from_millis(400),
        ..deaf()
    }
}

#[tokio::test]
async fn a_server_that_died_ends_streams_and_calls_with_typed_errors() {
    let mut server = NatsServer::start().await;
    let pair = pair(&server, alert());
    let (served, dropped) = serve_hanging(&pair).await;
    let mut response = pair.call::<(), u32>(&served, ()).await.unwrap();
    assert_eq!(soon(response.next()).await.unwrap().unwrap(), 0);
    server.kill();
    let error = soon(response.next()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Disconnected);
    assert!(error.message().contains("silent"), "{error}");
    soon(dropped.cancelled()).await;
    assert!(!pair.caller.is_reachable(&served.address));
    assert!(!pair.caller.is_connected());
    let error = pair.ask::<(), u32>(&served, ()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CannotConnect);
    assert!(error.message().contains(&server.address()), "{error}");
}

#[tokio::test]
async fn a_server_that_hung_and_goes_on_is_used_again() {
    let server = NatsServer::start().await;
    let pair = pair(&server, alert());
    let served = pair.serve(count).await;
    pair.count_to(&served, 2).await;
    server.freeze();
    until(|| !pair.caller.is_reachable(&served.address)).await;
    server.thaw();
    until(|| pair.caller.is_reachable(&served.address)).await;
    pair.count_to(&served, 3).await;
}

#[tokio::test]
async fn a_worker_is_found_again_after_the_server_was_away() {
    let mut server = NatsServer::start().await;
    let pair = pair(&server, alert());
    let served = pair.serve(count).await;
    pair.count_to(&served, 2).await;
    for _ in 0..3 {
        server.kill();
        until(|| !pair.caller.is_reachable(&served.address)).await;
        server.restart().await;
        // There are no calls, but the worker listens again where it did and is found.
        until(|| pair.caller.is_reachable(&served.address)).await;
        pair.count_to(&served, 3).await;
    }
}

/// No canary comes through NATS meanwhile, which says nothing about the engine.
#[tokio::test]
async fn a_worker_outlives_an_outage_that_is_longer_than_its_canaries_may_fail() {
    let mut server = NatsServer::start().await;
    let discovery = MemoryDiscovery::new();
    let [site, far] = [(); 2].map(|()| {
        let plane = Arc::new(server.plane(alert()));
        Runtime::new(Arc::new(discovery.clone()), plane)
    });
    let engine = Arc::new(Publishing::default());
    let config = WorkerConfig {
        canary: CanaryConfig {
            interval: Some(Duration::from_millis(50)),
            max_failures: 5,
            ..CanaryConfig::default()
        },
        ..worker_config(Vec::new())
    };
    let enough = 2 * config.canary.max_failures;
    let worker = start(&site, 1, engine.clone(), config).await;
    server.kill();
    let requests = || engine.requests.load(Ordering::Relaxed);
    let before = requests();
    tokio::select! {
        report = worker.join() => panic!("{:?}", report.outcome),
        () = until(|| requests() > before + enough) => {}
    }
    assert!(worker.status().borrow().is_ready());
    server.restart().await;
    let endpoint = far.endpoint(EndpointName::default());
    let client = endpoint.client::<GenerateRequest, Output>();
    soon(client.wait_for_instances(PATIENCE)).await.unwrap();
    let items = soon(async {
        loop {
            match client.random(request(1), ctx()).await {
                Ok(items) => return items,
                Err(error) => assert!(error.policy().is_migratable, "{error}"),
            }
        }
    })
    .await;
    finish(OutputStream::from_raw(items)).await.unwrap();
    assert_eq!(soon(worker.shutdown()).await.outcome.exit_code(), 0);
    soon(far.shutdown()).await;
    soon(site.shutdown()).await;
}

/// Whatever a restart loses, a stream has all items up to its end, and ends with an error unless it is complete.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_in_the_middle_of_a_stream_loses_nothing_silently() {
    const ITEMS: u32 = 20_000;
    let mut server = NatsServer::start().await;
    let pair = pair(&server, alert());
    let sent = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&sent);
    let served = pair
        .serve(move |(): (), _ctx: RequestContext| {
            let counted = Arc::clone(&counted);
            streaming(stream::iter(0..ITEMS).then(move |item| {
                counted.store(item, Ordering::Relaxed);
                async move {
                    tokio::task::yield_now().await;
                    Ok(item)
                }
            }))
        })
        .await;
    let mut whole = 0;
    for attempt in 0..100 {
        sent.store(0, Ordering::Relaxed);
        let Ok(mut response) = pair.call_at::<(), u32>(&served.address, (), ctx()).await else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        let mut due = 0;
        let ended = loop {
            match soon(response.next()).await {
                Some(Ok(item)) => {
                    assert_eq!(item, due);
                    due += 1;
                    if attempt < 5 && due == ITEMS / 2 {
                        server.kill();
                        server.restart().await;
                    }
                }
                Some(Err(error)) => break Err(error),
                None => break Ok(()),
            }
        };
        match ended {
            Ok(()) => {
                assert_eq!(due, ITEMS);
                whole += 1;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}"),
        }
        if attempt >= 5 && whole > 0 {
            return;
        }
    }
    panic!("no stream came to its end");
}

/// The data message with number `sent`, from a sender that has consumed none.
fn data_message(sent: u64, data: &[u8]) -> Bytes {
    let mut message = BytesMut::new();
    message.put_u8(2);
    message.put_u64(sent);
    message.put_u64(0);
    message.put_slice(data);
    message.freeze()
}

/// The next `Accept` among all messages: its subject is the caller's end, and its reply subject the callee's.
async fn next_accept(messages: &mut Subscriber) -> Message {
    soon(async {
        loop {
            let message = messages.next().await.unwrap();
            if message.payload.first() == Some(&1) {
                return message;
            }
        }
    })
    .await
}

/// Waits until nobody is subscribed to `subject`.
async fn until_nobody_listens(client: &Client, subject: impl ToSubject) {
    let subject = subject.to_subject();
    soon(async {
        loop {
            // A live listener does not respond.
            let ask = Request::new().timeout(Some(Duration::from_millis(50)));
            let asked = client.send_request(subject.clone(), ask).await;
            if asked.is_err_and(|error| error.kind() == RequestErrorKind::NoResponders) {
                return;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn connections_and_processes_that_ended_leave_no_subscription() {
    let server = NatsServer::start().await;
    let client = server.client().await;
    let mut messages = client.subscribe("genset.v1.wire.*.*").await.unwrap();
    client.flush().await.unwrap();
    let pair = pair(&server, deaf());
    let served = pair.serve(count).await;
    pair.count_to(&served, 2).await;
    let accept = next_accept(&mut messages).await;
    // Our own subscription would count as theirs.
    drop(messages);
    soon(pair.caller.shutdown()).await;
    until_nobody_listens(&client, accept.subject).await;
    until_nobody_listens(&client, accept.reply.unwrap()).await;
    let process = served.address.location.rsplit_once('/').unwrap().0;
    soon(pair.callee.shutdown()).await;
    until_nobody_listens(&client, format!("genset.v1.wire.{process}")).await;
}

/// Sends a message out of order to each end in turn.
#[tokio::test]
async fn a_message_that_was_lost_ends_the_connection_and_the_next_call_makes_another() {
    let server = NatsServer::start().await;
    let client = server.client().await;
    let mut messages = client.subscribe("genset.v1.wire.>").await.unwrap();
    client.flush().await.unwrap();
    let pair = pair(&server, deaf());
    let (served, dropped) = serve_hanging(&pair).await;
    for end in ["to the caller", "to the callee"] {
        let mut response = pair.call::<(), u32>(&served, ()).await.unwrap();
        assert_eq!(soon(response.next()).await.unwrap().unwrap(), 0);
        // The answer to the last `Open` has both ends' subjects.
        let accept = next_accept(&mut messages).await;
        let subject = match end {
            "to the caller" => accept.subject,
            _ => accept.reply.unwrap(),
        };
        let forged = data_message(1_000_000, b"");
        client.publish(subject, forged).await.unwrap();
        let error = soon(response.next()).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{end}: {error}");
        if end == "to the caller" {
            assert!(error.message().contains("was lost"), "{error}");
        }
    }
    soon(dropped.cancelled()).await;
    drop(pair.call::<(), u32>(&served, ()).await.unwrap());
}

/// Strangers' messages to a listener: it continues, and publishes only to subjects of its protocol.
#[tokio::test]
async fn messages_that_open_no_connection_are_left_alone() {
    let server = NatsServer::start().await;
    let client = server.client().await;
    let mut elsewhere = client.subscribe("orders").await.unwrap();
    let pair = pair(&server, deaf());
    let served = pair.serve(count).await;
    let process = served.address.location.rsplit_once('/').unwrap().0;
    let listening = format!("genset.v1.wire.{process}");
    let open = Bytes::from_static(&[0, 0, 0, 0, 16]);
    for payload in [open.clone(), Bytes::new(), Bytes::from_static(b"hello")] {
        client.publish(listening.clone(), payload).await.unwrap();
    }
    let to = listening.clone();
    client.publish_with_reply(to, "orders", open).await.unwrap();
    client.flush().await.unwrap();
    pair.count_to(&served, 3).await;
    // An answer would have arrived before this.
    client.publish("orders", "last".into()).await.unwrap();
    let first = soon(elsewhere.next()).await.unwrap();
    assert_eq!(&*first.payload, b"last");
}
