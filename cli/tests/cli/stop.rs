//! Signals: a drain finishes requests in progress, a deadline or a second signal cuts it short, and the exit code tells them
//! apart.

use std::net::TcpListener;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tokio::task::JoinSet;

use crate::fleet::Fleet;
use crate::support::{Exchange, Server, done_events, events_of, finish_reason, soon};

const STREAMS: usize = 50;

/// Opens `count` streams; returns when every one has begun to answer.
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

/// A stream that takes a minute: until it is dropped, a server that drains does not end, however slow the machine is.
async fn held_open(server: &Server) -> Vec<(Exchange, String)> {
    open_streams(server, 1, 10_000).await
}

/// Reads all streams to their ends, concurrently.
async fn read_all(streams: Vec<(Exchange, String)>) -> Vec<String> {
    let mut readers = JoinSet::new();
    for (mut stream, first) in streams {
        readers.spawn(async move { first + &stream.rest().await });
    }
    readers.join_all().await
}

/// Waits until the server has received the signal.
async fn until_draining(server: &Server) {
    soon(async { while server.get("/health").await.status != 503 {} }).await;
}

#[tokio::test]
async fn sigterm_finishes_fifty_open_streams() {
    let mut server = Server::start(&["out=sample", "--token-delay-ms", "30"]).await;
    let held = held_open(&server).await;
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

    drop(held);
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
    // No other worker in this process could take over the streams, so they do not wait for one.
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
        let log = server.log();
        for told in ["TERM: draining", ": stopping at once"] {
            assert_eq!(log.matches(told).count(), 1, "{told}: {log}");
        }
        assert_eq!(log.matches(": draining").count(), 1, "{log}");
    }
}

/// A server that has `action` for SIGHUP, whatever these tests were started with.
async fn with_hangup(action: &str) -> Server {
    let mut command = Command::new("env");
    command
        .args(["-i", &format!("--{action}-signal=HUP")])
        .arg(env!("CARGO_BIN_EXE_genset"))
        .args(["run", "in=http", "out=sample", "--http-port", "0"])
        .args(["--token-delay-ms", "30"])
        .kill_on_drop(true);
    Server::spawn(command).await
}

#[tokio::test]
async fn a_terminal_that_closes_drains_the_server() {
    let mut server = with_hangup("default").await;
    let held = held_open(&server).await;
    let streams = open_streams(&server, 2, 100).await;
    server.signal(Signal::HUP);
    until_draining(&server).await;
    // It may send several.
    server.signal(Signal::HUP);
    drop(held);
    for stream in read_all(streams).await {
        assert_eq!(finish_reason(&done_events(&stream)), Some("length"));
    }
    assert_eq!(server.exit_code().await, Some(0), "{}", server.log());
}

#[tokio::test]
async fn under_nohup_the_terminal_may_close() {
    let mut server = with_hangup("ignore").await;
    server.signal(Signal::HUP);
    server.signal(Signal::TERM);
    assert_eq!(server.exit_code().await, Some(0), "{}", server.log());
    assert!(!server.log().contains("SIGHUP"), "{}", server.log());
}

#[tokio::test]
async fn sigint_stops_an_idle_server_cleanly() {
    let mut server = Server::start(&[]).await;
    server.signal(Signal::INT);
    assert_eq!(server.exit_code().await, Some(0), "{}", server.log());
    // The port is free again.
    TcpListener::bind(server.address).unwrap();
}

/// A frontend for workers of other processes behaves like one with a worker in its process.
#[tokio::test]
async fn a_frontend_without_a_worker_refuses_in_words_while_it_drains() {
    let fleet = Fleet::new();
    let words = ["in=dyn", "out=sample", "--token-delay-ms", "30"];
    let worker = fleet.worker_of(&words, &[]).await;
    let mut frontend = fleet.frontend(&[]).await;
    let held = held_open(&frontend).await;
    let streams = open_streams(&frontend, 2, 20).await;
    frontend.signal(Signal::TERM);
    until_draining(&frontend).await;

    let refused = frontend.stream(1).await.response().await;
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert!(refused.head.contains("retry-after: 1\r\n"));
    drop(held);
    for stream in read_all(streams).await {
        assert_eq!(finish_reason(&done_events(&stream)), Some("length"));
    }
    assert_eq!(frontend.exit_code().await, Some(0), "{}", frontend.log());
    worker.stop().await;
}

#[tokio::test]
async fn a_client_that_leaves_does_not_hold_the_drain_up() {
    let words = ["out=sample", "--token-delay-ms", "30", "--grace", "100000"];
    let mut server = Server::start(&words).await;
    drop(open_streams(&server, 3, 10_000).await);
    server.signal(Signal::TERM);
    assert_eq!(server.exit_code().await, Some(0), "{}", server.log());
}

/// The system sends this signal to a process that writes beyond `ulimit -f`.
#[tokio::test]
async fn a_file_that_may_not_grow_does_not_end_the_server() {
    let server = Server::start(&[]).await;
    server.signal(Signal::XFSZ);
    assert_eq!(server.get("/health").await.status, 200);
    server.stop().await;
}

/// A command whose program has PID 1 in its own namespace, as in a container.
fn as_process_1(program: &str) -> Command {
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--pid", "--fork"])
        .args(["--kill-child", program])
        .env_clear()
        .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    command
}

#[tokio::test]
async fn a_signal_ends_process_1_while_it_fetches_a_model() {
    let tried = as_process_1("true").status().await;
    if !tried.is_ok_and(|status| status.success()) {
        assert!(std::env::var_os("CI").is_none(), "no namespaces here");
        eprintln!("skipped: no namespaces can be made here");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // It accepts the request and never answers.
    let hub = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", hub.local_addr().unwrap());
    for (words, signal, code) in [
        (&["pull", "org/model"][..], Signal::TERM, 143),
        (&["run", "in=http", "org/model"], Signal::INT, 130),
    ] {
        let mut command = as_process_1(env!("CARGO_BIN_EXE_genset"));
        command
            .args(words)
            .env("HF_HUB_CACHE", folder.path())
            .env("HF_ENDPOINT", &endpoint);
        let mut outer = command.spawn().unwrap();
        let _asked = soon(hub.accept()).await.unwrap();
        let id = outer.id().unwrap();
        let children = format!("/proc/{id}/task/{id}/children");
        let children = std::fs::read_to_string(children).unwrap();
        let inner = children.trim().parse().ok().and_then(Pid::from_raw);
        kill_process(inner.unwrap(), signal).unwrap();
        let ended = soon(outer.wait()).await.unwrap();
        assert_eq!(ended.code(), Some(code), "{words:?}");
    }
}
