//! An answer bound to a format unless tools are called: a call arrives as the model writes it, content arrives bound.

use std::sync::Arc;

use genset_backend_common::output::{Finish, TokenChunk, TokenLogprob};
use genset_backend_common::{
    EngineError, GenerateRequest, GuidedDecoding, Input, RequestField, TokenId,
    config::{GuidedKind, InputKind},
};
use serde_json::{Value, json};

use crate::client::Response;
use crate::script::Script;
use crate::support::{CHAT, Site, chat, config, encode, eventually, parsing, with};

const CALL: &str =
    "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
const BOUND: &str = "{\"a\": 1}";

fn further(more: Value) -> Value {
    let schema = json!({"type": "object", "required": ["a"]});
    let further = json!({
        "tools": [{"type": "function", "function": {"name": "get_weather"}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    });
    with(further, more)
}

/// An engine that answers `free`, `at_once` tokens at a time, and `BOUND` if it is bound.
fn engine(free: &str, at_once: usize) -> Arc<Script> {
    let free = encode(free);
    let engine = Script::new(move |request, out| {
        let tokens = match request.guided {
            Some(_) => encode(BOUND),
            None => free.clone(),
        };
        async move {
            let room = request.stop.max_tokens.map_or(usize::MAX, |it| it as usize);
            let (is_long, tokens) = (tokens.len() > room, &tokens[..tokens.len().min(room)]);
            for (place, tokens) in tokens.chunks(at_once).enumerate() {
                let logprobs = request.output.logprobs.map(|_| TokenLogprob {
                    logprob: -(place as f32),
                    top: Vec::new(),
                });
                out.tokens(TokenChunk {
                    token_ids: tokens.iter().copied().collect(),
                    logprobs: logprobs.into_iter().cycle().take(tokens.len()).collect(),
                })
                .await?;
            }
            Ok(if is_long {
                Finish::length()
            } else {
                Finish::stop()
            })
        }
    });
    let engine = engine.declaring(|can| can.max_logprobs = Some(5));
    engine.declaring_guided()
}

async fn site(engine: &Arc<Script>, tool: &str, reasoning: &str) -> Site {
    Site::with_worker(config(), parsing(tool, reasoning), engine.clone()).await
}

/// What a client reads from the answer: content, reasoning, names of calls, finish reason, and completion tokens.
fn read(response: &Response) -> (String, String, Vec<String>, String, u64) {
    let mut read = (String::new(), String::new(), Vec::new(), String::new(), 0);
    let is_streamed = response.text().starts_with("data:");
    let events = match is_streamed {
        true => response.chunks(),
        false => vec![response.json()],
    };
    for event in events {
        read.4 = event["usage"]["completion_tokens"]
            .as_u64()
            .unwrap_or(read.4);
        let choice = &event["choices"][0];
        let message = &choice[if is_streamed { "delta" } else { "message" }];
        read.0 += message["content"].as_str().unwrap_or_default();
        read.1 += message["reasoning_content"].as_str().unwrap_or_default();
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            read.2
                .extend(call["function"]["name"].as_str().map(str::to_owned));
        }
        read.3 += choice["finish_reason"].as_str().unwrap_or_default();
    }
    read
}

fn prompt(request: &GenerateRequest) -> &[TokenId] {
    let Input::Tokens(tokens) = &request.input else {
        panic!("{:?}", request.input);
    };
    tokens
}

/// Whole and streamed, for any number of tokens that the engine sends at once.
#[tokio::test]
async fn a_call_comes_as_it_is_and_content_comes_bound() {
    let thought = "hm, a < b\n";
    for at_once in [1, 2, 3, 50] {
        for (free, is_call) in [
            (CALL.to_owned(), true),
            (format!("{thought}</think>\n\n{CALL}"), true),
            ("The answer is 1.".to_owned(), false),
            (String::new(), false),
            (format!("{thought}</think>\n\nThe answer is 1."), false),
            (format!("{thought}</think>"), false),
            (format!("{thought}</think>\n<tool_call>\nno call"), false),
        ] {
            let engine = engine(&free, at_once);
            let thinks = free.contains("</think>");
            let site = site(
                &engine,
                "hermes",
                if thinks { "deepseek_r1" } else { "none" },
            )
            .await;
            for is_streamed in [false, true] {
                let usage = json!({"include_usage": true});
                let more = match is_streamed {
                    true => json!({"stream": true, "stream_options": usage}),
                    false => json!({}),
                };
                let before = engine.requests().len();
                let response = site.post(CHAT, &chat("Hi", further(more))).await;
                assert_eq!(response.status, 200, "{}", response.text());
                let (content, thoughts, calls, reason, tokens) = read(&response);
                let seen = format!("{free:?} by {at_once}: {}", response.text());
                assert_eq!(
                    thoughts.trim(),
                    if thinks { thought.trim() } else { "" },
                    "{seen}"
                );
                let requests = engine.requests().split_off(before);
                assert!(requests[0].guided.is_none());
                if is_call {
                    assert_eq!(
                        (content.trim(), reason.as_str()),
                        ("", "tool_calls"),
                        "{seen}"
                    );
                    assert_eq!((calls, requests.len()), (vec!["get_weather".to_owned()], 1));
                    assert_eq!(tokens, encode(&free).len() as u64, "{seen}");
                    continue;
                }
                assert_eq!((content.trim(), reason.as_str()), (BOUND, "stop"), "{seen}");
                assert_eq!((calls.len(), requests.len()), (0, 2), "{seen}");
                assert!(matches!(
                    requests[1].guided.as_deref(),
                    Some(GuidedDecoding::JsonSchema(_))
                ));
                // The reasoning is part of the prompt, and counts as completion.
                let thought = prompt(&requests[1]).strip_prefix(prompt(&requests[0]));
                let thought = thought.expect("the same prompt");
                let expected = if thinks {
                    encode(&free[..free.find('>').map_or(0, |it| it + 1)])
                } else {
                    Vec::new()
                };
                assert_eq!(thought, expected, "{seen}");
                assert_eq!(
                    tokens,
                    (thought.len() + encode(BOUND).len()) as u64,
                    "{seen}"
                );
            }
            site.close().await;
        }
    }
}

#[tokio::test]
async fn the_limit_counts_thoughts_and_content() {
    let thoughts = encode("hm</think>").len();
    let engine = engine("hm</think>The answer.", 1);
    let site = site(&engine, "hermes", "deepseek_r1").await;
    let ask = async |max_tokens: usize| {
        let before = engine.requests().len();
        let more = json!({"max_tokens": max_tokens, "min_tokens": 1});
        let response = site.post(CHAT, &chat("Hi", further(more))).await;
        let (content, _, _, reason, tokens) = read(&response);
        (
            content,
            reason,
            usize::try_from(tokens).expect("few tokens"),
            engine.requests().split_off(before),
        )
    };
    let (content, reason, tokens, requests) = ask(thoughts).await;
    assert_eq!(
        (content.as_str(), reason.as_str(), tokens),
        ("", "length", thoughts)
    );
    assert_eq!(requests.len(), 1);
    let (content, reason, tokens, requests) = ask(thoughts + 2).await;
    assert_eq!((reason.as_str(), tokens), ("length", thoughts + 2));
    assert!(
        BOUND.starts_with(&content) && !content.is_empty(),
        "{content}"
    );
    let stop = &requests[1].stop;
    assert_eq!((stop.max_tokens, stop.min_tokens), (Some(2), 0));
    site.close().await;
}

#[tokio::test]
async fn every_choice_and_its_log_probabilities_are_bound() {
    let engine = engine("hm</think>The answer.", 1);
    let site = site(&engine, "hermes", "deepseek_r1").await;
    let more = json!({"n": 3, "logprobs": true, "top_logprobs": 0, "seed": 7});
    let response = site.post(CHAT, &chat("Hi", further(more))).await.json();
    let rated = encode("hm</think>").len() + encode(BOUND).len();
    for choice in response["choices"].as_array().expect("choices") {
        assert_eq!(choice["message"]["content"], BOUND);
        let logprobs = choice["logprobs"]["content"].as_array().expect("logprobs");
        assert_eq!(logprobs.len(), rated);
    }
    let mut ids = engine.ids();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(
        ids.len(),
        6,
        "requests in flight have ids of their own: {ids:?}"
    );
    let seeds = engine
        .requests()
        .into_iter()
        .filter(|it| it.guided.is_some());
    let mut seeds: Vec<_> = seeds.map(|it| it.sampling.seed).collect();
    seeds.sort_unstable();
    assert_eq!(seeds, [Some(7), Some(8), Some(9)]);
    site.close().await;
}

#[tokio::test]
async fn an_answer_that_must_call_has_no_content_to_be_bound() {
    let engine = engine("", 1);
    let site = site(&engine, "hermes", "none").await;
    for choice in [
        json!("required"),
        json!({"type": "function", "function": {"name": "get_weather"}}),
    ] {
        let more = json!({"tool_choice": choice});
        let response = site.post(CHAT, &chat("Hi", further(more))).await;
        assert_eq!(response.status, 200, "{}", response.text());
        let request = engine.requests().pop().expect("a request");
        let Some(GuidedDecoding::JsonSchema(schema)) = request.guided.as_deref() else {
            panic!("{:?}", request.guided);
        };
        assert_ne!(schema["required"], json!(["a"]), "the calls bind it");
    }
    site.close().await;
}

#[tokio::test]
async fn what_the_engine_refuses_names_the_format() {
    let engine = Script::new(|request, out| async move {
        if request.guided.is_some() {
            return Err(EngineError::invalid_argument(
                RequestField::Guided,
                "too deep",
            ));
        }
        for token in encode("Yes") {
            out.token(token).await?;
        }
        Ok(Finish::stop())
    });
    let site = site(&engine.declaring_guided(), "hermes", "none").await;
    let response = site.post(CHAT, &chat("Hi", further(json!({})))).await;
    response.blames("response_format");
    site.close().await;
}

/// If it is not possible, the request is refused with the reason.
#[tokio::test]
async fn what_cannot_be_asked_again_is_refused_by_name() {
    let text = Script::new(|_, _| async move { Ok(Finish::stop()) }).declaring(|can| {
        can.inputs = [InputKind::Text, InputKind::Chat].into();
        can.guided.extend([GuidedKind::JsonSchema]);
    });
    for (engine, parser, why) in [
        (text, "hermes", "makes the prompt itself"),
        (engine("", 1), "harmony", "channels"),
    ] {
        let site = site(&engine, parser, "none").await;
        let response = site.post(CHAT, &chat("Hi", further(json!({})))).await;
        let message = response.blames("response_format");
        assert!(
            message.contains(why) && message.contains("tool_choice"),
            "{message}"
        );
        site.close().await;
    }
}

/// If a client leaves while content is written, nothing keeps running.
#[tokio::test]
async fn leaving_ends_what_runs() {
    let engine = Script::new(|request, out| async move {
        for token in encode("hm</think>") {
            out.token(token).await?;
        }
        if request.guided.is_none() {
            for token in encode("Yes") {
                out.token(token).await?;
            }
        }
        std::future::pending().await
    });
    let engine = engine.declaring_guided();
    let site = site(&engine, "hermes", "deepseek_r1").await;
    let body = chat("Hi", further(json!({"stream": true})));
    let client = site.begin(CHAT, &body).await;
    eventually("the content is asked for", || {
        engine.requests().len() == 2 && engine.active() == 1
    })
    .await;
    drop(client);
    eventually("nothing runs", || engine.active() == 0).await;
    site.close().await;
}
