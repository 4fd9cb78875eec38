//! Peers on a worker's port that are not its callers: refused in the handshake, counted, and harmless to others.

use std::time::Duration;

use bytes::Bytes;
use genset_runtime::plane::{WireConfig, WireSecret};
use genset_wire::{Auth, FrameKind, GoAwayCode, Hello, decode_payload, encode_payload};
use serde::Serialize;

use super::log::Log;
use super::scripted::{FOUR_GIGABYTES, Peer, frame, hello};
use super::victim::Victim;
use crate::plane::deaf;

#[tokio::test]
async fn other_protocols_are_refused_and_told_nothing() {
    let mut victim = Victim::start(deaf()).await;
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
    let mut victim = Victim::start(deaf()).await;
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
        ..deaf()
    })
    .await;
    let mut silent = Peer::dial(victim.process()).await;
    let mut slow = Peer::dial(victim.process()).await;
    slow.send_bytes(&[0, 0, 0, 40, 0, 0]).await;
    let mut chatty = Peer::dial(victim.process()).await;
    chatty.send_frame(FrameKind::Unknown(200), 0, b"?").await;
    for peer in [&mut silent, &mut slow, &mut chatty] {
        assert!(peer.bytes_to_the_end().await.is_empty());
    }
    victim.counts("refused", "timeout", 3).await;
    victim.is_well().await;
}

#[tokio::test]
async fn another_version_is_refused_and_told_which_there_are() {
    let mut victim = Victim::start(deaf()).await;
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

/// A peer one version ahead: it also speaks our version and sends extra fields, and is served.
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
    let victim = Victim::start(deaf()).await;
    let mut peer = Peer::dial(victim.process()).await;
    peer.send_frame(FrameKind::Unknown(60), 0, b"a greeting of tomorrow")
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

    peer.send_frame(FrameKind::Unknown(77), 5, &[0xc1; 300])
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
    // Flags to which a later version gives a meaning.
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
    let mut victim = Victim::start(deaf()).await;
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
        ..deaf()
    })
    .await;
    let claims = |nonce: &'static [u8]| Hello {
        has_secret: true,
        nonce: Bytes::from_static(nonce),
        ..hello()
    };
    // No secret; a nonce too short for a proof; a wrong proof; an empty proof; and a request instead of a proof.
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

/// Each kind of refusal is logged once, however often it occurs.
#[tokio::test]
async fn strangers_do_not_fill_the_log() {
    let log = Log::watched();
    let mut victim = Victim::start(deaf()).await;
    let before = log.lines();
    for times in 1..=100 {
        let mut http = Peer::dial(victim.process()).await;
        http.send_bytes(b"GET / HTTP/1.1\r\n\r\n").await;
        assert!(http.bytes_to_the_end().await.is_empty());
        drop(Peer::dial(victim.process()).await);
        let mut rude = Peer::greeted_by(victim.process()).await;
        rude.request(1, "nothing", 1).await;
        rude.expect(FrameKind::Error).await;
        rude.send_frame(FrameKind::End, 1, &[]).await;
        assert!(rude.told_at_the_end().await.is_some());
        victim.counts("ended_connections", "protocol", times).await;
    }
    victim.counts("refused", "not_our_protocol", 100).await;
    victim.counts("refused", "closed", 100).await;
    victim.counts("refused", "cannot_connect", 100).await;
    assert_eq!(log.lines() - before, 4);
    victim.is_well().await;
}
