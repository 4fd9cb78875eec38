//! Callers that greet properly and then break the protocol: they get the reason, are disconnected, and do no harm to others.

use genset_wire::{Credit, FrameKind, GoAwayCode, encode_payload};
use proptest::prelude::*;

use super::scripted::{FOUR_GIGABYTES, Peer, cancel, frame, hello, request};
use super::victim::Victim;
use crate::plane::{deaf, wary};
use crate::support::{soon, until};

#[tokio::test]
async fn breaking_the_protocol_ends_the_connection_and_says_why() {
    let credit = |items| encode_payload(&Credit { items }).unwrap();
    let again = frame(FrameKind::Request, 1, &request("hang", 5));
    let greeting = frame(FrameKind::Hello, 0, &encode_payload(&hello()).unwrap());
    let mut too_much_credit = frame(FrameKind::Credit, 1, &credit(1 << 20));
    too_much_credit.extend(frame(FrameKind::Credit, 1, &credit(u32::MAX)));
    let mut deep = request("generate", 1);
    deep.splice(0..0, vec![0x91; 200_000]);
    let crimes: Vec<(&str, Vec<u8>)> = vec![
        ("stream 1 was opened twice", again),
        (
            "stream 0",
            frame(FrameKind::Request, 0, &request("hang", 5)),
        ),
        ("Item from a caller", frame(FrameKind::Item, 1, &[0])),
        ("End from a caller", frame(FrameKind::End, 1, &[])),
        ("Error from a caller", frame(FrameKind::Error, 1, &[])),
        ("Hello after the handshake", greeting),
        ("Auth after the handshake", frame(FrameKind::Auth, 0, &[])),
        ("over the limit", FOUR_GIGABYTES.to_vec()),
        ("does not speak this protocol", vec![0; 4]),
        ("Request: ", frame(FrameKind::Request, 2, b"\xc1")),
        ("Request: ", frame(FrameKind::Request, 2, &deep)),
        ("Cancel: ", frame(FrameKind::Cancel, 1, b"no")),
        ("Credit: ", frame(FrameKind::Credit, 1, b"")),
        ("credit for more than", too_much_credit),
        ("Ping of 4097", frame(FrameKind::Ping, 0, &[0; 4097])),
        (
            "Credit of 100000 bytes",
            frame(FrameKind::Credit, 1, &[0; 100_000])[..10].to_vec(),
        ),
        ("decode", frame(FrameKind::GoAway, 0, b"bye")),
    ];
    let mut victim = Victim::start(deaf()).await;
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
    let (_victim, mut peer) = Victim::and_peer(deaf()).await;
    for stream in [0, 1, 99, u32::MAX] {
        peer.send(FrameKind::Credit, stream, &Credit { items: 3 })
            .await;
        peer.send(FrameKind::Cancel, stream, &cancel(stream % 2 == 0))
            .await;
    }
    peer.request(7, "hang", 1).await;
    assert_eq!(peer.expect(FrameKind::Item).await.stream, 7);
}

#[tokio::test]
async fn a_peer_that_stops_in_mid_frame_counts_as_dead() {
    let (mut victim, mut peer) = Victim::and_peer(wary()).await;
    let whole = frame(FrameKind::Request, 1, &request("hang", 5));
    peer.send_bytes(&whole[..whole.len() / 2]).await;
    assert!(soon(peer.told_without_pongs()).await.is_none());
    victim.counts("ended_connections", "silent", 1).await;
    victim.is_well().await;
}

/// The frames of an honest caller's conversation.
fn conversation() -> Vec<Vec<u8>> {
    let cancel = |discard| encode_payload(&cancel(discard)).unwrap();
    let credit = encode_payload(&Credit { items: 9 }).unwrap();
    vec![
        frame(FrameKind::Hello, 0, &encode_payload(&hello()).unwrap()),
        frame(FrameKind::Request, 1, &request("hang", 1)),
        frame(FrameKind::Credit, 1, &credit),
        frame(FrameKind::Request, 2, &request("nothing", 1)),
        frame(FrameKind::Cancel, 1, &cancel(false)),
        frame(FrameKind::Ping, 0, &[1, 2, 3]),
        frame(FrameKind::Cancel, 1, &cancel(true)),
    ]
}

/// A conversation with an error: garbage between its frames, or within one.
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

    /// Whatever the error, and wherever: the worker and its callers continue.
    #[test]
    fn garbage_anywhere_harms_nobody_else(conversations in proptest::collection::vec(gone_wrong(), 1..8)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut victim = Victim::start(deaf()).await;
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
