//! Signals: a drain finishes what is under way, a deadline or a second signal cuts it short, and the exit code says which.

use std::net::TcpListener;

use rustix::process::Signal;
use tokio::task::JoinSet;

use crate::support::{Exchange, Server, done_events, events_of, finish_reason, soon};

const STREAMS: usize = 50;

/// Opens `count` streams; every one has begun to answer.
async fn open_streams(server: &Server, count: usize, max_tokens: u32) -> Vec<(Exchange, String)> {
    let mut streams = Vec::new();
    for _ in 0..count {
        let mut stream = server.stream(max_tokens).await;
        assert_eq!(stream.status, 200);
        let first = stream.first_piece().await;
        streams.push((stream, first));
    }
    streams
}

/// Everything that each stream said, read at the same time.
async fn read_all(streams: Vec<(Exchange, String)>) -> Vec<String> {
    let mut readers = JoinSet::new();
    for (mut stream, first) in streams {
        readers.spawn(async move { first + &stream.rest().await });
    }
    readers.join_all().await
}

/// Waits until the server has taken the signal.
async fn until_draining(server: &Server) {
    soon(async { while server.get("/health").await.status != 503 {} }).await;
}

#[tokio::test]
async fn sigterm_finishes_fifty_open_streams() {
    let mut server = Server::start(&["out=sample", "--token-delay-ms", "30"]).await;
    let streams = open_streams(&server, STREAMS, 100).await;
    server.signal(Signal::TERM);
    until_draining(&server).await;

    let refused = server.stream(1).await.response().await;
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert!(
        refused.head.contains("retry-after: 1\r\n"),
        "{}",
        refused.head
    );

    let read = read_all(streams).await;
    let finished = read
        .iter()
        .filter(|stream| finish_reason(&done_events(stream)) == Some("length"));
    assert_eq!(finished.count(), STREAMS);
    assert_eq!(server.exit_code().await, Some(0), "{}", server.log());
}

#[tokio::test]
async fn the_grace_deadline_ends_streams_with_a_retryable_error() {
    let mut words = vec!["out=sample", "--token-delay-ms", "30"];
    words.extend(["--grace", "0.3", "--migration-wait", "100"]);
    let mut server = Server::start(&words).await;
    let streams = open_streams(&server, 5, 10_000).await;
    server.signal(Signal::TERM);
    for stream in read_all(streams).await {
        let events = events_of(&stream);
        let error = &events.last().unwrap()["error"];
        assert_eq!(error["type"], "server_error", "{error}");
        assert!(error["message"].as_str().unwrap().contains("send it again"));
        assert_eq!(finish_reason(&events), None);
    }
    assert_eq!(server.exit_code().await, Some(3), "{}", server.log());
}

#[tokio::test]
async fn a_second_signal_ends_streams_at_once() {
    // Nobody in this process could take them over, so they do not wait for it.
    let mut words = vec!["out=sample", "--token-delay-ms", "30"];
    words.extend(["--grace", "100000", "--migration-wait", "100"]);
    for second in [Signal::TERM, Signal::INT] {
        let mut server = Server::start(&words).await;
        let streams = open_streams(&server, 2, 10_000).await;
        server.signal(Signal::TERM);
        until_draining(&server).await;
        server.signal(second);
        for stream in read_all(streams).await {
            assert!(!events_of(&stream).last().unwrap()["error"].is_null());
        }
        assert_eq!(server.exit_code().await, Some(3), "{}", server.log());
    }
}

#[tokio::test]
async fn sigint_stops_an_idle_server_cleanly() {
    let mut server = Server::start(&[]).await;
    server.signal(Signal::INT);
    assert_eq!(server.exit_code().await, Some(0), "{}", server.log());
    // The port is free again.
    TcpListener::bind(server.address).unwrap();
}

#[tokio::test]
async fn a_client_that_leaves_does_not_hold_the_drain_up() {
    let words = ["out=sample", "--token-delay-ms", "30", "--grace", "100000"];
    let mut server = Server::start(&words).await;
    drop(open_streams(&server, 3, 10_000).await);
    server.signal(Signal::TERM);
    assert_eq!(server.exit_code().await, Some(0), "{}", server.log());
}
