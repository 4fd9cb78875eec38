//! Streams that are silent for long: signs of life keep proxies from closing their connections.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::output::Finish;
use genset_backend_common::{EngineError, RequestField};
use genset_frontend::FrontendConfig;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::client::Client;
use crate::messages::{MESSAGES, message};
use crate::responses::{RESPONSES, asked};
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, Site, chat, completion, config, eventually, worker_config,
};
use crate::whole_bodies::reading;

const COMMENT: &str = ": keep-alive\n\n";

const PING: &str = "event: ping\ndata: {\"type\":\"ping\"}\n\n";

/// A site whose Worker runs one request at a time.
async fn site(engine: Arc<Script>) -> Site {
    let config = FrontendConfig {
        stream_keep_alive: Duration::from_millis(20),
        ..config()
    };
    let mut worker = worker_config();
    worker.limits.max_running = 1;
    Site::with_worker(config, worker, engine).await
}

/// A streamed request.
struct Streamed {
    path: &'static str,
    body: Value,
    /// What keeps its stream alive.
    sign: &'static str,
    /// How often that is among its first events.
    at_start: usize,
    /// Its last event.
    last: &'static str,
}

impl Streamed {
    /// A request of each API.
    fn all() -> [Self; 4] {
        let further = || json!({"stream": true});
        let new = |path, body, last| Self {
            path,
            body,
            sign: COMMENT,
            at_start: 0,
            last,
        };
        [
            new(CHAT, chat("Hello", further()), "data: [DONE]\n"),
            new(
                COMPLETIONS,
                completion("Hello", further()),
                "data: [DONE]\n",
            ),
            new(
                RESPONSES,
                asked("Hello", further()),
                "event: response.completed\n",
            ),
            Self {
                sign: PING,
                at_start: 1,
                ..new(
                    MESSAGES,
                    message("Hello", further()),
                    "event: message_stop\n",
                )
            },
        ]
    }
}

/// Reads a stream until it has `sign` more than `times` times. Returns its text so far.
async fn signs(client: &mut Client, sign: &str, times: usize) -> String {
    let mut text = String::new();
    while text.matches(sign).count() <= times {
        let piece = client.piece().await.expect("it goes on");
        text += std::str::from_utf8(&piece).expect("text");
    }
    text
}

/// Reads the rest of a stream.
async fn rest(client: &mut Client) -> String {
    let mut text = String::new();
    while let Some(piece) = client.piece().await {
        text += std::str::from_utf8(&piece).expect("text");
    }
    text
}

#[tokio::test]
async fn a_silent_stream_shows_signs_of_life_between_its_events() {
    let (engine, gate) = Script::gated(vec![100], vec![101]);
    let site = site(engine).await;
    for asked in Streamed::all() {
        let Streamed {
            path,
            body,
            sign,
            at_start,
            last,
        } = asked;
        let mut client = site.begin(path, &body).await;
        let head = client.head("POST").await.expect("a head");
        assert_eq!(head.header("x-accel-buffering"), Some("no"), "{path}");
        let mut text = signs(&mut client, sign, at_start + 1).await;
        gate.add_permits(1);
        text += &rest(&mut client).await;
        assert!(text.contains(last), "{path}: {text}");
        for event in text.replace(COMMENT, "").split_terminator("\n\n") {
            let is_event = event.starts_with("data: ") || event.starts_with("event: ");
            assert!(is_event, "{path}: {event:?} in {text}");
        }
    }
    site.close().await;
}

#[tokio::test]
async fn a_stream_begins_before_the_engine_has_accepted_its_request() {
    let (engine, gate) = Script::gated(vec![100], vec![101]);
    let site = site(engine.clone()).await;
    let refusal = EngineError::invalid_argument(RequestField::Prompt, "is not to its taste");
    for asked in Streamed::all() {
        let Streamed {
            path,
            body,
            sign,
            at_start,
            ..
        } = asked;
        engine.refuse(None);
        eventually("nothing runs", || engine.active() == 0).await;
        let mut first = site.begin(path, &body).await;
        eventually("it runs", || engine.active() == 1).await;
        let mut second = site.begin(path, &body).await;
        let head = second.head("POST").await.expect("a head");
        assert_eq!(head.status, 200, "{path}");
        let begun = signs(&mut second, sign, at_start).await;
        assert_eq!(engine.active(), 1, "{path}");
        engine.refuse(Some(refusal.clone()));
        gate.add_permits(1);
        let ended = rest(&mut second).await;
        assert!(
            ended.contains("is not to its taste"),
            "{path}: {begun}{ended}"
        );
        assert_eq!(first.response().await.status, 200, "{path}");
    }
    site.idle().await;
    site.close().await;
}

#[tokio::test]
async fn a_stream_begins_while_its_request_waits_for_a_place() {
    let (engine, gate) = Script::gated(vec![100], vec![101]);
    let config = FrontendConfig {
        stream_keep_alive: Duration::from_millis(20),
        max_model_running_requests: NonZeroUsize::MIN,
        ..config()
    };
    let site = Site::with(config, engine.clone()).await;
    for asked in Streamed::all() {
        let Streamed {
            path, body, last, ..
        } = asked;
        let mut first = site.begin(path, &body).await;
        eventually("it runs", || engine.active() == 1).await;
        let mut second = site.begin(path, &body).await;
        let head = second.head("POST").await.expect("a head");
        assert_eq!(head.status, 200, "{path}");
        let begun = signs(&mut second, COMMENT, 1).await;
        assert_eq!(begun.replace(COMMENT, ""), "", "{path}");
        assert_eq!(engine.active(), 1, "{path}");
        gate.add_permits(2);
        let ended = rest(&mut second).await;
        assert!(ended.contains(last), "{path}: {begun}{ended}");
        assert_eq!(first.response().await.status, 200, "{path}");
        site.idle().await;
    }
    site.close().await;
}

#[tokio::test]
async fn streams_that_the_engine_writes_itself_are_kept_alive() {
    let gate = Arc::new(Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let engine = reading(Script::new(move |_, out| {
        let gate = Arc::clone(&opened);
        async move {
            gate.acquire().await.expect("open").forget();
            out.text(json!({"object": "its own"}).to_string(), 1)
                .await?;
            Ok(Finish::stop())
        }
    }));
    let site = site(engine.clone()).await;
    let body = chat("Hello", json!({"stream": true}));
    let mut clients = [site.begin(CHAT, &body).await, site.begin(CHAT, &body).await];
    for client in &mut clients {
        client.head("POST").await.expect("a head");
        signs(client, COMMENT, 0).await;
    }
    assert_eq!(engine.active(), 1, "the other one waits");
    gate.add_permits(2);
    for client in &mut clients {
        let ended = rest(client).await;
        assert!(ended.ends_with("data: [DONE]\n\n"), "{ended}");
    }
    site.close().await;
}
