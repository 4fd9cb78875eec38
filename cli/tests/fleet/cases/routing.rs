//! Routing by cached prefixes, with engines that really cache.

use serde_json::{Value, json};

use crate::answers::chat;
use crate::fleet::{Fleet, metric, until_listed};
use crate::meeting::Meeting;
use crate::support::{Exchange, Server, until};

const INDEX_BLOCKS: &str = "genset_router_index_blocks";

pub(crate) async fn a_prompt_goes_where_it_is_cached<M: Meeting>(fleet: Fleet<M>) {
    let _workers = tokio::join!(fleet.candle(&[]), fleet.candle(&[]));
    let frontend = choosing_frontend(&fleet).await;
    let prompts = ["one", "two", "three"].map(|word| format!("Count {word}. ").repeat(80));
    let mut blocks = 0;
    for prompt in &prompts {
        let (tokens, cached) = ask(&frontend, prompt).await;
        assert!(tokens > 200 && cached < 32, "{cached} of {tokens} cached");
        blocks += tokens / 16;
    }
    // The prompts share the beginning of the template; canaries are short.
    let least = f64::from(blocks - 6);
    until_metric(&frontend, INDEX_BLOCKS, least).await;
    all_are_cached(&frontend, &prompts).await;
    // A frontend that starts later learns from the workers' snapshots what this one learned from their events.
    drop(frontend);
    let frontend = choosing_frontend(&fleet).await;
    until_metric(&frontend, INDEX_BLOCKS, least).await;
    all_are_cached(&frontend, &prompts).await;
}

pub(crate) async fn requests_of_one_key_go_where_the_first_went<M: Meeting>(fleet: Fleet<M>) {
    let _workers = tokio::join!(fleet.candle(&[]), fleet.candle(&[]));
    let frontend = choosing_frontend(&fleet).await;
    // Prompts shorter than a block are never cached.
    for number in 0..6 {
        let body = json!({
            "model": "tiny-chat",
            "prompt": format!("Count {number}."),
            "max_tokens": 1,
            "prompt_cache_key": "conversation",
        });
        let body = body.to_string();
        let exchange = Exchange::begin(frontend.address, "POST", "/v1/completions", &body);
        let response = exchange.await.response().await;
        assert_eq!(response.status, 200, "{}", response.body);
    }
    let text = frontend.get("/metrics").await.body;
    let by_key = r#"genset_router_choices_total{model="tiny-chat",reason="affinity"} 5"#;
    assert!(text.contains(by_key), "{text}");
}

/// A frontend that routes by cached prefixes, once it knows the caches of both workers.
async fn choosing_frontend<M: Meeting>(fleet: &Fleet<M>) -> Server {
    let frontend = fleet.frontend(&["--router-mode=kv"]).await;
    until_listed(&frontend).await;
    until_metric(&frontend, "genset_router_snapshots_total", 2.0).await;
    frontend
}

/// Sends each prompt four times.
async fn all_are_cached(frontend: &Server, prompts: &[String]) {
    for _ in 0..4 {
        for prompt in prompts {
            let (tokens, cached) = ask(frontend, prompt).await;
            assert!(cached + 32 > tokens, "{cached} of {tokens} cached");
        }
    }
}

/// Requests one token; returns the number of prompt tokens, and how many of them were cached.
async fn ask(frontend: &Server, prompt: &str) -> (u32, u32) {
    let mut body = chat(1, false);
    body["messages"][0]["content"] = prompt.into();
    let body = body.to_string();
    let path = "/v1/chat/completions";
    let exchange = Exchange::begin(frontend.address, "POST", path, &body);
    let response = exchange.await.response().await;
    assert_eq!(response.status, 200, "{}", response.body);
    let answer: Value = serde_json::from_str(&response.body).expect("JSON");
    let count = |value: &Value| {
        let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
        count.unwrap_or_else(|| panic!("no count of tokens: {}", response.body))
    };
    let usage = &answer["usage"];
    let cached = &usage["prompt_tokens_details"]["cached_tokens"];
    (count(&usage["prompt_tokens"]), count(cached))
}

/// Waits until the sum of a metric's samples is at least `least`.
async fn until_metric(frontend: &Server, name: &str, least: f64) {
    until(async || metric(frontend, name).await >= least).await;
}
