//! Models whose engines parse the bodies of chats and completions themselves.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::Capabilities;
use genset_backend_common::output::Finish;
use serde_json::{Value, json};

use crate::client::{Client, Response, post, soon};
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, MODEL, Site, chat, completion, config, encode, eventually, start_worker,
    worker_config,
};

/// An engine that parses bodies itself, and answers each with its own object.
pub(crate) fn reader() -> Arc<Script> {
    reading(Script::new(|_, out| async move {
        out.text(json!({"object": "its own"}).to_string(), 1)
            .await?;
        Ok(Finish::stop())
    }))
}

/// Turns the engine into one that parses bodies itself.
pub(crate) fn reading(engine: Arc<Script>) -> Arc<Script> {
    engine.declaring(|can| {
        *can = Capabilities {
            whole_bodies: true,
            ..Capabilities::text()
        };
    })
}

/// Returns the answers to requests sent while the model's last worker was away; the next worker's engine is `back`.
async fn asked_while_away(
    first: Arc<Script>,
    back: Arc<Script>,
    requests: &[(&str, Value)],
) -> Vec<Response> {
    let mut waits_long = config();
    waits_long.router.migration.wait = Duration::from_secs(60);
    let mut site = Site::with(waits_long, first).await;
    site.worker.stop_once();
    eventually("the model is gone", || {
        site.server.models().get(MODEL).is_none()
    })
    .await;
    let mut waiting = Vec::new();
    for (path, body) in requests {
        let mut client = Client::connect(site.server.address()).await;
        client.send(post(path, body.to_string())).await;
        waiting.push(client);
    }
    let in_flight = || site.metric("genset_http_requests_in_flight");
    let all = requests.iter().map(|_| 1.0).sum::<f64>();
    eventually("all wait", || in_flight() >= all).await;
    let metrics = Default::default();
    site.worker = start_worker(&site.runtime, 2, back, worker_config(), metrics).await;
    let mut answers = Vec::new();
    for mut client in waiting {
        answers.push(soon(client.response()).await);
    }
    site.close().await;
    answers
}

#[tokio::test]
async fn a_body_waits_for_the_engine_that_reads_it() {
    let its_own = json!({"a_field_of_its_own": 1});
    let requests = [
        (CHAT, chat("Hello", json!({}))),
        (CHAT, chat("Hello", its_own.clone())),
        (COMPLETIONS, completion("Hello", json!({}))),
        (COMPLETIONS, completion("Hello", its_own)),
    ];
    for answer in asked_while_away(reader(), reader(), &requests).await {
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json(), json!({"object": "its own"}));
    }
}

#[tokio::test]
async fn a_body_that_waited_is_read_here_where_its_engine_does_not() {
    let requests = [
        (CHAT, chat("Hello", json!({}))),
        (CHAT, chat("Hello", json!({"a_field_of_its_own": 1}))),
    ];
    let engine = || Script::tokens(encode("one"));
    let answers = asked_while_away(engine(), engine(), &requests).await;
    let [good, unknown] = &answers[..] else {
        panic!("{answers:?}")
    };
    assert_eq!(good.content(), "one");
    let (status, param, ..) = unknown.refusal();
    let expected = (400, Some("a_field_of_its_own"));
    assert_eq!((status, param.as_deref()), expected);
}

#[tokio::test]
async fn a_body_is_read_before_its_model_is_looked_for_where_no_engine_reads_bodies() {
    let refused_beside = async |engine: Arc<Script>| {
        let site = Site::with(config(), engine).await;
        let nobodys = json!({"model": "nobody", "a_field_of_its_own": 1});
        let asked = chat("Hello", nobodys).to_string();
        let (status, ..) = site.send(post(CHAT, asked)).await.refusal();
        site.close().await;
        status
    };
    assert_eq!(refused_beside(Script::tokens(encode("one"))).await, 400);
    assert_eq!(refused_beside(reader()).await, 404);
}

#[tokio::test]
async fn a_body_that_waited_is_counted_until_it_is_read() {
    let mut waits_long = config();
    waits_long.router.migration.wait = Duration::from_secs(60);
    let mut site = Site::with(waits_long, Script::tokens(encode("one"))).await;
    site.worker.stop_once();
    eventually("the model is gone", || {
        site.server.models().get(MODEL).is_none()
    })
    .await;
    let asked = chat("Hello", json!({})).to_string() + &" ".repeat(1 << 20);
    let mut client = site.connect().await;
    client.send(post(CHAT, asked)).await;
    let is_counted = || site.metric("genset_http_memory_used_bytes") >= 1_048_576.0;
    eventually("it is counted", is_counted).await;
    let metrics = Default::default();
    let silent = Script::silent(5);
    site.worker = start_worker(&site.runtime, 2, silent, worker_config(), metrics).await;
    let is_counted = || site.metric("genset_http_memory_used_bytes") >= 1_048_576.0;
    eventually("it is read", || !is_counted()).await;
    let in_flight = || site.metric("genset_http_requests_in_flight");
    assert_eq!(in_flight(), 1.0);
    drop(client);
    eventually("it is given up", || in_flight() == 0.0).await;
    site.close().await;
}
