//! Whose cached prompts a request may share: the salts that engines receive.

use serde_json::{Value, json};

use crate::access::{bearer, site_with_keys};
use crate::client::request;
use crate::script::Script;
use crate::support::{CHAT, COMPLETIONS, MODEL, Site, chat, completion, encode};

/// A good request of every API that generates.
fn requests() -> [(&'static str, Value); 4] {
    let message = json!({"max_tokens": 4});
    [
        (CHAT, chat("Hello", json!({}))),
        (COMPLETIONS, completion("Hello", json!({}))),
        ("/v1/responses", json!({"model": MODEL, "input": "Hello"})),
        ("/v1/messages", chat("Hello", message)),
    ]
}

/// Returns what the engine received for each of these headers and salts, on one API.
async fn salts(
    site: &Site,
    engine: &Script,
    path: &str,
    body: &Value,
    asked: &[(&str, Option<&str>)],
) -> Vec<Option<String>> {
    let before = engine.requests().len();
    for (key, salt) in asked {
        let mut body = body.clone();
        if let Some(salt) = salt {
            body["cache_salt"] = (*salt).into();
        }
        let headers = match *key {
            "" => String::new(),
            key => bearer(key),
        };
        let response = site
            .send(request("POST", path, &headers, body.to_string()))
            .await;
        assert_eq!(response.status, 200, "{path}: {}", response.text());
    }
    let requests = engine.requests();
    let salts = requests[before..].iter();
    salts.map(|request| request.cache_salt.clone()).collect()
}

#[tokio::test]
async fn each_key_has_a_salt_of_its_own_which_a_request_narrows() {
    let entries = [("a", "sk-a", ""), ("b", "sk-b", "")];
    let engine = Script::tokens(encode("Hi"));
    let (site, _folder) = site_with_keys(&entries, engine.clone()).await;
    let asked = [
        ("sk-a", None),
        ("sk-b", None),
        ("sk-a", Some("x")),
        ("sk-b", Some("x")),
        ("sk-a", Some("y")),
    ];
    let mut all = Vec::new();
    for (path, body) in requests() {
        let first = salts(&site, &engine, path, &body, &asked).await;
        let different: std::collections::HashSet<_> = first.iter().flatten().collect();
        assert_eq!(different.len(), 5, "{path}: {first:?}");
        assert_eq!(salts(&site, &engine, path, &body, &asked).await, first);
        all.push(first);
    }
    assert!(all.windows(2).all(|two| two[0] == two[1]), "{all:?}");
    let told = all.concat().into_iter().flatten();
    assert!(
        told.into_iter().all(|salt| salt.len() == 64),
        "hashes, not names"
    );
    site.close().await;
}

/// The tokenizer's cache does not reveal to a key, by its counter or its time, what another key sent.
#[tokio::test]
async fn no_key_finds_the_tokens_of_anothers_prompts_known() {
    let entries = [("a", "sk-a", ""), ("b", "sk-b", "")];
    let (site, _folder) = site_with_keys(&entries, Script::tokens(encode("Hi"))).await;
    let body = chat(&"one two ".repeat(100), json!({})).to_string();
    let known = || site.metric("genset_frontend_tokenizer_cached_tokens_total");
    for (key, is_known) in [("sk-a", false), ("sk-b", false), ("sk-a", true)] {
        let before = known();
        let asked = request("POST", CHAT, &bearer(key), &body);
        assert_eq!(site.send(asked).await.status, 200);
        assert_eq!(known() > before, is_known, "{key}");
    }
    site.close().await;
}

#[tokio::test]
async fn without_keys_only_a_request_has_a_salt() {
    let engine = Script::tokens(encode("Hi"));
    let site = Site::start(engine.clone()).await;
    for (path, body) in requests() {
        let asked = [("", None), ("", Some("x")), ("", Some("y"))];
        let told = salts(&site, &engine, path, &body, &asked).await;
        assert!(told[0].is_none() && told[1].is_some(), "{path}: {told:?}");
        assert_ne!(told[1], told[2], "{path}");
        for salt in [json!(""), json!("x".repeat(257)), json!(1)] {
            let mut body = body.clone();
            body["cache_salt"] = salt;
            let response = site.post(path, &body).await;
            assert_eq!(response.status, 400, "{path}");
            assert!(
                response.text().contains("cache_salt"),
                "{}",
                response.text()
            );
        }
    }
    let nested = chat("Hello", json!({"genset": {"cache_salt": "x"}}));
    assert_eq!(site.post(CHAT, &nested).await.status, 200);
    let last = engine.requests().pop().expect("a request");
    assert!(last.cache_salt.is_some());
    site.close().await;
}
