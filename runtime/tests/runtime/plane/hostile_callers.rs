//! What dials a worker's port and is no caller, or a bad one: refused, counted, and no harm to others.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use genset_backend_common::wire::{
    Auth, Cancel, Credit, FrameKind, GoAwayCode, Hello, WireError, decode_payload, encode_payload,
};
use genset_backend_common::{CancelReason, ErrorKind, MetricsRegistry, RequestContext};
use genset_runtime::plane::{ResponseStream, Served, TcpConfig, WireConfig, WirePlane, WireSecret};
use proptest::prelude::*;
use serde::Serialize;
use tokio::sync::Notify;

use super::scripted::{
    FOUR_GIGABYTES, Peer, counted, error, frame, hello, ping, request, until_counted,
};
use super::suite::{Pair, count, name, serve};
use super::tcp::process;
use crate::support::{ctx, soon, until};

/// A worker, and an honest caller whose stream is open all the time.
struct Victim {
    pair: Pair,
    metrics: MetricsRegistry,
    /// Serves `generate`: the numbers below a number.
    counting: Served,
    /// Serves `hang`: one item and no more; and `wait`: an item each time it is told to.
    _served: Vec<Served>,
    go_on: Arc<Notify>,
    open: ResponseStream<u32>,
}

impl Victim {
    async fn start(config: WireConfig) -> Self {
        let metrics = MetricsRegistry::default();
        let callee = WirePlane::tcp(TcpConfig::default(), config.clone(), &metrics);
        // The honest caller has patience: what ends its connection is its callee.
        let patient = WireConfig {
            secret: config.secret,
            ..super::suite::border::deaf()
        };
        let caller = WirePlane::tcp(TcpConfig::default(), patient, &MetricsRegistry::default());
        let pair = Pair {
            caller: Arc::new(caller.unwrap()),
            callee: Arc::new(callee.unwrap()),
        };
        let counting = pair.serve(count).await;
        let hanging = |(): (), _ctx: RequestContext| {
            let items: ResponseStream<u32> =
                Box::pin(stream::iter([Ok(0)]).chain(stream::pending()));
            std::future::ready(Ok(items))
        };
        let hanging = serve(&*pair.callee, &name("hang"), 1, hanging).await;
        let go_on = Arc::new(Notify::new());
        let told = Arc::clone(&go_on);
        let waiting = move |(): (), _ctx: RequestContext| {
            let items = stream::unfold(Arc::clone(&told), |told| async move {
                told.notified().await;
                Some((Ok(7u32), told))
            });
            let items: ResponseStream<u32> = Box::pin(stream::iter([Ok(0)]).chain(items));
            std::future::ready(Ok(items))
        };
        let wait = name("wait");
        let waiting = serve(&*pair.callee, &wait, 1, waiting).await;
        let open = genset_runtime::plane::call(&*pair.caller, &waiting.address, &wait, (), ctx());
        let mut open: ResponseStream<u32> = soon(open).await.unwrap();
        assert_eq!(soon(open.next()).await.unwrap().unwrap(), 0);
        Self {
            pair,
            metrics,
            counting,
            _served: vec![hanging, waiting],
            go_on,
            open,
        }
    }

    fn process(&self) -> &str {
        process(&self.counting.address)
    }

    /// The honest caller's stream goes on, and it can open others.
    async fn is_well(&mut self) {
        self.go_on.notify_one();
        assert_eq!(soon(self.open.next()).await.unwrap().unwrap(), 7);
        let got: Vec<u32> = self.pair.ask(&self.counting, 3u32).await.unwrap();
        assert_eq!(got, [0, 1, 2]);
    }

    async fn counts(&self, name: &str, reason: &str, times: u64) {
        until_counted(&self.metrics, name, reason, times).await;
    }
}

#[tokio::test]
async fn other_protocols_are_refused_and_told_nothing() {
    let mut victim = Victim::start(WireConfig::default()).await;
    let strangers: [&[u8]; 6] = [
        b"GET /metrics HTTP/1.1\r\nhost: worker\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        &FOUR_GIGABYTES,
        &[0; 16],
    ];
    for (times, bytes) in (1..).zip(strangers) {
        let mut peer = Peer::dial(victim.process()).await;
        peer.send_bytes(bytes).await;
        assert!(peer.bytes_to_the_end().await.is_empty());
        victim.counts("refused", "not_our_protocol", times).await;
    }
    victim.is_well().await;
}

#[tokio::test]
async fn a_port_scanner_is_counted() {
    let mut victim = Victim::start(WireConfig::default()).await;
    for _ in 0..100 {
        drop(Peer::dial(victim.process()).await);
    }
    let mut cut_short = Peer::dial(victim.process()).await;
    cut_short.send_bytes(&[0, 0, 0, 9, 0]).await;
    cut_short.stop_sending().await;
    assert!(cut_short.bytes_to_the_end().await.is_empty());
    victim.counts("refused", "closed", 101).await;
    victim.is_well().await;
}

#[tokio::test]
async fn a_stranger_that_says_too_little_is_given_up() {
    let mut victim = Victim::start(WireConfig {
        connect_timeout: Duration::from_millis(200),
        ..WireConfig::default()
    })
    .await;
    let mut silent = Peer::dial(victim.process()).await;
    let mut slow = Peer::dial(victim.process()).await;
    slow.send_bytes(&[0, 0, 0, 40, 0, 0]).await;
    let mut chatty = Peer::dial(victim.process()).await;
    chatty
        .send_bytes(&frame(FrameKind::Unknown(200), 0, b"?"))
        .await;
    for peer in [&mut silent, &mut slow, &mut chatty] {
        assert!(peer.bytes_to_the_end().await.is_empty());
    }
    victim.counts("refused", "timeout", 3).await;
    victim.is_well().await;
}

#[tokio::test]
async fn another_version_is_refused_and_told_which_there_are() {
    let mut victim = Victim::start(WireConfig::default()).await;
    let mut peer = Peer::dial(victim.process()).await;
    let newer = Hello {
        version: 3,
        min_version: 2,
        ..hello()
    };
    peer.send(FrameKind::Hello, 0, &newer).await;
    let told = peer.told_at_the_end().await.unwrap();
    assert_eq!(told.code, GoAwayCode::Version);
    assert!(
        told.reason.contains("we speak 1 to 1, the peer 2 to 3"),
        "{}",
        told.reason
    );
    victim.counts("refused", "version", 1).await;
    victim.is_well().await;
}

/// A peer one version ahead: it also speaks ours, says more than we know, and is served.
#[tokio::test]
async fn a_newer_caller_that_speaks_our_version_too_is_served() {
    #[derive(Serialize)]
    struct NewerHello {
        version: u16,
        min_version: u16,
        max_frame_bytes: u32,
        compression: &'static str,
    }
    #[derive(Serialize)]
    struct NewerHead {
        endpoint: &'static str,
        instance: u64,
        id: &'static str,
        credit: u32,
        tenant: Option<&'static str>,
    }
    let victim = Victim::start(WireConfig::default()).await;
    let mut peer = Peer::dial(victim.process()).await;
    peer.send_bytes(&frame(FrameKind::Unknown(60), 0, b"a greeting of tomorrow"))
        .await;
    let newer = NewerHello {
        version: 2,
        min_version: 1,
        max_frame_bytes: 1 << 20,
        compression: "none",
    };
    peer.send(FrameKind::Hello, 0, &newer).await;
    let answer: Hello = decode_payload(&peer.expect(FrameKind::Hello).await.payload).unwrap();
    assert_eq!((answer.min_version, answer.version), (1, 1));

    peer.send_bytes(&frame(FrameKind::Unknown(77), 5, &[0xc1; 300]))
        .await;
    let head = NewerHead {
        endpoint: "test.worker.generate",
        instance: 1,
        id: "r",
        credit: 10,
        tenant: Some("t"),
    };
    let mut payload = encode_payload(&head).unwrap();
    payload.extend(encode_payload(&2u32).unwrap());
    let mut bytes = frame(FrameKind::Request, 1, &payload);
    // Flags that a later version gives a meaning.
    bytes[5] = 0xff;
    peer.send_bytes(&bytes).await;
    for expected in 0..2u32 {
        let item = peer.expect(FrameKind::Item).await;
        assert_eq!(decode_payload::<u32>(&item.payload).unwrap(), expected);
    }
    assert_eq!(peer.expect(FrameKind::End).await.stream, 1);
}

#[tokio::test]
async fn a_peer_that_takes_no_frame_of_use_is_refused() {
    let mut victim = Victim::start(WireConfig::default()).await;
    let mut peer = Peer::dial(victim.process()).await;
    let tiny = Hello {
        max_frame_bytes: 3,
        ..hello()
    };
    peer.send(FrameKind::Hello, 0, &tiny).await;
    let told = peer.told_at_the_end().await.unwrap();
    assert!(told.reason.contains("at most"), "{}", told.reason);
    victim.counts("refused", "frame_limit", 1).await;
    victim.is_well().await;
}

#[tokio::test]
async fn a_caller_without_the_secret_is_refused() {
    let secret = WireSecret::try_new(b"correct horse battery staple").unwrap();
    let mut victim = Victim::start(WireConfig {
        secret: Some(secret),
        ..WireConfig::default()
    })
    .await;
    let claims = |nonce: &'static [u8]| Hello {
        has_secret: true,
        nonce: Bytes::from_static(nonce),
        ..hello()
    };
    // None; one too short to prove anything over; a wrong proof; what we sent, sent back; and no proof but a request.
    let proof = |bytes: Vec<u8>| {
        let payload = encode_payload(&Auth {
            proof: bytes.into(),
        });
        frame(FrameKind::Auth, 0, &payload.unwrap())
    };
    let attempts = [
        (hello(), None),
        (claims(b"short"), None),
        (claims(&[7; 32]), Some(proof(vec![0; 32]))),
        (claims(&[7; 32]), Some(proof(Vec::new()))),
    ];
    for (times, (hello, proof)) in (1..).zip(attempts) {
        let mut peer = Peer::dial(victim.process()).await;
        peer.send(FrameKind::Hello, 0, &hello).await;
        if let Some(proof) = proof {
            peer.send_bytes(&proof).await;
        }
        let told = peer.told_at_the_end().await.unwrap();
        assert_eq!(told.code, GoAwayCode::Unauthorized, "{}", told.reason);
        victim.counts("refused", "unauthorized", times).await;
    }
    let mut peer = Peer::dial(victim.process()).await;
    peer.send(FrameKind::Hello, 0, &claims(&[7; 32])).await;
    peer.request(1, "hang", 1).await;
    assert!(peer.told_at_the_end().await.is_none());
    victim.counts("refused", "not_our_protocol", 1).await;
    victim.is_well().await;
}

#[tokio::test]
async fn planes_with_different_secrets_do_not_meet() {
    let secret = |text: &str| WireSecret::try_new(text.as_bytes()).unwrap();
    let (right, wrong) = (
        secret("correct horse battery"),
        secret("wrong horse battery"),
    );
    for (theirs, ours) in [
        (Some(&right), Some(&wrong)),
        (Some(&right), None),
        (None, Some(&right)),
    ] {
        let mut victim = Victim::start(WireConfig {
            secret: theirs.cloned(),
            ..WireConfig::default()
        })
        .await;
        let config = WireConfig {
            secret: ours.cloned(),
            ..WireConfig::default()
        };
        let plane = WirePlane::tcp(TcpConfig::default(), config, &MetricsRegistry::default());
        let pair = Pair {
            caller: Arc::new(plane.unwrap()),
            callee: Arc::clone(&victim.pair.callee),
        };
        let refused = error(pair.ask::<u32, u32>(&victim.counting, 1).await);
        assert_eq!(refused.kind(), ErrorKind::CannotConnect);
        assert!(refused.message().contains("secret"), "{refused}");
        until(|| {
            let refused = |reason| counted(&victim.metrics, "refused", reason);
            refused("unauthorized") + refused("refused_by_peer") + refused("closed") == 1
        })
        .await;
        victim.is_well().await;
    }
}

#[tokio::test]
async fn breaking_the_protocol_ends_the_connection_and_says_why() {
    let credit = |items| encode_payload(&Credit { items }).unwrap();
    let again = frame(FrameKind::Request, 1, &request("hang", 5));
    let greeting = frame(FrameKind::Hello, 0, &encode_payload(&hello()).unwrap());
    let mut too_much_credit = frame(FrameKind::Credit, 1, &credit(1 << 20)).to_vec();
    too_much_credit.extend_from_slice(&frame(FrameKind::Credit, 1, &credit(u32::MAX)));
    let mut deep = request("generate", 1);
    deep.splice(0..0, vec![0x91; 200_000]);
    let crimes: Vec<(&str, Vec<u8>)> = vec![
        ("stream 1 was opened twice", again.to_vec()),
        (
            "stream 0",
            frame(FrameKind::Request, 0, &request("hang", 5)).to_vec(),
        ),
        (
            "Item from a caller",
            frame(FrameKind::Item, 1, &[0]).to_vec(),
        ),
        ("End from a caller", frame(FrameKind::End, 1, &[]).to_vec()),
        (
            "Error from a caller",
            frame(FrameKind::Error, 1, &[]).to_vec(),
        ),
        ("Hello after the handshake", greeting.to_vec()),
        (
            "Auth after the handshake",
            frame(FrameKind::Auth, 0, &[]).to_vec(),
        ),
        ("over the limit", FOUR_GIGABYTES.to_vec()),
        ("does not speak this protocol", vec![0; 4]),
        ("Request: ", frame(FrameKind::Request, 2, b"\xc1").to_vec()),
        ("Request: ", frame(FrameKind::Request, 2, &deep).to_vec()),
        ("Cancel: ", frame(FrameKind::Cancel, 1, b"no").to_vec()),
        ("Credit: ", frame(FrameKind::Credit, 1, b"").to_vec()),
        ("credit for more than", too_much_credit),
        ("decode", frame(FrameKind::GoAway, 0, b"bye").to_vec()),
    ];
    let mut victim = Victim::start(WireConfig::default()).await;
    for (times, (reason, bytes)) in (1..).zip(crimes) {
        let mut peer = Peer::greeted_by(victim.process()).await;
        peer.request(1, "hang", 5).await;
        peer.expect(FrameKind::Item).await;
        peer.send_bytes(&bytes).await;
        let told = peer.told_at_the_end().await;
        let told = told.unwrap_or_else(|| panic!("{reason}: told nothing"));
        assert_eq!(told.code, GoAwayCode::Protocol);
        assert!(told.reason.contains(reason), "{reason}: {}", told.reason);
        victim.counts("ended_connections", "protocol", times).await;
    }
    victim.is_well().await;
}

#[tokio::test]
async fn unknown_streams_are_nobodys_and_harm_nobody() {
    let victim = Victim::start(WireConfig::default()).await;
    let mut peer = Peer::greeted_by(victim.process()).await;
    for stream in [0, 1, 99, u32::MAX] {
        peer.send(FrameKind::Credit, stream, &Credit { items: 3 })
            .await;
        let cancel = Cancel {
            reason: CancelReason::Client,
            discard: stream % 2 == 0,
        };
        peer.send(FrameKind::Cancel, stream, &cancel).await;
    }
    peer.request(7, "hang", 1).await;
    assert_eq!(peer.expect(FrameKind::Item).await.stream, 7);
}

#[tokio::test]
async fn an_unknown_endpoint_is_refused_and_the_connection_goes_on() {
    let victim = Victim::start(WireConfig::default()).await;
    let mut peer = Peer::greeted_by(victim.process()).await;
    peer.request(1, "nothing", 1).await;
    let refused = peer.expect(FrameKind::Error).await;
    let refused: WireError = decode_payload(&refused.payload).unwrap();
    assert_eq!(refused.kind, ErrorKind::CannotConnect);
    victim.counts("refused", "cannot_connect", 1).await;
    peer.request(2, "hang", 1).await;
    assert_eq!(peer.expect(FrameKind::Item).await.stream, 2);
}

#[tokio::test]
async fn a_peer_that_stops_in_mid_frame_counts_as_dead() {
    let mut victim = Victim::start(WireConfig::default()).await;
    let mut peer = Peer::greeted_by(victim.process()).await;
    let whole = frame(FrameKind::Request, 1, &request("hang", 5));
    peer.send_bytes(&whole[..whole.len() / 2]).await;
    assert!(soon(peer.told_without_pongs()).await.is_none());
    victim.counts("ended_connections", "silent", 1).await;
    victim.is_well().await;
}

/// It talks all the time, and reads nothing of what it asked for.
#[tokio::test]
async fn a_peer_that_takes_nothing_is_cut_off_and_holds_little_memory() {
    const ITEM_BYTES: usize = 64 << 10;
    let mut victim = Victim::start(WireConfig {
        write_timeout: Duration::from_secs(1),
        max_outbox_bytes: 1 << 20,
        ..WireConfig::default()
    })
    .await;
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    let bulky = move |(): (), _ctx: RequestContext| {
        let asked = Arc::clone(&counted);
        let items = stream::repeat_with(move || {
            asked.fetch_add(1, Ordering::SeqCst);
            Ok("x".repeat(ITEM_BYTES))
        });
        let items: ResponseStream<String> = Box::pin(items);
        std::future::ready(Ok(items))
    };
    let _bulky = serve(&*victim.pair.callee, &name("bulky"), 1, bulky).await;
    let mut peer = Peer::greeted_by(victim.process()).await;
    for stream in 1..=8 {
        peer.request(stream, "bulky", 100_000).await;
    }
    soon(async {
        while peer.try_send(&ping(FrameKind::Ping)).await.is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    victim.counts("ended_connections", "stalled", 1).await;
    // The outbox, an item a stream more, and what the system holds for a socket: some megabytes.
    let bytes = asked.load(Ordering::SeqCst) * ITEM_BYTES;
    assert!(
        bytes < 32 << 20,
        "{bytes} bytes were made for a peer that took none"
    );
    victim.is_well().await;
}

/// Answers to a flood must not pile up either: a peer that reads no answers is not listened to.
#[tokio::test]
async fn a_flood_of_requests_or_pings_is_held_back_by_its_own_answers() {
    let refused = frame(FrameKind::Request, 1, &request("nothing", 1)).repeat(1000);
    let pings = frame(FrameKind::Ping, 0, &[0; 60_000]).to_vec();
    for flood in [refused, pings] {
        let mut victim = Victim::start(WireConfig {
            write_timeout: Duration::from_secs(1),
            max_outbox_bytes: 1 << 20,
            ..WireConfig::default()
        })
        .await;
        let mut peer = Peer::greeted_by(victim.process()).await;
        let mut sent = 0;
        while sent < 1 << 30 && peer.try_send(&flood).await.is_ok() {
            sent += flood.len();
        }
        assert!(sent < 256 << 20, "{sent} bytes were taken");
        victim.counts("ended_connections", "stalled", 1).await;
        victim.is_well().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_thousand_requests_leave_nothing_behind() {
    const REQUESTS: u32 = 100_000;
    let mut victim = Victim::start(WireConfig::default()).await;
    let mut peer = Peer::greeted_by(victim.process()).await;
    let known = request("hang", 0);
    let mut answered = 0;
    for batch in 0..REQUESTS / 1000 {
        let mut bytes = Vec::new();
        for stream in (1..=1000).map(|index| batch * 1000 + index) {
            // Every other one is of an endpoint there is, and is dropped again.
            if stream % 2 == 0 {
                let cancel = Cancel {
                    reason: CancelReason::Client,
                    discard: true,
                };
                let cancel = encode_payload(&cancel).unwrap();
                bytes.extend_from_slice(&frame(FrameKind::Request, stream, &known));
                bytes.extend_from_slice(&frame(FrameKind::Cancel, stream, &cancel));
            } else {
                bytes.extend_from_slice(&frame(FrameKind::Request, stream, &request("no", 1)));
            }
        }
        peer.send_bytes(&bytes).await;
        for _ in 0..500 {
            peer.expect(FrameKind::Error).await;
            answered += 1;
        }
    }
    assert_eq!(answered, REQUESTS / 2);
    victim
        .counts("refused", "cannot_connect", u64::from(REQUESTS / 2))
        .await;
    // Only the honest caller's.
    let one = "genset_wire_streams{role=\"callee\"} 1\n";
    until(|| victim.metrics.encode().contains(one)).await;
    victim.is_well().await;
}

#[tokio::test]
async fn streams_over_the_limit_are_overloaded_and_those_open_stay() {
    let mut victim = Victim::start(WireConfig {
        max_streams: 10,
        ..WireConfig::default()
    })
    .await;
    let mut peer = Peer::greeted_by(victim.process()).await;
    for stream in 1..=1000 {
        peer.request(stream, "hang", 1).await;
    }
    let (mut items, mut refused) = (0, 0);
    while items < 10 || refused < 990 {
        let frame = peer.next().await.unwrap();
        match frame.kind {
            FrameKind::Item => items += 1,
            FrameKind::Error => {
                let error: WireError = decode_payload(&frame.payload).unwrap();
                assert_eq!(error.kind, ErrorKind::Overloaded);
                refused += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((items, refused), (10, 990));
    victim.counts("refused", "overloaded", 990).await;
    victim.is_well().await;
}

#[tokio::test]
async fn connections_over_the_limit_are_refused_and_told_so() {
    let mut victim = Victim::start(WireConfig {
        max_connections: 3,
        ..WireConfig::default()
    })
    .await;
    let first = Peer::greeted_by(victim.process()).await;
    let _second = Peer::greeted_by(victim.process()).await;
    for times in 1..=20 {
        let mut peer = Peer::dial(victim.process()).await;
        let told = peer.told_at_the_end().await.unwrap();
        assert_eq!(told.code, GoAwayCode::Limit);
        victim
            .counts("refused", "too_many_connections", times)
            .await;
    }
    victim.is_well().await;
    drop(first);
    victim.counts("ended_connections", "closed", 1).await;
    soon(async {
        // Its place is free a moment after it was counted.
        loop {
            let mut peer = Peer::dial(victim.process()).await;
            peer.send(FrameKind::Hello, 0, &hello()).await;
            if peer
                .next()
                .await
                .is_some_and(|frame| frame.kind == FrameKind::Hello)
            {
                return;
            }
        }
    })
    .await;
}

/// An honest conversation, as the bytes of one caller.
fn conversation() -> Vec<Vec<u8>> {
    let cancel = |discard| {
        encode_payload(&Cancel {
            reason: CancelReason::Client,
            discard,
        })
        .unwrap()
    };
    let credit = encode_payload(&Credit { items: 9 }).unwrap();
    [
        frame(FrameKind::Hello, 0, &encode_payload(&hello()).unwrap()),
        frame(FrameKind::Request, 1, &request("hang", 1)),
        frame(FrameKind::Credit, 1, &credit),
        frame(FrameKind::Request, 2, &request("nothing", 1)),
        frame(FrameKind::Cancel, 1, &cancel(false)),
        frame(FrameKind::Ping, 0, &[1, 2, 3]),
        frame(FrameKind::Cancel, 1, &cancel(true)),
    ]
    .into_iter()
    .map(|bytes| bytes.to_vec())
    .collect()
}

/// A conversation that goes wrong somewhere: garbage between its frames, or within one.
fn gone_wrong() -> impl Strategy<Value = Vec<u8>> {
    let garbage = proptest::collection::vec(any::<u8>(), 1..100);
    (
        0..7usize,
        any::<prop::sample::Index>(),
        garbage,
        any::<bool>(),
    )
        .prop_map(|(frames, place, garbage, within)| {
            let mut frames: Vec<Vec<u8>> = conversation().into_iter().take(frames + 1).collect();
            if within {
                let last = frames.last_mut().unwrap();
                let place = place.index(last.len());
                for (byte, garbage) in last[place..].iter_mut().zip(&garbage) {
                    *byte = *garbage;
                }
            } else {
                frames.push(garbage);
            }
            frames.concat()
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is wrong, and wherever: the worker goes on, and so do its callers.
    #[test]
    fn garbage_anywhere_harms_nobody_else(conversations in proptest::collection::vec(gone_wrong(), 1..8)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut victim = Victim::start(WireConfig::default()).await;
            for bytes in conversations {
                let mut peer = Peer::dial(victim.process()).await;
                peer.send_bytes(&bytes).await;
                peer.stop_sending().await;
                peer.bytes_to_the_end().await;
            }
            victim.is_well().await;
            let alone = "genset_wire_connections{role=\"callee\"} 1\n";
            until(|| victim.metrics.encode().contains(alone)).await;
        });
    }
}
