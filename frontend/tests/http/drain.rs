//! Draining and shutdown: running requests finish, new ones are refused, and nothing is left.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::client::{get, post, soon};
use crate::script::Script;
use crate::support::{CHAT, COMPLETIONS, Site, chat, completion, eventually};

/// An engine that sends one token, and finishes once it is given a permit.
fn gated() -> (Arc<Script>, Arc<Semaphore>) {
    Script::gated(vec![100], vec![101])
}

#[tokio::test]
async fn draining_finishes_what_runs_and_refuses_what_comes() {
    let (engine, gate) = gated();
    let site = Site::start(engine.clone()).await;
    let body = chat("Hello", json!({"stream": true}));
    let mut running = site.begin(CHAT, &body).await;
    running.head("POST").await.expect("a head");
    running.event().await.expect("the role");
    let body = completion("Hello", json!({}));
    let mut whole = site.begin(COMPLETIONS, &body).await;
    eventually("both run", || engine.active() == 2).await;

    site.server.drain();
    for path in ["/health", "/ready"] {
        let response = site.get(path).await;
        assert_eq!(response.status, 503);
        assert_eq!(response.json()["status"], "draining");
    }
    assert_eq!(site.get("/live").await.status, 200);
    assert_eq!(site.get("/v1/models").await.status, 200);
    for body in [json!({}), json!({"stream": true})] {
        let response = site.post(CHAT, &chat("Hello", body)).await;
        assert_eq!(response.status, 503);
        assert_eq!(response.header("retry-after"), Some("1"));
        assert_eq!(response.json()["error"]["type"], "server_error");
    }

    gate.add_permits(2);
    let mut last = None;
    while let Some(event) = running.event().await {
        last = Some(event);
    }
    assert_eq!(last.as_deref(), Some("[DONE]"));
    assert_eq!(whole.response().await.status, 200);
    site.idle().await;
    site.close().await;
}

/// Clients that keep their connections send the next request, or the same one again, on another, which need not lead here.
#[tokio::test]
async fn while_it_drains_each_answer_is_the_last_of_its_connection() {
    let (engine, gate) = gated();
    let site = Site::start(engine.clone()).await;
    let mut kept = site.connect().await;
    kept.send(get("/live")).await;
    let before = kept.response().await;
    assert_eq!(before.header("connection"), None);
    let mut running = site.begin(CHAT, &chat("Hello", json!({}))).await;
    eventually("it runs", || engine.active() == 1).await;
    site.server.drain();
    kept.send(post(CHAT, chat("Hello", json!({})).to_string()))
        .await;
    gate.add_permits(1);
    for (client, status) in [(&mut kept, 503), (&mut running, 200)] {
        let answer = client.response().await;
        assert_eq!(answer.status, status);
        assert_eq!(answer.header("connection"), Some("close"));
        assert!(client.is_closed().await);
    }
    site.close().await;
}

/// Clients that keep sending requests do not delay a drain.
#[tokio::test]
async fn what_is_refused_while_draining_is_not_waited_for() {
    let (engine, gate) = gated();
    let site = Site::start(engine.clone()).await;
    let mut running = site.connect().await;
    let request = post(CHAT, chat("Hello", json!({})).to_string());
    running.send(&request).await;
    eventually("it runs", || engine.active() == 1).await;
    site.server.drain();
    let mut late = site.connect().await;
    late.send(&request[..request.len() - 1]).await;
    let in_flight = || site.metric("genset_http_requests_in_flight");
    eventually("both are in flight", || in_flight() == 2.0).await;
    assert!(site.server.idle().now_or_never().is_none());
    gate.add_permits(1);
    soon(site.server.idle()).await;
    assert_eq!(running.response().await.status, 200);
    late.send(&request[request.len() - 1..]).await;
    assert_eq!(late.response().await.status, 503);
    site.close().await;
}

#[tokio::test]
async fn shutdown_waits_for_running_answers() {
    let (engine, gate) = gated();
    let site = Site::start(engine.clone()).await;
    let address = site.server.address();
    let mut idle = site.connect().await;
    idle.send(get("/live")).await;
    idle.response().await;
    let body = chat("Hello", json!({"stream": true}));
    let mut running = site.begin(CHAT, &body).await;
    eventually("it runs", || engine.active() == 1).await;
    let shutdown = site.server.shutdown(Duration::from_secs(60));
    let client = async {
        assert!(
            idle.is_closed().await,
            "an idle connection is closed at once"
        );
        gate.add_permits(1);
        let events = running.response().await.events();
        assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
        assert!(running.is_closed().await);
    };
    soon(async { tokio::join!(shutdown, client) }).await;
    assert!(TcpStream::connect(address).await.is_err());
    site.close().await;
}

#[tokio::test]
async fn shutdown_drops_what_outlasts_its_grace() {
    let engine = Script::silent(100);
    let site = Site::start(engine.clone()).await;
    let mut clients = Vec::new();
    for further in [json!({}), json!({"stream": true}), json!({"n": 2})] {
        clients.push(site.begin(CHAT, &chat("Hello", further)).await);
    }
    eventually("they run", || engine.active() == 4).await;
    soon(site.server.shutdown(Duration::from_millis(1))).await;
    assert_eq!(engine.active(), 0);
    assert_eq!(site.metric("genset_http_connections"), 0.0);
    assert_eq!(site.metric("genset_http_requests_in_flight"), 0.0);
    site.close().await;
}

#[tokio::test]
async fn what_is_cut_short_ends_with_an_error_that_says_so() {
    let engine = Script::silent(100);
    let site = Site::start(engine.clone()).await;
    let body = chat("Hello", json!({"stream": true}));
    let mut streamed = site.begin(CHAT, &body).await;
    streamed.head("POST").await.expect("a head");
    streamed.event().await.expect("the role");
    let mut whole = site.begin(CHAT, &chat("Hello", json!({}))).await;
    eventually("both run", || engine.active() == 2).await;

    site.server.cut_short();
    let mut last = None;
    while let Some(event) = soon(streamed.event()).await {
        last = Some(event);
    }
    let last = last.expect("an error event");
    assert!(last.contains("send it again"), "{last}");
    let whole = whole.response().await;
    assert_eq!(whole.status, 503);
    assert!(whole.text().contains("send it again"), "{}", whole.text());
    assert!(soon(site.server.shutdown(Duration::from_secs(60))).await);
    site.close().await;
}

/// Once, twice, and before any request.
#[tokio::test]
async fn shutdown_may_be_repeated() {
    let site = Site::start(Script::silent(100)).await;
    soon(site.server.shutdown(Duration::ZERO)).await;
    soon(site.server.shutdown(Duration::from_secs(60))).await;
    site.close().await;
}
