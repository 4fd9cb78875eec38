//! Faulty workers: the requests they affect fail quickly with a typed error.

mod deadlines;
mod memory;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{StreamExt, TryStreamExt};
use genset_backend_common::{
    CancelReason, EngineError, ErrorKind, MetricsRegistry, RequestContext,
};
use genset_runtime::discovery::Address;
use genset_runtime::plane::{RequestPlane, ResponseStream, WireConfig, WireSecret};
use genset_wire::{
    Auth, Credit, FrameKind, GoAway, GoAwayCode, Hello, WireError, decode_request, encode_payload,
};
use proptest::prelude::*;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::scripted::{FOUR_GIGABYTES, Peer, cancel, error, frame, hello, ping, until_counted};
use super::suite::{Pair, border::deaf};
use crate::support::{ctx, over_tcp, soon};

/// A caller, and the listener it mistakes for a worker.
struct Trap {
    plane: Arc<dyn RequestPlane>,
    metrics: MetricsRegistry,
    listener: TcpListener,
    address: Address,
}

impl Trap {
    async fn set(config: WireConfig) -> Self {
        let metrics = MetricsRegistry::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = Address {
            plane: "tcp".into(),
            location: format!("{}/{:014x}", listener.local_addr().unwrap(), 1),
        };
        Self {
            plane: over_tcp(config, &metrics),
            metrics,
            listener,
            address,
        }
    }

    async fn call(&self) -> Result<ResponseStream<u32>, EngineError> {
        self.call_as(ctx()).await
    }

    async fn call_as(&self, ctx: RequestContext) -> Result<ResponseStream<u32>, EngineError> {
        let pair = Pair::calling(self.plane.clone());
        pair.call_at(&self.address, (), ctx).await
    }

    /// A stream that has yielded its first item, and its peer.
    async fn open(&self) -> (ResponseStream<u32>, Peer) {
        self.open_as(ctx()).await
    }

    async fn open_as(&self, ctx: RequestContext) -> (ResponseStream<u32>, Peer) {
        let answer = async {
            let mut peer = Peer::greeting(&self.listener).await;
            let request = peer.expect(FrameKind::Request).await;
            assert_eq!(request.stream, 1);
            peer.send(FrameKind::Item, 1, &0u32).await;
            peer
        };
        let (response, peer) = tokio::join!(self.call_as(ctx), answer);
        let mut response = response.unwrap();
        assert_eq!(soon(response.next()).await.unwrap().unwrap(), 0);
        (response, peer)
    }

    /// Workers other than the faulty one can still be called.
    async fn others_are_called(&self) {
        let other = over_tcp(deaf(), &MetricsRegistry::default());
        Pair::new(Arc::clone(&self.plane), other).works().await;
    }
}

/// The next error of a stream.
async fn next_error(response: &mut ResponseStream<u32>) -> EngineError {
    let error = soon(response.next()).await.unwrap().unwrap_err();
    assert!(soon(response.next()).await.is_none());
    error
}

/// A worker that reads nothing, and requests of more bytes than a connection holds. Requests that wait to be sent end with the
/// connection, as requests that no worker has seen, or earlier if they are cancelled or late.
#[tokio::test]
async fn requests_that_wait_for_a_full_connection_end_with_it() {
    let trap = Trap::set(WireConfig {
        max_outbox_bytes: 64 << 10,
        ..deaf()
    })
    .await;
    let pair = Pair::calling(trap.plane.clone());
    let large = "x".repeat(1 << 20);
    let call = |ctx| pair.call_at::<_, u32>(&trap.address, large.clone(), ctx);
    let others = async {
        let peer = Peer::greeting(&trap.listener).await;
        // The system's buffers are full by then.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let cancelled = ctx();
        let late = ctx().with_deadline(Instant::now() + Duration::from_millis(100));
        let cancel = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            cancelled.cancel(CancelReason::Client);
        };
        let (cancelled, late, ()) = tokio::join!(call(cancelled.clone()), call(late), cancel);
        drop(peer);
        (cancelled, late)
    };
    let many = join_all((0..64).map(|_| call(ctx())));
    let (many, (cancelled, late)) = tokio::join!(many, others);
    assert_eq!(error(cancelled).kind(), ErrorKind::Cancelled);
    assert_eq!(error(late).kind(), ErrorKind::DeadlineExceeded);
    let (mut lost, mut unseen) = (0, 0);
    for error in many.into_iter().map(error) {
        if error.kind() == ErrorKind::Disconnected {
            lost += 1;
        } else {
            assert_eq!(error.kind(), ErrorKind::CannotConnect, "{error}");
            unseen += 1;
        }
    }
    assert!(lost > 0 && unseen > 0, "{lost} and {unseen}");
}

/// The system accepts the connection, but nothing responds. All requests that wait for it fail together.
#[tokio::test]
async fn a_half_open_connection_is_given_up_once_for_all_who_wait() {
    let trap = Trap::set(WireConfig {
        connect_timeout: Duration::from_millis(300),
        ..deaf()
    })
    .await;
    for error in join_all((0..50).map(|_| trap.call()))
        .await
        .into_iter()
        .map(error)
    {
        assert_eq!(error.kind(), ErrorKind::CannotConnect, "{error}");
    }
    let mut dialled = 0;
    while tokio::time::timeout(Duration::from_millis(1), trap.listener.accept())
        .await
        .is_ok()
    {
        dialled += 1;
    }
    assert!(
        dialled <= 2,
        "dialled {dialled} times for requests made at once"
    );
    trap.others_are_called().await;
}

#[tokio::test]
async fn what_answers_otherwise_than_a_worker_cannot_be_connected_to() {
    let greeting = |hello: &Hello| {
        let payload = encode_payload(hello).unwrap();
        frame(FrameKind::Hello, 0, &payload)
    };
    let go_away = GoAway {
        code: GoAwayCode::Limit,
        reason: "too many of you".into(),
    };
    let newer = Hello {
        version: 3,
        min_version: 2,
        ..hello()
    };
    let tiny = Hello {
        max_frame_bytes: 0,
        ..hello()
    };
    let wants_secret = Hello {
        has_secret: true,
        nonce: vec![1; 32].into(),
        ..hello()
    };
    let refusal = frame(FrameKind::GoAway, 0, &encode_payload(&go_away).unwrap());
    let answers: Vec<(&str, Vec<u8>)> = vec![
        (
            "not speak this protocol",
            b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        ),
        ("not speak this protocol", FOUR_GIGABYTES.to_vec()),
        ("not speak this protocol", ping(FrameKind::Ping)),
        (
            "not speak this protocol",
            frame(FrameKind::Hello, 0, b"hello"),
        ),
        ("we speak 1 to 1, the peer 2 to 3", greeting(&newer)),
        ("at most", greeting(&tiny)),
        ("--wire-secret-file", greeting(&wants_secret)),
        ("too many of you", refusal),
        ("closed the connection", Vec::new()),
    ];
    let trap = Trap::set(deaf()).await;
    for (reason, bytes) in answers {
        let answer = async {
            let mut peer = Peer::accept(&trap.listener).await;
            peer.expect(FrameKind::Hello).await;
            peer.send_bytes(&bytes).await;
            peer.stop_sending().await;
            peer.told_at_the_end().await
        };
        let (response, told) = tokio::join!(trap.call(), answer);
        let error = error(response);
        assert_eq!(error.kind(), ErrorKind::CannotConnect);
        assert!(error.message().contains(reason), "{reason}: {error}");
        if reason.contains("speak 1") {
            assert_eq!(told.unwrap().code, GoAwayCode::Version);
        }
    }
    trap.others_are_called().await;
}

/// It claims to have the secret: it returns the proof it received, or a proof of nothing.
#[tokio::test]
async fn a_worker_that_does_not_prove_the_secret_is_refused() {
    let secret = WireSecret::try_new(b"correct horse battery staple").unwrap();
    let trap = Trap::set(WireConfig {
        secret: Some(secret),
        ..deaf()
    })
    .await;
    let claim = Hello {
        has_secret: true,
        nonce: vec![7; 32].into(),
        ..hello()
    };
    let zeros = Auth {
        proof: vec![0; 32].into(),
    };
    for reflects in [false, true] {
        let answer = async {
            let mut peer = Peer::accept(&trap.listener).await;
            peer.expect(FrameKind::Hello).await;
            peer.send(FrameKind::Hello, 0, &claim).await;
            let theirs = peer.expect(FrameKind::Auth).await;
            if reflects {
                peer.send_frame(FrameKind::Auth, 0, &theirs.payload).await;
            } else {
                peer.send(FrameKind::Auth, 0, &zeros).await;
            }
            peer.stop_sending().await;
            peer.told_at_the_end().await
        };
        let (response, told) = tokio::join!(trap.call(), answer);
        let told = told.unwrap();
        assert_eq!(told.code, GoAwayCode::Unauthorized, "{}", told.reason);
        let error = error(response);
        assert_eq!(error.kind(), ErrorKind::CannotConnect, "{error}");
    }
}

/// A worker one version ahead: it also speaks our version and sends extra fields, and is understood.
#[tokio::test]
async fn a_newer_worker_that_speaks_our_version_too_is_understood() {
    #[derive(Serialize)]
    struct NewerHello {
        version: u16,
        min_version: u16,
        max_frame_bytes: u32,
        zones: Vec<&'static str>,
    }
    #[derive(Serialize)]
    struct NewerError {
        kind: &'static str,
        message: &'static str,
        hint: &'static str,
    }
    let trap = Trap::set(deaf()).await;
    let answer = async {
        let mut peer = Peer::accept(&trap.listener).await;
        peer.expect(FrameKind::Hello).await;
        let newer = NewerHello {
            version: 2,
            min_version: 1,
            max_frame_bytes: 1 << 20,
            zones: vec!["a"],
        };
        peer.send_frame(FrameKind::Unknown(60), 0, b"of tomorrow")
            .await;
        peer.send(FrameKind::Hello, 0, &newer).await;
        let request = peer.expect(FrameKind::Request).await;
        let (head, _) = decode_request(&request.payload).unwrap();
        assert_eq!(
            (head.endpoint.as_str(), head.instance),
            ("test.worker.generate", 1)
        );
        peer.send_frame(FrameKind::Unknown(99), 1, &[0xc1; 100])
            .await;
        peer.send(FrameKind::Item, 1, &5u32).await;
        let error = NewerError {
            kind: "overheated",
            message: "kinds of tomorrow",
            hint: "wait",
        };
        peer.send(FrameKind::Error, 1, &error).await;
        peer
    };
    let (response, mut peer) = tokio::join!(trap.call(), answer);
    let mut response = response.unwrap();
    assert_eq!(soon(response.next()).await.unwrap().unwrap(), 5);
    let error = next_error(&mut response).await;
    assert_eq!(
        (error.kind(), error.message()),
        (ErrorKind::Internal, "kinds of tomorrow")
    );
    // The connection continues.
    let again = async {
        let request = peer.expect(FrameKind::Request).await;
        peer.send_frame(FrameKind::End, request.stream, &[]).await;
    };
    let (response, ()) = tokio::join!(trap.call(), again);
    let rest: Vec<u32> = soon(response.unwrap().try_collect()).await.unwrap();
    assert!(rest.is_empty());
}

#[tokio::test]
async fn a_worker_that_falls_silent_counts_as_dead() {
    let trap = Trap::set(WireConfig {
        ping_interval: Duration::from_millis(100),
        peer_timeout: Duration::from_millis(300),
        ..deaf()
    })
    .await;
    let (mut response, _silent) = trap.open().await;
    let error = next_error(&mut response).await;
    assert_eq!(error.kind(), ErrorKind::Disconnected);
    assert!(error.message().contains("silent"), "{error}");
    assert!(!trap.plane.is_reachable(&trap.address));
    until_counted(&trap.metrics, "ended_connections", "silent", 1).await;
}

/// No timeout of the caller could end these streams in time: the end of the connection does.
#[tokio::test]
async fn a_connection_that_ends_disconnects_at_once_wherever_it_is_cut() {
    let trap = Trap::set(deaf()).await;
    let item = frame(FrameKind::Item, 1, &encode_payload(&1u32).unwrap());
    for cut in [0, 1, 4, 9, item.len() - 1] {
        let (mut response, mut peer) = trap.open().await;
        peer.send_bytes(&item[..cut]).await;
        drop(peer);
        let error = next_error(&mut response).await;
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        assert!(!trap.plane.is_reachable(&trap.address));
    }
}

#[tokio::test]
async fn a_worker_that_breaks_the_protocol_is_left_and_told_why() {
    let cancel = encode_payload(&cancel(true)).unwrap();
    let credit = encode_payload(&Credit { items: 1 }).unwrap();
    let window = WireConfig::default().window_items as usize;
    let item = frame(FrameKind::Item, 1, &encode_payload(&1u32).unwrap());
    let crimes: Vec<(&str, Vec<u8>)> = vec![
        ("more items than it had credit for", item.repeat(window + 1)),
        ("Request from a callee", frame(FrameKind::Request, 3, &[])),
        ("Cancel from a callee", frame(FrameKind::Cancel, 1, &cancel)),
        ("Credit from a callee", frame(FrameKind::Credit, 1, &credit)),
        ("Hello after the handshake", frame(FrameKind::Hello, 0, &[])),
        ("over the limit", FOUR_GIGABYTES.to_vec()),
        ("Error: ", frame(FrameKind::Error, 1, b"oops")),
    ];
    let trap = Trap::set(deaf()).await;
    for (times, (reason, bytes)) in (1..).zip(crimes) {
        let (mut response, mut peer) = trap.open().await;
        peer.send_bytes(&bytes).await;
        let told = peer.told_at_the_end().await.unwrap();
        assert_eq!(told.code, GoAwayCode::Protocol);
        assert!(told.reason.contains(reason), "{reason}: {}", told.reason);
        let end = soon(async {
            while let Some(item) = response.next().await {
                if let Err(error) = item {
                    return error;
                }
            }
            panic!("{reason}: the stream ended as if all were well");
        });
        assert_eq!(end.await.kind(), ErrorKind::Disconnected, "{reason}");
        until_counted(&trap.metrics, "ended_connections", "protocol", times).await;
    }
    trap.others_are_called().await;
}

#[tokio::test]
async fn frames_of_streams_that_nobody_reads_are_dropped() {
    let trap = Trap::set(deaf()).await;
    let (mut response, mut peer) = trap.open().await;
    for stream in [0, 2, 77, u32::MAX] {
        peer.send(FrameKind::Item, stream, &1u32).await;
        let error = WireError::from(&EngineError::internal("no"));
        peer.send(FrameKind::Error, stream, &error).await;
        peer.send_frame(FrameKind::End, stream, &[]).await;
    }
    peer.send_frame(FrameKind::End, 1, &[]).await;
    assert!(soon(response.next()).await.is_none());
}

/// An invalid item is an error of its stream only.
#[tokio::test]
async fn an_item_that_is_none_is_an_error_of_its_stream_alone() {
    let trap = Trap::set(deaf()).await;
    let (mut response, mut peer) = trap.open().await;
    let beside = async {
        let request = peer.expect(FrameKind::Request).await;
        peer.send_frame(FrameKind::Item, 1, &[0xc1]).await;
        peer.send(FrameKind::Item, request.stream, &3u32).await;
        peer.send_frame(FrameKind::End, request.stream, &[]).await;
    };
    let (other, ()) = tokio::join!(trap.call(), beside);
    let error = soon(response.next()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
    let other: Vec<u32> = soon(other.unwrap().try_collect()).await.unwrap();
    assert_eq!(other, [3]);
}

/// After a `GoAway`, a caller opens no more streams there and reads those it has.
#[tokio::test]
async fn a_worker_that_shuts_down_gets_no_more_requests_on_that_connection() {
    let trap = Trap::set(deaf()).await;
    let (mut response, mut peer) = trap.open().await;
    let go_away = GoAway {
        code: GoAwayCode::Shutdown,
        reason: "maintenance".into(),
    };
    peer.send(FrameKind::GoAway, 0, &go_away).await;
    peer.send(FrameKind::Item, 1, &1u32).await;
    assert_eq!(soon(response.next()).await.unwrap().unwrap(), 1);
    let (_elsewhere, _other) = trap.open().await;
    peer.send_frame(FrameKind::End, 1, &[]).await;
    assert!(soon(response.next()).await.is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever comes in place of items, wherever: the stream ends with a typed error, and other workers can be called.
    #[test]
    fn garbage_anywhere_ends_typed(
        greets in any::<bool>(),
        good_items in 0u32..3,
        kind in 0u8..14,
        garbage in proptest::collection::vec(any::<u8>(), 0..60),
        framed in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let trap = Trap::set(deaf()).await;
            let bytes = if framed {
                frame(FrameKind::from_code(kind), 1, &garbage)
            } else {
                garbage
            };
            let answer = async {
                let mut peer = Peer::accept(&trap.listener).await;
                if greets {
                    peer.expect(FrameKind::Hello).await;
                    peer.send(FrameKind::Hello, 0, &hello()).await;
                    peer.expect(FrameKind::Request).await;
                    for item in 0..good_items {
                        peer.send(FrameKind::Item, 1, &item).await;
                    }
                }
                peer.send_bytes(&bytes).await;
                peer.stop_sending().await;
                peer.bytes_to_the_end().await;
            };
            let ask = async {
                let mut response = trap.call().await?;
                let mut items = Vec::new();
                while let Some(item) = soon(response.next()).await {
                    items.push(item?);
                }
                Ok::<_, EngineError>(items)
            };
            let (answered, ()) = tokio::join!(ask, answer);
            if let Err(error) = answered {
                let kinds = [
                    ErrorKind::CannotConnect,
                    ErrorKind::Disconnected,
                    ErrorKind::Internal,
                ];
                assert!(kinds.contains(&error.kind()), "{error}");
            }
            trap.others_are_called().await;
        });
    }
}
