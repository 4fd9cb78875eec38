//! What is stored of responses, and what they hold while they run.

use genset_frontend::FrontendConfig;
use serde_json::{Value, json};

use super::{RESPONSES, asked, events};
use crate::script::Script;
use crate::support::{MODEL, Site, config, echo, encode, eventually, with};

#[tokio::test]
async fn only_so_much_is_kept() {
    let limits = [(2, 64 << 20), (64, 6 << 10)];
    for (max_stored_responses, max_stored_bytes) in limits {
        let config = FrontendConfig {
            max_stored_responses,
            max_stored_bytes,
            ..config()
        };
        let site = Site::with(config, echo()).await;
        let mut ids = Vec::new();
        for _ in 0..8 {
            let response = site.post(RESPONSES, &asked("Hi", json!({}))).await.json();
            assert_eq!(response["store"], true);
            ids.push(format!(
                "{RESPONSES}/{}",
                response["id"].as_str().expect("an id")
            ));
        }
        assert_eq!(site.get(&ids[0]).await.status, 404, "the oldest goes");
        assert_eq!(site.get(&ids[7]).await.status, 200, "the newest stays");
        site.close().await;
    }
    // A response that is too large to store says so, once its size is known.
    let keeps_little = FrontendConfig {
        max_stored_bytes: 64 << 10,
        ..config()
    };
    let site = Site::with(keeps_little, echo()).await;
    let large = "u".repeat(100 << 10);
    let asked_of = async |user: &str, stream: bool| {
        let further = json!({"user": user, "stream": stream});
        site.post(RESPONSES, &asked("Hi", further)).await
    };
    let streamed = events(&asked_of(&large, true).await);
    let streamed = streamed.last().expect("events")["response"].clone();
    for response in [streamed, asked_of(&large, false).await.json()] {
        assert_eq!(response["store"], false);
        let at = format!("{RESPONSES}/{}", response["id"].as_str().expect("an id"));
        assert_eq!(site.get(&at).await.status, 404);
    }
    assert_eq!(asked_of("me", false).await.json()["store"], true);
    site.close().await;
    let keeps_none = FrontendConfig {
        max_stored_responses: 0,
        ..config()
    };
    let site = Site::with(keeps_none, echo()).await;
    let response = site.post(RESPONSES, &asked("Hi", json!({}))).await.json();
    assert_eq!(response["store"], false);
    site.close().await;
}

/// The memory that a streamed response holds once its answer has begun.
async fn held_in_a_stream(site: &Site, further: Value) -> f64 {
    let body = json!({"model": MODEL, "input": "Hi", "stream": true});
    let used = || site.metric("genset_http_memory_used_bytes");
    let mut client = site.begin(RESPONSES, &with(body, further)).await;
    let head = client.head("POST").await.expect("an answer");
    assert_eq!(head.status, 200);
    let mut came = String::new();
    while !came.contains("response.output_text.delta") {
        let piece = client.piece().await.expect("an event");
        came += &String::from_utf8(piece).expect("text");
    }
    let held = used();
    drop(client);
    eventually("nothing is held any more", || used() == 0.0).await;
    held
}

#[tokio::test]
async fn what_a_response_repeats_and_keeps_is_held_to_its_end() {
    let engine = Script::silent(encode("Hi")[0]);
    engine.widen();
    let site = Site::start(engine).await;
    let user = "u".repeat(1 << 20);
    let repeated = held_in_a_stream(&site, json!({"user": user})).await;
    assert!(repeated > user.len() as f64, "{repeated}");
    let input = "many words ".repeat(10_000);
    let bytes = input.len() as f64;
    let kept = held_in_a_stream(&site, json!({"input": input})).await;
    let forgotten = held_in_a_stream(&site, json!({"input": input, "store": false})).await;
    assert!(kept >= forgotten + bytes, "{kept} {forgotten}");
    site.close().await;
}

/// Of all prompts tried, only the one that is answered is held.
#[tokio::test]
async fn a_conversation_that_was_cut_is_held_as_what_is_left_of_it() {
    let site = Site::start(Script::silent(encode("Hi")[0])).await;
    let said = |text: String| json!({"role": "user", "content": text});
    let (long, last) = (said("one ".repeat(3000)), said("Hi".into()));
    let asked = |input: Value| json!({"input": input, "truncation": "auto", "store": false});
    let alone = held_in_a_stream(&site, asked(json!([last]))).await;
    let cut = held_in_a_stream(&site, asked(json!([long, long, last]))).await;
    assert_eq!(cut, alone);
    site.close().await;
}
