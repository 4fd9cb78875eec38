//! For any input the answer is a 2xx or a 4xx, and the server works afterwards.

use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop_oneof};
use proptest::sample::select;
use proptest::test_runner::TestRunner;
use serde_json::{Map, Value, json};

use crate::client::request;
use crate::support::{CHAT, COMPLETIONS, Site, chat, completion, echo};

const FIELDS: &[&str] = &[
    "model",
    "messages",
    "prompt",
    "n",
    "stream",
    "stream_options",
    "include_usage",
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "priority",
    "genset",
    "nvext",
    "annotations",
    "tools",
    "tool_choice",
    "response_format",
    "logprobs",
    "top_logprobs",
    "json_schema",
    "schema",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "reasoning_effort",
    "echo",
    "suffix",
    "best_of",
    "user",
    "metadata",
    "chat_template_kwargs",
    "add_generation_prompt",
    "role",
    "content",
    "type",
    "text",
    "name",
    "tool_calls",
];

const STRINGS: &[&str] = &[
    "tiny",
    "user",
    "assistant",
    "system",
    "tool",
    "developer",
    "text",
    "Hello",
    "",
    "auto",
    "none",
    "\u{0}",
    "🦀",
    "<|im_end|>",
    "{{ 1 / 0 }}",
    "1",
    "json_object",
    "json_schema",
];

fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3_i64..20).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        select(STRINGS).prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ]
}

fn key() -> impl Strategy<Value = String> {
    prop_oneof![
        8 => select(FIELDS).prop_map(str::to_owned),
        1 => (0_u32..3000).prop_map(|id| id.to_string()),
        1 => ".{0,8}",
    ]
}

fn value() -> impl Strategy<Value = Value> {
    leaf().prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            proptest::collection::btree_map(key(), inner, 0..6)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// A good request with some fields replaced, any JSON value, or damaged bytes.
fn body() -> impl Strategy<Value = Vec<u8>> {
    let fields = || proptest::collection::btree_map(key(), value(), 0..4);
    let changed = |mut base: Value, fields: std::collections::BTreeMap<String, Value>| {
        if let Value::Object(base) = &mut base {
            base.extend(fields.into_iter().collect::<Map<_, _>>());
        }
        base
    };
    let json = prop_oneof![
        4 => fields().prop_map(move |fields| changed(chat("Hello there", json!({})), fields)),
        4 => fields().prop_map(move |fields| changed(completion("Hello there", json!({})), fields)),
        2 => value(),
    ];
    let damage = prop_oneof![
        6 => Just(None),
        1 => (any::<proptest::sample::Index>(), any::<u8>()).prop_map(Some),
    ];
    (json, damage).prop_map(|(json, damage)| {
        let mut bytes = json.to_string().into_bytes();
        if let Some((at, byte)) = damage
            && let Some(place) = bytes.get_mut(at.index(json.to_string().len()))
        {
            *place = byte;
        }
        bytes
    })
}

fn method() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        6 => Just("POST"),
        4 => select(&["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"][..]),
    ]
}

fn path() -> impl Strategy<Value = String> {
    let known = &[
        CHAT,
        COMPLETIONS,
        "/v1/models",
        "/v1/models/tiny",
        "/live",
        "/ready",
        "/health",
        "/metrics",
        "*",
        "http://test/v1/models",
        "test:80",
        "/",
        "//",
        "/v1/models/%00%ff",
        "/v1/models/a/b/../c",
        "/v1/models//",
    ][..];
    prop_oneof![
        8 => select(known).prop_map(str::to_owned),
        1 => (select(known), "[!-~]{0,12}").prop_map(|(path, rest)| format!("{path}{rest}")),
        1 => "[!-~]{1,40}",
    ]
}

fn check(cases: u32, strategy: &impl Strategy<Value = (&'static str, String, Vec<u8>)>) {
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let site = tokio.block_on(Site::start(echo()));
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let checked = TestRunner::new(config).run(strategy, |(method, path, body)| {
        tokio.block_on(async {
            let mut client = site.connect().await;
            client.send(request(method, &path, "", &body)).await;
            let response = client.response_to(method).await;
            let status = response.as_ref().map(|response| response.status);
            proptest::prop_assert!(
                status.is_some_and(|status| matches!(status, 200..300 | 400..500)),
                "{method} {path} {} gave {status:?}",
                String::from_utf8_lossy(&body)
            );
            if method == "POST" && (path == CHAT || path == COMPLETIONS) && status >= Some(400) {
                let error = response.map(|response| response.json()["error"]["message"].clone());
                proptest::prop_assert!(error.is_some_and(|error| error.is_string()));
            }
            proptest::prop_assert_eq!(site.get("/health").await.status, 200);
            Ok(())
        })
    });
    checked.expect("everything is answered");
    tokio.block_on(async {
        site.is_well().await;
        site.idle().await;
        site.close().await;
    });
}

#[test]
fn any_body_is_answered() {
    let path = select(&[CHAT, COMPLETIONS][..]).prop_map(str::to_owned);
    check(400, &(Just("POST"), path, body()));
}

#[test]
fn any_method_and_path_is_answered() {
    check(300, &(method(), path(), body()));
}
