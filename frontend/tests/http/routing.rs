//! How clients may influence the routing of their requests, with KV-aware routing.

use std::sync::Arc;

use genset_backend_common::LLMEngine;
use genset_backend_common::worker::WorkerHandle;
use genset_frontend::FrontendConfig;
use genset_router::RouterMode;
use http::HeaderName;
use serde_json::{Value, json};

use crate::access::{bearer, site_with_keys};
use crate::apis::embedder;
use crate::client::{request, soon};
use crate::scores::scorer;
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, MODEL, Site, chat, completion, config, encode, eventually,
    pairs_worker_config, worker_config,
};

const HEADER: &str = "x-session";

/// A server that routes by cached prefixes.
fn kv() -> FrontendConfig {
    let mut config = config();
    config.router.mode = RouterMode::Kv;
    config.affinity_header = Some(HeaderName::from_static(HEADER));
    config
}

/// Two workers, both known to the server.
struct Pair {
    site: Site,
    other: WorkerHandle,
    engines: [Arc<Script>; 2],
}

impl Pair {
    async fn start() -> Self {
        let engines = [(); 2].map(|()| Script::tokens(encode("Hi")));
        let [one, two] = engines.clone();
        let site = Site::with(kv(), one).await;
        let other = site.join(2, two, worker_config()).await;
        let pair = Self {
            site,
            other,
            engines,
        };
        soon(async {
            while pair.asked().contains(&0) {
                let response = pair.site.post(CHAT, &chat("Hello", json!({}))).await;
                assert_eq!(response.status, 200, "{}", response.text());
            }
        })
        .await;
        pair
    }

    /// How many requests each worker got.
    fn asked(&self) -> [usize; 2] {
        self.engines
            .each_ref()
            .map(|engine| engine.requests().len())
    }

    /// Sends a body six times. Returns how many more of them one worker got than the other.
    async fn difference(&self, path: &str, headers: &str, body: &Value) -> usize {
        let before = self.asked();
        for _ in 0..6 {
            let bytes = request("POST", path, headers, body.to_string());
            let response = self.site.send(bytes).await;
            assert_eq!(response.status, 200, "{path}: {}", response.text());
            assert_eq!(response.header("x-genset-ignored"), None, "{path}");
        }
        let after = self.asked();
        (after[0] - before[0]).abs_diff(after[1] - before[1])
    }

    async fn close(self) {
        soon(self.other.shutdown()).await;
        self.site.close().await;
    }
}

#[tokio::test]
async fn requests_that_belong_together_go_to_one_worker() {
    let pair = Pair::start().await;
    let message = json!({"max_tokens": 4, "metadata": {"user_id": "u4"}});
    for (path, body) in [
        (CHAT, chat("Hi", json!({"prompt_cache_key": "a"}))),
        (CHAT, chat("Hi", json!({"user": "u2"}))),
        (COMPLETIONS, completion("Hi", json!({"user": "u3"}))),
        (
            "/v1/responses",
            json!({"model": MODEL, "input": "Hi", "prompt_cache_key": "b"}),
        ),
        ("/v1/messages", chat("Hi", message)),
    ] {
        assert_eq!(pair.difference(path, "", &body).await, 6, "{path}: {body}");
    }
    let plain = chat("Hi", json!({}));
    assert_eq!(pair.difference(CHAT, "", &plain).await, 0);
    // The header takes precedence over the body.
    let header = format!("{HEADER}: s1\r\n");
    assert_eq!(pair.difference(CHAT, &header, &plain).await, 6);
    let served = pair.asked();
    for user in 0..4 {
        let body = chat("Hi", json!({"user": format!("other {user}")}));
        assert_eq!(pair.difference(CHAT, &header, &body).await, 6);
    }
    let after = pair.asked();
    let went = [after[0] - served[0], after[1] - served[1]];
    assert!(went.contains(&24) && went.contains(&0), "{went:?}");
    let body = chat("Hi", json!({"prompt_cache_key": 5}));
    pair.site.post(CHAT, &body).await.blames("prompt_cache_key");
    eventually("all are answered", || {
        pair.site.metric("genset_http_requests_in_flight") == 0.0
    })
    .await;
    pair.close().await;
}

#[tokio::test]
async fn an_answer_says_how_it_was_routed_when_asked() {
    let pair = Pair::start().await;
    let asking = json!({"genset": {"annotations": ["router"]}, "n": 2});
    for (path, mut body) in [
        (CHAT, chat("Hi", asking.clone())),
        (COMPLETIONS, completion("Hi", asking)),
        (
            "/v1/responses",
            json!({"model": MODEL, "input": "Hi", "genset": {"annotations": ["router"]}}),
        ),
    ] {
        let whole = pair.site.post(path, &body).await;
        assert_eq!(whole.status, 200, "{path}: {}", whole.text());
        let choices = if path == "/v1/responses" { 1 } else { 2 };
        check_decisions(&whole.json()["genset"]["router"], choices);
        body["stream"] = true.into();
        let streamed = pair.site.post(path, &body).await.text();
        let events = streamed
            .lines()
            .filter_map(|line| line.strip_prefix("data: "));
        let events = events.filter_map(|event| serde_json::from_str::<Value>(event).ok());
        let said: Vec<Value> = events
            .flat_map(|event| [event["genset"].clone(), event["response"]["genset"].clone()])
            .filter(|said| !said.is_null())
            .collect();
        assert_eq!(said.len(), 1, "{path}");
        check_decisions(&said[0]["router"], choices);
    }
    let plain = pair.site.post(CHAT, &chat("Hi", json!({}))).await;
    assert_eq!(plain.json().get("genset"), None);
    for (annotations, param) in [
        (json!(["router", "what"]), "genset.annotations[1]"),
        (json!(5), "genset.annotations"),
    ] {
        let body = chat("Hi", json!({"genset": {"annotations": annotations}}));
        pair.site.post(CHAT, &body).await.blames(param);
    }
    pair.close().await;
}

fn check_decisions(decisions: &Value, choices: usize) {
    let decisions = decisions.as_array().unwrap();
    assert_eq!(decisions.len(), choices, "{decisions:?}");
    for decision in decisions {
        assert_eq!(decision["mode"], "kv", "{decision}");
        assert_eq!(decision["model"], MODEL);
        assert_eq!(decision["reason"], "fallback");
        assert_eq!(decision["candidate_count"], 2);
        assert!(decision["instance"].is_string());
    }
}

/// A decision names instances and their load, which comes from others' requests.
#[tokio::test]
async fn clients_with_keys_are_told_of_no_decision() {
    let engine = Script::tokens(encode("Hi"));
    let (site, _folder) = site_with_keys(&[("a", "sk-a", "")], engine.clone()).await;
    for extension in ["genset", "nvext"] {
        let asking = json!({extension: {"annotations": ["router"]}});
        let response = json!({"model": MODEL, "input": "Hi", extension: asking[extension]});
        for (path, body) in [
            (CHAT, chat("Hi", asking.clone())),
            (COMPLETIONS, completion("Hi", asking.clone())),
            ("/v1/responses", response),
        ] {
            let bytes = request("POST", path, &bearer("sk-a"), body.to_string());
            let place = format!("{extension}.annotations[0]");
            let message = site.send(bytes).await.blames(&place);
            assert!(message.contains("loopback"), "{path}: {message}");
        }
    }
    assert!(engine.requests().is_empty());
    site.close().await;
}

#[tokio::test]
async fn other_modes_say_whom_they_chose() {
    let site = Site::start(Script::tokens(encode("Hi"))).await;
    let body = chat("Hi", json!({"nvext": {"annotations": ["router"]}}));
    let answer = site.post(CHAT, &body).await.json();
    let decision = &answer["genset"]["router"][0];
    assert_eq!(decision["mode"], "round-robin", "{answer}");
    assert_eq!(decision["candidate_count"], 1);
    site.close().await;
}

#[tokio::test]
async fn a_rank_is_named_by_field_or_header() {
    let engine = Script::tokens(encode("Hi"));
    let site = Site::start(engine.clone()).await;
    let named = |headers: &str, further: Value| {
        let body = chat("Hi", further).to_string();
        site.send(request("POST", CHAT, headers, body))
    };
    let header = |rank: &str| format!("x-genset-data-parallel-rank: {rank}\r\n");
    for (headers, further) in [
        (String::new(), json!({"data_parallel_rank": 0})),
        (String::new(), json!({"genset": {"data_parallel_rank": 0}})),
        (header("0"), json!({"data_parallel_rank": 5})),
    ] {
        let response = named(&headers, further).await;
        assert_eq!(response.status, 200, "{}", response.text());
        let request = engine.requests().pop().unwrap();
        assert_eq!(request.data_parallel_rank, Some(0));
    }
    // The engine has one rank.
    let refused = named(&header("1"), json!({})).await;
    refused.blames("data_parallel_rank");
    let refused = named(&header("first"), json!({})).await;
    refused.blames("x-genset-data-parallel-rank");
    site.close().await;
}

#[tokio::test]
async fn a_header_names_the_rank_of_what_is_embedded_and_scored() {
    let embedded = json!({"model": MODEL, "input": "one"});
    let ranked = json!({"model": MODEL, "query": "one", "documents": ["two"]});
    let scored = json!({"model": MODEL, "text_1": "one", "text_2": "two"});
    let cases: [(Arc<dyn LLMEngine>, &str, Value); 3] = [
        (embedder(), "/v1/embeddings", embedded),
        (scorer(), "/v1/rerank", ranked),
        (scorer(), "/v1/score", scored),
    ];
    for (engine, path, body) in cases {
        let site = Site::with_worker(config(), pairs_worker_config(), engine).await;
        let named = |rank: u32| {
            let header = format!("x-genset-data-parallel-rank: {rank}\r\n");
            site.send(request("POST", path, &header, body.to_string()))
        };
        let response = named(0).await;
        assert_eq!(response.status, 200, "{path}: {}", response.text());
        // The engine has one rank.
        named(1).await.blames("data_parallel_rank");
        site.close().await;
    }
}
