//! Token quotas hold, whatever a client does with its answers.

use std::sync::Arc;

use genset_backend_common::output::Finish;
use genset_backend_common::{EngineError, LLMEngine};
use serde_json::{Value, json};

use crate::access::{bearer, site_with_keys};
use crate::apis::embedder;
use crate::client::request;
use crate::scores::scorer;
use crate::script::Script;
use crate::support::{CHAT, CONTEXT, MODEL, Site, chat, encode, eventually, metric};
use crate::whole_bodies::reading;

/// The tokens of each answer.
const GIVEN: u64 = 30;

/// An engine that sends `GIVEN` tokens, and then `last`.
fn engine<F>(last: impl Fn() -> F + Send + Sync + 'static) -> Arc<dyn LLMEngine>
where
    F: Future<Output = Result<Finish, EngineError>> + Send + 'static,
{
    let word = encode("one")[0];
    Script::new(move |_, out| {
        let last = last();
        async move {
            for _ in 0..GIVEN {
                out.token(word).await?;
            }
            last.await
        }
    })
}

fn of_key(site: &Site, key: &str) -> u64 {
    let name = format!("genset_http_key_tokens_total{{key=\"{key}\"}}");
    metric(&site.runtime.metrics().encode(), &name).unwrap_or(0)
}

/// Sends eight requests in a row and leaves each before the last event: one answer uses the whole quota.
#[tokio::test]
async fn a_client_that_leaves_has_paid_for_what_it_took() {
    let quota = "tokens_per_minute = 1";
    let entries = [("streamed", "sk-a", quota), ("whole", "sk-b", quota)];
    let (site, _folder) = site_with_keys(&entries, engine(std::future::pending)).await;
    let completion = || site.metric("genset_http_completion_tokens_total");
    for (name, key, is_stream) in [("streamed", "sk-a", true), ("whole", "sk-b", false)] {
        let body = chat("Hello", json!({"stream": is_stream})).to_string();
        let asked = request("POST", CHAT, &bearer(key), &body);
        let expected = completion() + GIVEN as f64;
        let mut client = site.connect().await;
        client.send(&asked).await;
        eventually("its tokens are given", || completion() == expected).await;
        drop(client);
        for _ in 0..7 {
            let (status, _, code, _) = site.send(&asked).await.refusal();
            assert_eq!(status, 429, "{name}");
            assert_eq!(code.as_deref(), Some("rate_limit_exceeded"));
        }
        assert!(of_key(&site, name) > GIVEN, "{name}: the prompt costs too");
    }
    site.idle().await;
    let sum = of_key(&site, "streamed") + of_key(&site, "whole");
    let prompts = site.metric("genset_http_prompt_tokens_total");
    assert_eq!(prompts + completion(), sum as f64);
    site.close().await;
}

/// Also if the engine writes the API's objects itself: it reports how many tokens each has.
#[tokio::test]
async fn a_client_that_leaves_has_paid_for_the_objects_it_took() {
    let script = Script::new(|_, out| async move {
        out.text("{}", 30).await?;
        std::future::pending().await
    });
    let entries = [("streamed", "sk-a", ""), ("whole", "sk-b", "")];
    let (site, _folder) = site_with_keys(&entries, reading(script)).await;
    for (name, key, is_stream) in [("streamed", "sk-a", true), ("whole", "sk-b", false)] {
        let body = chat("Hello", json!({"stream": is_stream})).to_string();
        let mut client = site.connect().await;
        client.send(request("POST", CHAT, &bearer(key), body)).await;
        eventually("its tokens are given", || of_key(&site, name) == GIVEN).await;
        drop(client);
    }
    site.idle().await;
    assert_eq!(of_key(&site, "streamed") + of_key(&site, "whole"), 60);
    site.close().await;
}

/// Tokens sent before an error are charged; a refused request costs nothing.
#[tokio::test]
async fn an_answer_that_breaks_off_has_been_paid_for() {
    let broken = || async { Err(EngineError::internal("the device is gone")) };
    let script = engine(broken);
    let (site, _folder) = site_with_keys(&[("a", "sk-a", "")], script).await;
    let body = chat("Hello", json!({})).to_string();
    let response = site
        .send(request("POST", CHAT, &bearer("sk-a"), &body))
        .await;
    assert_eq!(response.status, 500, "{}", response.text());
    let paid = of_key(&site, "a");
    assert!(paid > GIVEN, "{paid}");
    let unknown = chat("Hello", json!({"model": "nobody"})).to_string();
    let response = site
        .send(request("POST", CHAT, &bearer("sk-a"), unknown))
        .await;
    assert_eq!(response.status, 404);
    assert_eq!(of_key(&site, "a"), paid);
    site.close().await;
}

/// Tokens that are counted, shown or embedded are charged to the key; those of a refused request are not.
#[tokio::test]
async fn counting_costs_what_it_counts() {
    let word = encode("one")[0];
    let text = "one two three";
    let messages = json!({"model": MODEL, "messages": [{"role": "user", "content": text}]});
    let cases: [(&str, Value); 4] = [
        ("/tokenize", json!({"model": MODEL, "prompt": text})),
        (
            "/detokenize",
            json!({"model": MODEL, "tokens": vec![word; 5]}),
        ),
        ("/v1/messages/count_tokens", messages),
        (
            "/v1/responses/input_tokens",
            json!({"model": MODEL, "input": text}),
        ),
    ];
    let quota = "tokens_per_minute = 1";
    let entries: Vec<_> = cases
        .iter()
        .map(|(path, _)| (*path, *path, quota))
        .chain([("refused", "refused", quota)])
        .collect();
    let (site, _folder) = site_with_keys(&entries, engine(std::future::pending)).await;
    for (path, body) in cases {
        let send = async || {
            site.send(request("POST", path, &bearer(path), body.to_string()))
                .await
        };
        let response = send().await;
        assert_eq!(response.status, 200, "{path}: {}", response.text());
        let reply = response.json();
        let counted = reply["count"]
            .as_u64()
            .or(reply["input_tokens"].as_u64())
            .unwrap_or(5);
        assert_eq!(of_key(&site, path), counted, "{path}");
        assert_eq!(send().await.status, 429, "{path}");
    }
    let too_many = CONTEXT as usize + 1;
    for (path, body) in [
        (
            "/tokenize",
            json!({"model": MODEL, "prompt": "one ".repeat(too_many)}),
        ),
        (
            "/detokenize",
            json!({"model": MODEL, "tokens": vec![word; too_many]}),
        ),
        (
            "/detokenize",
            json!({"model": MODEL, "tokens": [word, u32::MAX]}),
        ),
    ] {
        let asked = request("POST", path, &bearer("refused"), body.to_string());
        let response = site.send(asked).await;
        assert_eq!(response.status, 400, "{path}: {}", response.text());
        assert_eq!(of_key(&site, "refused"), 0, "{path}");
    }
    assert_eq!(site.metric("genset_http_prompt_tokens_total"), 0.0);
    site.close().await;
}

#[tokio::test]
async fn embeddings_cost_their_inputs() {
    let entries = [("a", "sk-a", "tokens_per_minute = 1")];
    let (site, _folder) = site_with_keys(&entries, embedder()).await;
    let body = json!({"model": MODEL, "input": [[1, 2, 3], [4, 5]]}).to_string();
    let send = async || {
        site.send(request("POST", "/v1/embeddings", &bearer("sk-a"), &body))
            .await
    };
    assert_eq!(send().await.status, 200);
    assert_eq!(of_key(&site, "a"), 5);
    assert_eq!(site.metric("genset_http_prompt_tokens_total"), 5.0);
    assert_eq!(site.metric("genset_http_input_length_tokens_sum"), 5.0);
    let completions = site.metric("genset_http_output_length_tokens_count");
    assert_eq!(completions, 0.0, "embeddings are none");
    assert_eq!(send().await.status, 429);
    site.close().await;
}

#[tokio::test]
async fn scores_cost_their_pairs() {
    let entries = [("a", "sk-a", "tokens_per_minute = 1")];
    let (site, _folder) = site_with_keys(&entries, scorer()).await;
    let body = json!({"model": MODEL, "query": "one", "documents": ["two", "three four"]});
    let send = async || {
        site.send(request(
            "POST",
            "/v1/rerank",
            &bearer("sk-a"),
            body.to_string(),
        ))
        .await
    };
    let response = send().await;
    let paid = response.json()["usage"]["total_tokens"]
        .as_u64()
        .expect("tokens");
    let tokens: usize = ["one", "two", "one", "three four"]
        .map(|text| encode(text).len())
        .iter()
        .sum();
    assert_eq!(paid, u64::try_from(tokens + 2).expect("few"));
    assert_eq!(of_key(&site, "a"), paid);
    let completions = site.metric("genset_http_output_length_tokens_count");
    assert_eq!(completions, 0.0, "scores are none");
    assert_eq!(send().await.status, 429);
    site.close().await;
}
