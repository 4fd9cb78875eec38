//! Extreme numbers through the API, the Worker and the built-in model: each request is answered or refused, and nothing
//! overflows. Tests are built with overflow checks, as are releases except in the kernels.

use serde_json::{Value, json};

use crate::support::{Server, genset};

const MOST: u32 = u32::MAX;

fn with(base: &Value, changes: &Value) -> String {
    let mut body = base.clone();
    for (name, value) in changes.as_object().unwrap() {
        body[name] = value.clone();
    }
    body.to_string()
}

/// The extra fields of a short request, and whether it may be refused.
fn hostile() -> Vec<Value> {
    vec![
        json!({"seed": i64::MIN, "n": 4}),
        json!({"seed": i64::MAX, "n": 4}),
        json!({"seed": -1, "n": 4}),
        json!({"seed": u64::MAX, "n": 4}),
        json!({"top_k": MOST}),
        json!({"top_k": u64::MAX}),
        json!({"top_p": f64::MIN_POSITIVE}),
        json!({"min_p": 1.0}),
        json!({"max_tokens": MOST, "stop_token_ids": [MOST]}),
        json!({"max_tokens": u64::MAX}),
        json!({"min_tokens": MOST}),
        json!({"min_tokens": 5, "max_tokens": 4}),
        json!({"min_tokens": MOST, "max_tokens": MOST}),
        json!({"logit_bias": {MOST.to_string(): 100}}),
        json!({"logit_bias": {u64::MAX.to_string(): 100}}),
        json!({"logit_bias": {"0": 1e308}}),
        json!({"logprobs": MOST}),
        json!({"top_logprobs": MOST, "logprobs": true}),
        json!({"prompt_logprobs": MOST}),
        json!({"n": MOST}),
        json!({"n": 0}),
        json!({"best_of": MOST}),
        json!({"priority": i64::MIN}),
        json!({"priority": i32::MIN}),
        json!({"repetition_penalty": f64::MIN_POSITIVE}),
        json!({"repetition_penalty": f32::MAX, "presence_penalty": 2, "frequency_penalty": 2}),
        json!({"temperature": f64::MIN_POSITIVE}),
        json!({"temperature": 2.0, "seed": i64::MAX, "logprobs": 5}),
    ]
}

#[tokio::test]
async fn no_number_of_a_client_overflows() {
    let mut command = genset(&[
        "run",
        "in=http",
        "--http-port",
        "0",
        "--context-length",
        "128",
    ]);
    command.env("GENSET_LOG", "info");
    let server = Server::spawn(command).await;
    let apis = [
        (
            "/v1/completions",
            json!({"model": "tiny-chat", "prompt": "hello", "max_tokens": 3}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": "tiny-chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}),
        ),
    ];
    let asked = apis.iter().flat_map(|(path, base)| {
        let server = &server;
        hostile().into_iter().map(move |changes| async move {
            let exchange = server.post(path, &with(base, &changes)).await;
            let answer = exchange.response().await;
            let is_well = matches!(answer.status, 200 | 400 | 422);
            assert!(is_well, "{changes}: {} {}", answer.status, answer.body);
        })
    });
    futures_util::future::join_all(asked).await;
    let good = server.post(apis[0].0, &apis[0].1.to_string()).await;
    assert_eq!(good.response().await.status, 200);
    let log = server.log();
    for bad in ["panicked", "overflow", "broke the output contract"] {
        assert!(!log.contains(bad), "{log}");
    }
    server.stop().await;
}
