//! Floods: callers that request more than they read, or more than there is room for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use genset_backend_common::{ErrorKind, RequestContext};
use genset_runtime::plane::WireConfig;
use genset_wire::{
    FrameKind, GoAwayCode, RequestHead, WireError, decode_payload, encode_payload, encode_request,
};

use super::scripted::{Peer, cancel, frame, hello, ping, request};
use super::suite::{name, serve, streaming};
use super::victim::Victim;
use crate::plane::deaf;
use crate::support::{soon, until};

fn head(endpoint: &str) -> RequestHead {
    RequestHead {
        endpoint: format!("test.worker.{endpoint}"),
        instance: 1,
        credit: 1,
        ..RequestHead::default()
    }
}

/// It sends all the time, and reads none of the responses.
#[tokio::test]
async fn a_peer_that_takes_nothing_is_cut_off_and_holds_little_memory() {
    const ITEM_BYTES: usize = 64 << 10;
    let (mut victim, mut peer) = Victim::and_peer(WireConfig {
        write_timeout: Duration::from_secs(1),
        max_outbox_bytes: 1 << 20,
        ..deaf()
    })
    .await;
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    let bulky = move |(): (), _ctx: RequestContext| {
        let asked = Arc::clone(&counted);
        streaming(stream::repeat_with(move || {
            asked.fetch_add(1, Ordering::SeqCst);
            Ok("x".repeat(ITEM_BYTES))
        }))
    };
    let _bulky = serve(&*victim.pair.callee, &name("bulky"), 1, bulky).await;
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
    // The outbox, one more item per stream, and the system's socket buffers: a few megabytes.
    let bytes = asked.load(Ordering::SeqCst) * ITEM_BYTES;
    assert!(
        bytes < 32 << 20,
        "{bytes} bytes were made for a peer that took none"
    );
    victim.is_well().await;
}

/// Responses to a flood must not pile up either: a peer that reads no responses is not read from.
#[tokio::test]
async fn a_flood_of_requests_or_pings_is_held_back_by_its_own_answers() {
    let refused = frame(FrameKind::Request, 1, &request("nothing", 1)).repeat(1000);
    let pings = frame(FrameKind::Ping, 0, &[0; 4000]).repeat(15);
    for flood in [refused, pings] {
        let (mut victim, mut peer) = Victim::and_peer(WireConfig {
            write_timeout: Duration::from_secs(1),
            max_outbox_bytes: 1 << 20,
            ..deaf()
        })
        .await;
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
async fn forty_thousand_requests_leave_nothing_behind() {
    // Half of them begin a stream: more than may be open at a time.
    const REQUESTS: u32 = 40_000;
    let (mut victim, mut peer) = Victim::and_peer(deaf()).await;
    let known = request("hang", 0);
    let cancel = encode_payload(&cancel(true)).unwrap();
    let mut answered = 0;
    for batch in 0..REQUESTS / 1000 {
        let mut bytes = Vec::new();
        for stream in (1..=1000).map(|index| batch * 1000 + index) {
            // Every other one is for an existing endpoint, and its stream is dropped again.
            if stream % 2 == 0 {
                bytes.extend(frame(FrameKind::Request, stream, &known));
                bytes.extend(frame(FrameKind::Cancel, stream, &cancel));
            } else {
                bytes.extend(frame(FrameKind::Request, stream, &request("no", 1)));
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
    // Only the honest caller's stream.
    let one = "genset_wire_streams{role=\"callee\"} 1\n";
    until(|| victim.metrics.encode().contains(one)).await;
    victim.is_well().await;
}

/// Whatever requests contain, and however many there are: they fit into the budget, or are refused one by one.
#[tokio::test]
async fn what_streams_hold_stays_within_the_budget_and_is_given_back() {
    const BUDGET: usize = 128 << 20;
    let (mut victim, mut peer) = Victim::and_peer(WireConfig {
        max_memory_bytes: 2 * BUDGET,
        max_connection_memory_bytes: BUDGET,
        ..deaf()
    })
    .await;
    // Headers are limited to a small part of a request.
    let swollen = |stream: u32| {
        let head = RequestHead {
            headers: [("x".into(), "y".repeat(8 << 20))].into(),
            ..head("hang")
        };
        let request = encode_request(&head, &[0xc0]).unwrap();
        frame(FrameKind::Request, stream, &request)
    };
    for stream in 1..=40 {
        peer.send_bytes(&swollen(stream)).await;
        let refused = peer.expect(FrameKind::Error).await;
        let error: WireError = decode_payload(&refused.payload).unwrap();
        assert_eq!(error.kind, ErrorKind::InvalidArgument);
    }
    // Bodies count four times until their stream ends; three of these fit.
    let body = encode_payload(&bytes::Bytes::from(vec![1; 10 << 20])).unwrap();
    let bulky = encode_request(&head("take"), &body).unwrap();
    let taking = |_: bytes::Bytes, _ctx: RequestContext| {
        streaming(stream::iter([Ok(0u32)]).chain(stream::pending()))
    };
    let _taking = serve(&*victim.pair.callee, &name("take"), 1, taking).await;
    let (mut taken, mut refused) = (Vec::new(), 0);
    for stream in 101..=110 {
        peer.send_frame(FrameKind::Request, stream, &bulky).await;
        let answer = peer.next().await.unwrap();
        if answer.kind == FrameKind::Item {
            taken.push(stream);
            continue;
        }
        let error: WireError = decode_payload(&answer.payload).unwrap();
        assert_eq!(error.kind, ErrorKind::Overloaded, "{}", error.message);
        refused += 1;
    }
    assert_eq!((taken.len(), refused), (3, 7));
    for stream in taken {
        peer.send(FrameKind::Cancel, stream, &cancel(true)).await;
    }
    let left = "genset_wire_memory_bytes 4";
    until(|| victim.metrics.encode().contains(left)).await;
    peer.send_frame(FrameKind::Request, 200, &bulky).await;
    assert_eq!(peer.expect(FrameKind::Item).await.stream, 200);
    victim.is_well().await;
}

/// A nil is one byte on the wire, and may be a JSON value in memory.
#[tokio::test]
async fn a_request_counts_by_what_it_becomes() {
    const VALUES: usize = 4 << 20;
    let (mut victim, mut peer) = Victim::and_peer(WireConfig {
        max_connection_memory_bytes: 128 << 20,
        ..deaf()
    })
    .await;
    let nils = encode_payload(&BTreeMap::from([("annotations", vec![(); VALUES])])).unwrap();
    let tokens = BTreeMap::from([("tokens", vec![1; VALUES])]);
    let tokens = encode_payload(&BTreeMap::from([("input", tokens)])).unwrap();
    // The endpoint accepts neither; the first is not even decoded.
    for (stream, body, kind) in [
        (1, nils, ErrorKind::Overloaded),
        (2, tokens, ErrorKind::InvalidArgument),
    ] {
        let request = encode_request(&head("hang"), &body).unwrap();
        peer.send_frame(FrameKind::Request, stream, &request).await;
        let refused = peer.expect(FrameKind::Error).await;
        let error: WireError = decode_payload(&refused.payload).unwrap();
        assert_eq!(error.kind, kind, "{}", error.message);
    }
    victim.is_well().await;
}

#[tokio::test]
async fn streams_over_the_limit_are_overloaded_and_those_open_stay() {
    let (mut victim, mut peer) = Victim::and_peer(WireConfig {
        max_streams: 10,
        ..deaf()
    })
    .await;
    for stream in 1..=1000 {
        peer.request(stream, "hang", 1).await;
    }
    let (mut items, mut refused) = (0, 0);
    while items < 10 || refused < 990 {
        let frame = peer.next().await.unwrap();
        if frame.kind == FrameKind::Item {
            items += 1;
        } else {
            assert_eq!(frame.kind, FrameKind::Error);
            let error: WireError = decode_payload(&frame.payload).unwrap();
            assert_eq!(error.kind, ErrorKind::Overloaded);
            refused += 1;
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
        ..deaf()
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
        // Its place becomes free a moment after it was counted.
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

/// Strangers that only connect take places of their own, and the oldest is evicted: callers get through.
#[tokio::test]
async fn strangers_keep_no_caller_out() {
    let mut victim = Victim::start(WireConfig {
        max_connections: 3,
        max_strangers: 4,
        max_strangers_of_address: 4,
        connect_timeout: Duration::from_secs(30),
        ..deaf()
    })
    .await;
    let mut strangers = Vec::new();
    for _ in 0..20 {
        strangers.push(Peer::dial(victim.process()).await);
    }
    victim.counts("refused", "too_many_strangers", 16).await;
    let mut caller = Peer::greeted_by(victim.process()).await;
    caller.request(1, "hang", 1).await;
    caller.expect(FrameKind::Item).await;
    assert!(strangers[0].bytes_to_the_end().await.is_empty());
    victim.is_well().await;
}

/// Cancels and credits need no responses: a flood of them delays no other connection.
#[tokio::test]
async fn a_flood_of_cancels_and_credits_delays_nobody() {
    let (mut victim, mut peer) = Victim::and_peer(deaf()).await;
    let cancel = encode_payload(&cancel(true)).unwrap();
    let credit = encode_payload(&genset_wire::Credit { items: 1 }).unwrap();
    let mut flood = Vec::new();
    for stream in 1..=10_000 {
        flood.extend(frame(FrameKind::Cancel, stream, &cancel));
        flood.extend(frame(FrameKind::Credit, stream, &credit));
    }
    for _ in 0..5 {
        peer.send_bytes(&flood).await;
        victim.is_well().await;
    }
    peer.request(1, "hang", 1).await;
    peer.expect(FrameKind::Item).await;
}
