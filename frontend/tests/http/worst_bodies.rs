//! One client sends the worst possible bodies; others do not notice.

use std::sync::Arc;

use futures_util::future::join;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::client::{Client, post, soon};
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, MODEL, Site, chat, completion, config, echo, encode, with_template,
    worker_config,
};

/// A template that never ends without a fuel limit.
const ENDLESS: &str =
    "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a %}{% endfor %}{% endfor %}";

/// An engine whose tokens arrive one by one, as they are released.
fn gated() -> (Arc<Script>, Arc<Semaphore>) {
    let gate = Arc::new(Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let token = *encode(" and").first().expect("a token");
    let engine = Script::new(move |_, out| {
        let opened = Arc::clone(&opened);
        async move {
            loop {
                opened.acquire().await.expect("an open gate").forget();
                out.token(token).await?;
            }
        }
    });
    (engine, gate)
}

/// Another client's stream, which continues as long as tokens are released.
struct Bystander {
    client: Client,
    gate: Arc<Semaphore>,
}

impl Bystander {
    async fn start(site: &Site, gate: Arc<Semaphore>) -> Self {
        let body = completion("Hello", json!({"stream": true, "max_tokens": 1500}));
        let mut client = site.begin(COMPLETIONS, &body).await;
        gate.add_permits(1);
        let head = client.head("POST").await.expect("an answer");
        assert_eq!(head.status, 200);
        assert!(client.event().await.expect("an event").contains("and"));
        Self { client, gate }
    }

    /// Reads this many more tokens, and releases each once the previous one has arrived.
    async fn goes_on(&mut self, tokens: usize) {
        for _ in 0..tokens {
            self.gate.add_permits(1);
            let event = soon(self.client.event()).await.expect("an event");
            assert!(
                event.contains("\"and\"") || event.contains("\" and\""),
                "{event}"
            );
        }
    }
}

fn with(field: &str, value: &str) -> Vec<u8> {
    let body = format!(
        "{{\"model\": \"{MODEL}\", \"messages\": [{{\"role\": \"user\", \"content\": \"Hi\"}}], \"{field}\": {value}}}"
    );
    body.into_bytes()
}

/// `open` this many times, closed again with `close`.
fn nested(levels: usize, open: &str, close: &str) -> String {
    open.repeat(levels) + "1" + &close.repeat(levels)
}

/// Bodies, their routes, and the status of the answer. Some are a megabyte of nesting.
fn worst() -> Vec<(&'static str, Vec<u8>, u16)> {
    let levels = 60_000;
    let schema = nested(levels, "{\"properties\":{\"a\":", "}}");
    let tool = format!(
        "[{{\"type\": \"function\", \"function\": {{\"name\": \"f\", \"parameters\": {schema}}}}}]"
    );
    let format = format!(
        "{{\"type\": \"json_schema\", \"json_schema\": {{\"name\": \"n\", \"schema\": {schema}}}}}"
    );
    let text = Value::from(nested(levels, "{\"properties\":{\"a\":", "}}")).to_string();
    let flat = format!("{{\"name\": \"f\", \"parameters\": {schema}, \"type\": \"function\"}}");
    let anthropic = format!(
        "{{\"model\": \"{MODEL}\", \"max_tokens\": 4, \"messages\": [{{\"role\": \"user\", \"content\": \"Hi\"}}], \
         \"tools\": [{{\"name\": \"f\", \"input_schema\": {schema}}}]}}"
    );
    let responses = format!("{{\"model\": \"{MODEL}\", \"input\": \"Hi\", \"tools\": [{flat}]}}");
    let messages = format!(
        "{{\"model\": \"{MODEL}\", \"messages\": {}}}",
        nested(500_000, "[", "]")
    );
    let sent = |body: &Value| body.to_string().into_bytes();
    let many = vec![json!({"role": "user", "content": ""}); 50_000];
    let names: serde_json::Map<_, _> = (0..100_000)
        .map(|id| (format!("f{id}"), json!(1)))
        .collect();
    let biases: serde_json::Map<_, _> = (0..100_000)
        .map(|id| (format!("{id}x"), json!(1)))
        .collect();
    vec![
        (CHAT, with("tools", &tool), 400),
        (CHAT, with("response_format", &format), 400),
        (CHAT, with("guided_json", &schema), 400),
        (CHAT, with("guided_json", &text), 400),
        (CHAT, with("x", &schema), 400),
        (CHAT, with("x", &nested(500_000, "[", "")), 400),
        (CHAT, with("seed", &"1".repeat(1 << 20)), 400),
        (
            CHAT,
            with("temperature", &format!("1.{}e999999", "1".repeat(1 << 20))),
            400,
        ),
        (CHAT, messages.into_bytes(), 400),
        (CHAT, sent(&chat("", json!({"messages": many}))), 400),
        (CHAT, sent(&chat("Hi", Value::Object(names))), 400),
        (CHAT, sent(&chat("Hi", json!({"logit_bias": biases}))), 400),
        (
            CHAT,
            sent(&chat("Hi", json!({"stop": vec!["x"; 100_000]}))),
            400,
        ),
        (CHAT, sent(&chat(&"\u{1}".repeat(300_000), json!({}))), 400),
        (
            COMPLETIONS,
            sent(&completion("a".repeat(200_000), json!({}))),
            400,
        ),
        (
            COMPLETIONS,
            sent(&completion(vec!["a"; 100_000], json!({}))),
            400,
        ),
        (
            COMPLETIONS,
            sent(&completion(vec![5; 1_000_000], json!({}))),
            400,
        ),
        ("/v1/messages", anthropic.into_bytes(), 400),
        ("/v1/responses", responses.into_bytes(), 400),
        ("/tokenize", messages_of_depth(levels), 400),
    ]
}

fn messages_of_depth(levels: usize) -> Vec<u8> {
    let content = nested(levels, "[", "]");
    let messages = format!("[{{\"role\": \"user\", \"content\": {content}}}]");
    format!("{{\"model\": \"{MODEL}\", \"messages\": {messages}}}").into_bytes()
}

#[tokio::test]
async fn a_stream_goes_on_beside_the_worst_bodies() {
    let (engine, gate) = gated();
    let site = Site::start(engine).await;
    let mut bystander = Bystander::start(&site, gate).await;
    for (path, body, expected) in worst() {
        let mut shown = String::from_utf8_lossy(&body).into_owned();
        shown.truncate(120);
        println!("{path} {shown}");
        let asked = site.send(post(path, body));
        let (response, ()) = join(asked, bystander.goes_on(3)).await;
        let error = &response.json()["error"]["message"];
        assert_eq!(response.status, expected, "{path} {shown}: {error}");
        assert!(
            error.as_str().is_some_and(|error| error.len() < 1000),
            "{path} {shown}: {error}"
        );
    }
    drop(bystander);
    site.idle().await;
    site.close().await;
}

/// On one thread: if the template were rendered there, its answer would come before the other client's next token.
#[tokio::test]
async fn a_template_without_end_holds_up_nobody() {
    let (engine, gate) = gated();
    let worker = with_template(worker_config(), ENDLESS);
    let site = Site::with_worker(config(), worker, engine).await;
    let mut bystander = Bystander::start(&site, gate).await;
    for (path, body) in [
        (CHAT, chat("Hi", json!({}))),
        (CHAT, chat("Hi", json!({"stream": true}))),
        ("/v1/responses", json!({"model": MODEL, "input": "Hi"})),
        ("/tokenize", chat("Hi", json!({}))),
        ("/v1/messages", chat("Hi", json!({"max_tokens": 4}))),
    ] {
        let mut client = site.begin(path, &body).await;
        let answered = client.response();
        let others = bystander.goes_on(20);
        tokio::pin!(answered, others);
        tokio::select! {
            biased;
            () = &mut others => {}
            response = &mut answered => panic!("{path}: first came {}", response.text()),
        }
        let response = answered.await;
        assert_eq!(response.status, 400, "{path}");
        let message = response.json()["error"]["message"].clone();
        let message = message.as_str().unwrap_or_default();
        assert!(
            message.contains("template did not end"),
            "{path}: {message}"
        );
    }
    drop(bystander);
    site.idle().await;
    site.close().await;
}

/// An inner request may not be deeper than JSON may be here.
#[tokio::test]
async fn the_depth_that_one_route_takes_every_route_takes() {
    let site = Site::start(Script::tokens(encode("Hi"))).await;
    for levels in [60, 118, 119, 120, 121, 122] {
        let schema: Value = (0..levels).fold(json!(1), |inner, _| json!({"a": inner}));
        let described = json!({"type": "object", "description": "d", "x": schema});
        let flat = json!({"type": "function", "name": "f", "parameters": described});
        let tool = json!({"name": "f", "input_schema": described});
        for (path, body) in [
            (
                "/v1/responses",
                json!({"model": MODEL, "input": "Hi", "tools": [flat], "tool_choice": "none"}),
            ),
            (
                "/v1/messages",
                chat(
                    "Hi",
                    json!({"max_tokens": 4, "tools": [tool], "tool_choice": {"type": "none"}}),
                ),
            ),
        ] {
            let response = site.post(path, &body).await;
            assert_eq!(response.status, 200, "{path} {levels}: {}", response.text());
        }
    }
    site.close().await;
}

/// What this server treats as text stays text, however deep the JSON in it.
#[tokio::test]
async fn depth_in_a_text_is_no_depth() {
    let site = Site::start(echo()).await;
    // Deeper than JSON may be here, and short enough for the context.
    let deep = nested(500, "[", "]");
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}});
    let messages = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]);
    let body = chat("", json!({"messages": messages}));
    let response = site.post(CHAT, &body).await;
    assert_eq!(response.status, 200, "{}", response.text());
    site.close().await;
}
