//! What an operator sees of requests: metrics, ids and traces, read as a scraper reads them.

use std::sync::Arc;

use genset_backend_common::output::Finish;
use genset_backend_common::worker::WorkerConfig;
use genset_frontend::FrontendConfig;
use serde_json::json;
use tokio::sync::Semaphore;

use crate::client::{post, request};
use crate::messages::VERSION;
use crate::script::Script;
use crate::support::{CHAT, Site, chat, config, echo, encode, eventually, metric, worker_config};

const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// The value of a line of `/metrics`.
async fn value(site: &Site, name: &str) -> f64 {
    let text = site.get("/metrics").await.text();
    metric(&text, name).unwrap_or_else(|| panic!("no {name} in {text}"))
}

/// Requests in every possible state, and their counts.
#[tokio::test]
async fn every_state_of_a_request_is_counted() {
    let gate = Arc::new(Semaphore::new(0));
    let opener = Arc::clone(&gate);
    let words = encode("one two three");
    let tokens = words.len();
    let engine = Script::new(move |_, out| {
        let (gate, words) = (Arc::clone(&gate), words.clone());
        async move {
            if let Ok(permit) = gate.acquire().await {
                permit.forget();
            }
            for token in words {
                out.token(token).await?;
            }
            Ok(Finish::stop().with_cached_tokens(5))
        }
    });
    // The worker runs one request, so a second one waits there.
    let mut narrow: WorkerConfig = worker_config();
    narrow.limits.max_running = 1;
    let site = Site::with_worker(config(), narrow, engine).await;
    let mut clients = Vec::new();
    for further in [json!({}), json!({"stream": true})] {
        clients.push(site.begin(CHAT, &chat("Hello", further)).await);
        let asked = clients.len();
        let count = f64::from(u32::try_from(asked).expect("few"));
        eventually("it is on its way", || {
            site.metric("genset_http_requests_in_flight") == count
                && site.metric("genset_http_answers_queued") == count
        })
        .await;
    }
    assert_eq!(value(&site, "genset_http_requests_in_flight").await, 2.0);
    assert_eq!(value(&site, "genset_http_answers_queued").await, 2.0);
    assert_eq!(value(&site, "genset_worker_waiting_requests").await, 1.0);
    let running = r#"genset_frontend_model_running_requests{model="tiny"}"#;
    assert_eq!(value(&site, running).await, 2.0);
    opener.add_permits(2);
    for client in &mut clients {
        assert_eq!(client.response().await.status, 200);
    }
    for (status, body) in [(400, "{}".to_owned()), (404, chat_of_nobody())] {
        assert_eq!(site.send(post(CHAT, body)).await.status, status);
    }
    site.idle().await;
    let prompt = value(&site, "genset_http_input_length_tokens_sum").await / 2.0;
    let tokens = f64::from(u32::try_from(tokens).expect("few"));
    for (name, expected) in [
        ("requests_in_flight", 0.0),
        ("answers_queued", 0.0),
        (
            r#"requests_total{endpoint="chat_completions",status="200"}"#,
            2.0,
        ),
        (
            r#"requests_total{endpoint="chat_completions",status="400"}"#,
            1.0,
        ),
        (
            r#"failures_total{endpoint="chat_completions",kind="invalid_request"}"#,
            1.0,
        ),
        (
            r#"failures_total{endpoint="chat_completions",kind="not_found"}"#,
            1.0,
        ),
        ("time_to_first_token_seconds_count", 2.0),
        ("inter_token_latency_seconds_count", 2.0 * (tokens - 1.0)),
        ("request_duration_seconds_count", 4.0),
        ("input_length_tokens_count", 2.0),
        ("output_length_tokens_sum", 2.0 * tokens),
        ("prompt_tokens_total", 2.0 * prompt),
        ("completion_tokens_total", 2.0 * tokens),
        ("cached_tokens_total", 10.0),
        ("reasoning_tokens_total", 0.0),
    ] {
        assert_eq!(
            value(&site, &format!("genset_http_{name}")).await,
            expected,
            "{name}"
        );
    }
    for name in ["template_seconds", "tokenize_seconds"] {
        let name = format!("genset_frontend_{name}");
        assert_eq!(value(&site, &format!("{name}_count")).await, 2.0, "{name}");
        assert!(value(&site, &format!("{name}_sum")).await > 0.0, "{name}");
    }
    site.close().await;
}

fn chat_of_nobody() -> String {
    chat("Hello", json!({"model": "nobody"})).to_string()
}

/// For every answer, whoever sends it.
#[tokio::test]
async fn every_answer_carries_the_id_of_its_request() {
    let config = FrontendConfig {
        max_body_bytes: 1000,
        ..config()
    };
    let site = Site::with(config, echo()).await;
    let good = chat("Hello", json!({"max_tokens": 3})).to_string();
    let streamed = chat("Hello", json!({"max_tokens": 3, "stream": true})).to_string();
    let large = "x".repeat(1001);
    let message =
        json!({"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]})
            .to_string();
    let gzip = "content-encoding: gzip\r\n";
    let cases = [
        ("POST", CHAT, "", &*good, 200),
        ("POST", CHAT, "", &streamed, 200),
        ("POST", CHAT, "", "{", 400),
        ("POST", CHAT, "", &large, 413),
        ("POST", CHAT, gzip, &good, 415),
        ("POST", "/tokenize", "", &large, 413),
        ("POST", "/v1/messages", "", &message, 200),
        ("POST", "/v1/messages", "", &large, 413),
        ("PUT", "/v1/messages", "", "", 405),
        ("PUT", CHAT, "", "", 405),
        ("OPTIONS", CHAT, "", "", 204),
        ("GET", "/v1/models", "", "", 200),
        ("GET", "/v1/models/nobody", "", "", 404),
        ("GET", "/v1/responses/resp_0", "", "", 404),
        ("DELETE", "/v1/responses/resp_0", "", "", 404),
        ("GET", "/v1/nothing", "", "", 404),
        ("GET", "/v1/nothing", VERSION, "", 404),
        ("HEAD", "/v1/nothing", "", "", 404),
        ("GET", "/health", "", "", 200),
        ("GET", "/metrics", "", "", 200),
        ("GET", "/openapi.json", "", "", 200),
        ("GET", "/docs", "", "", 200),
    ];
    for (method, path, further, body, status) in cases {
        for (given, expected) in [("mine-1", "mine-1"), ("é", "req-"), ("", "req-")] {
            let headers = format!("x-request-id: {given}\r\n{further}");
            let mut client = site.connect().await;
            client.send(request(method, path, &headers, body)).await;
            let response = client.response_to(method).await.expect("an answer");
            let asked = format!("{method} {path} {given:?}");
            assert_eq!(response.status, status, "{asked}");
            let ids = response.headers.iter();
            let ids: Vec<_> = ids.filter(|(name, _)| name == "x-request-id").collect();
            let [(_, id)] = ids[..] else {
                panic!("one id, not {ids:?}: {asked}");
            };
            assert!(id.starts_with(expected), "{asked}: {id}");
            let is_anthropics = path.starts_with("/v1/messages") || further == VERSION;
            let anthropics = is_anthropics.then_some(&**id);
            assert_eq!(response.header("request-id"), anthropics, "{asked}");
        }
    }
    site.close().await;
}

/// A well-formed trace reaches the engine, on every route; without a span exporter it is the client's own.
#[tokio::test]
async fn a_trace_reaches_the_engine() {
    let engine = Script::tokens(encode("Hi"));
    let site = Site::start(engine.clone()).await;
    let input = json!({"model": "tiny", "input": "Hello", "max_output_tokens": 4}).to_string();
    let messages = chat("Hello", json!({"max_tokens": 4})).to_string();
    let prompt = json!({"model": "tiny", "prompt": "Hello"}).to_string();
    for (path, body) in [
        (CHAT, &messages),
        ("/v1/completions", &prompt),
        ("/v1/responses", &input),
        ("/v1/messages", &messages),
    ] {
        for (given, expected) in [
            (
                TRACEPARENT,
                Some((TRACEPARENT.to_owned(), "a=b".to_owned())),
            ),
            ("00-nonsense", None),
        ] {
            let headers = format!("traceparent: {given}\r\ntracestate: a=b\r\n");
            let response = site.send(request("POST", path, &headers, body)).await;
            assert_eq!(response.status, 200, "{path}: {}", response.text());
            let seen = engine.traces().pop().expect("a request");
            let seen = seen.map(|trace| (trace.traceparent, trace.tracestate));
            assert_eq!(seen, expected, "{path} {given}");
        }
    }
    site.close().await;
}
