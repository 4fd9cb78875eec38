//! The memory of all requests together: large ones are refused before they take everybody else's memory, small ones last.

use std::time::Duration;

use genset_frontend::model::Models;
use genset_frontend::{FrontendConfig, LocalFrontend};
use genset_runtime::Runtime;
use serde_json::{Value, json};

use crate::client::{Client, post, soon};
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, Site, chat, completion, config, echo, encode, eventually, metric,
    start_worker, with_template, worker_config,
};

const BUDGET_BYTES: usize = 16 << 20;

/// A body of this size, most of it padding.
fn padded(bytes: usize) -> String {
    let mut body = chat("Hello", json!({})).to_string();
    body += &" ".repeat(bytes - body.len());
    body
}

async fn site() -> Site {
    let config = FrontendConfig {
        memory_budget_bytes: BUDGET_BYTES,
        max_stored_bytes: 0,
        ..config()
    };
    Site::with(config, echo()).await
}

/// A client that announced a body of `bytes` and sent all but the last `missing` bytes.
async fn holder(site: &Site, bytes: usize, missing: usize) -> Client {
    let request = post(CHAT, padded(bytes));
    let mut client = site.connect().await;
    client
        .send(request.get(..request.len() - missing).expect("a request"))
        .await;
    client
}

async fn holds(site: &Site, bytes: usize) {
    eventually("what was sent is counted", || {
        site.metric("genset_http_memory_used_bytes") >= bytes as f64
    })
    .await;
}

#[tokio::test]
async fn large_bodies_are_refused_where_there_is_no_room_and_small_ones_are_not() {
    let site = site().await;
    assert_eq!(
        site.metric("genset_http_memory_budget_bytes"),
        BUDGET_BYTES as f64
    );
    let mut announced = Vec::new();
    for _ in 0..50 {
        announced.push(holder(&site, 10 << 20, 10 << 20).await);
    }
    let mut holder = holder(&site, 10 << 20, 1).await;
    holds(&site, 10 << 20).await;
    let second = post(CHAT, padded(6 << 20));
    let response = site.send(&second).await;
    let (status, _, _, message) = response.refusal();
    assert_eq!(status, 503, "{message}");
    assert!(message.contains("16777216 bytes"), "{message}");
    assert_eq!(response.header("retry-after"), Some("1"));
    assert!(site.metric("genset_http_memory_refusals_total") >= 1.0);
    site.is_well().await;
    holder.send(" ").await;
    assert_eq!(holder.response().await.status, 200);
    assert_eq!(site.send(&second).await.status, 200);
    let never = site.send(post(CHAT, padded(15 << 20))).await;
    let (status, _, _, message) = never.refusal();
    assert_eq!(status, 413, "{message}");
    assert!(message.contains("--memory-budget"), "{message}");
    drop((holder, announced));
    site.idle().await;
    assert_eq!(site.metric("genset_http_memory_used_bytes"), 0.0);
    site.close().await;
}

#[tokio::test]
async fn an_answer_to_the_program_itself_holds_its_room_until_it_is_dropped() {
    let runtime = Runtime::in_process();
    let metrics = runtime.metrics().clone();
    let worker = start_worker(&runtime, 1, echo(), worker_config(), metrics).await;
    let models = Models::follow(&runtime, &config());
    soon(models.any()).await.expect("a model");
    let routes = LocalFrontend::new(&runtime, models.clone(), config());
    let used = || -> usize {
        let text = runtime.metrics().encode();
        metric(&text, "genset_http_memory_used_bytes").expect("a metric")
    };
    let asked = chat("Hello there", json!({})).to_string();
    let answer = routes.post(CHAT, asked).await.expect("an answer");
    let json: Value = serde_json::from_slice(&answer.body).expect("JSON");
    assert_eq!(json["object"], "chat.completion", "{json}");
    assert_eq!(used(), answer.body.len());
    drop(answer);
    assert_eq!(used(), 0);
    soon(models.shutdown()).await;
    soon(worker.shutdown()).await;
    soon(runtime.shutdown()).await;
}

/// Advances the server's clock while nothing else happens.
pub(crate) async fn later(seconds: u64) {
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(seconds)).await;
    tokio::time::resume();
}

#[tokio::test]
async fn a_large_body_that_stalls_gives_its_room_up_when_memory_is_short() {
    let site = site().await;
    let mut holder = holder(&site, 10 << 20, 1 << 20).await;
    holds(&site, 9 << 20).await;
    let second = post(CHAT, padded(6 << 20));
    assert_eq!(site.send(&second).await.status, 503);
    site.is_well().await;
    // The first part arrived fast enough.
    later(5).await;
    site.is_well().await;
    later(5).await;
    let given_up = holder.response().await;
    assert_eq!(given_up.status, 408, "{}", given_up.text());
    assert_eq!(site.send(&second).await.status, 200);
    site.idle().await;
    site.close().await;
}

#[tokio::test]
async fn a_body_may_come_slowly_while_there_is_room() {
    let site = site().await;
    let mut large = holder(&site, 7 << 20, 1).await;
    holds(&site, 7 << 20).await;
    let mut small = holder(&site, 64 << 10, 1).await;
    for _ in 0..4 {
        later(5).await;
        site.is_well().await;
    }
    for client in [&mut large, &mut small] {
        client.send(" ").await;
        assert_eq!(client.response().await.status, 200);
    }
    drop((large, small));
    site.idle().await;
    site.close().await;
}

/// A schema may be all of a request: it is kept until the last answer has ended.
#[tokio::test]
async fn what_binds_an_answer_holds_its_room_as_long_as_the_answer() {
    const BYTES: usize = 1 << 20;
    let schema = json!({"type": "object", "description": "a".repeat(BYTES)});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
    let guided = json!({"guided_json": schema, "stream": true});
    let required = json!({"tools": [tool], "tool_choice": "required", "stream": true});
    let bodies = [
        (CHAT, chat("Hi", guided.clone()), BYTES),
        (COMPLETIONS, completion("Hi", guided), BYTES),
        // The parser of the calls has a copy.
        (CHAT, chat("Hi", required), 2 * BYTES),
    ];
    let (engine, _gate) = Script::gated(encode("{"), encode("}"));
    // A template that shows no tools.
    let worker = with_template(worker_config(), "{{ messages[0].content }}");
    let site = Site::with_worker(config(), worker, engine.declaring_guided()).await;
    for (path, body, bytes) in bodies {
        let mut client = site.begin(path, &body).await;
        assert_eq!(client.head("POST").await.expect("an answer").status, 200);
        client.event().await.expect("an event");
        let used = site.metric("genset_http_memory_used_bytes");
        let held = bytes as f64;
        assert!((held..held + 200_000.0).contains(&used), "{path}: {used}");
        drop(client);
        site.idle().await;
        assert_eq!(site.metric("genset_http_memory_used_bytes"), 0.0);
    }
    site.close().await;
}
