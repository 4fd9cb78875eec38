//! The APIs without generated text: embeddings, tokens.

use std::sync::Arc;

use genset_backend_common::output::Finish;
use genset_backend_common::{Capabilities, EngineError, ErrorKind, Input, config::InputKind};
use genset_frontend::FrontendConfig;
use serde_json::{Value, json};

use crate::client::{Response, request};
use crate::golden::check;
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, CONTEXT, MODEL, Site, chat, completion, config, echo, echo_text, encode,
    json_file, tokenizer, with, with_file, worker_config,
};

const EMBEDDINGS: &str = "/v1/embeddings";

/// Distinguishes inputs by their length, first token and sum.
fn embedding(tokens: &[u32]) -> Vec<f32> {
    let sum: u32 = tokens.iter().sum();
    let first = tokens.first().copied().unwrap_or(0);
    let length = u32::try_from(tokens.len()).expect("short");
    [length, first, sum]
        .map(|number| f32::from(u16::try_from(number).expect("small")) / 8.0)
        .to_vec()
}

/// An engine that only embeds.
pub(crate) fn embedder() -> Arc<Script> {
    embedder_that(|_| {})
}

/// Like [`embedder`]; `spoil` changes each call's embeddings.
fn embedder_that(spoil: impl Fn(&mut Vec<Vec<f32>>) + Send + Sync + 'static) -> Arc<Script> {
    let engine = Script::new(move |request, out| {
        let Input::Embed(inputs) = &request.input else {
            panic!("nothing to embed: {request:?}")
        };
        let mut embeddings: Vec<_> = inputs.iter().map(|input| embedding(input)).collect();
        spoil(&mut embeddings);
        async move {
            out.embeddings(embeddings).await?;
            Ok(Finish::stop())
        }
    });
    engine.declaring(|can| {
        *can = Capabilities {
            inputs: [InputKind::Embed].into(),
            ..Capabilities::default()
        };
    })
}

/// The inputs of every call so far.
fn calls(engine: &Script) -> Vec<Vec<Vec<u32>>> {
    let requests = engine.requests().into_iter();
    let inputs = requests.map(|request| match request.input {
        Input::Embed(inputs) => inputs.into_inner(),
        Input::Tokens(_) | Input::Text(_) | Input::Chat(_) | Input::Score(_) => Vec::new(),
    });
    inputs.collect()
}

/// A request with further fields.
fn embed(input: impl Into<Value>, further: &Value) -> Value {
    with(
        json!({"model": MODEL, "input": input.into()}),
        further.clone(),
    )
}

/// The embeddings of a successful answer, by index.
fn vectors(response: &Response) -> Vec<Vec<f32>> {
    assert_eq!(response.status, 200, "{}", response.text());
    let body = response.json();
    let data = body["data"].as_array().expect("a list");
    let vector = |(index, item): (usize, &Value)| {
        assert_eq!(item["index"], index);
        serde_json::from_value(item["embedding"].clone()).expect("numbers")
    };
    data.iter().enumerate().map(vector).collect()
}

#[tokio::test]
async fn embeddings() {
    let site = Site::start(embedder()).await;
    let response = site
        .post(EMBEDDINGS, &embed(vec!["one two", "three"], &json!({})))
        .await;
    check("embeddings", &response);
    let further = json!({"encoding_format": "base64", "user": "u"});
    let response = site.post(EMBEDDINGS, &embed("one two", &further)).await;
    check("embeddings_base64", &response);
    site.idle().await;
    site.close().await;
}

/// The model's post-processor adds what it expects around a prompt, as for completions.
#[tokio::test]
async fn text_and_its_tokens_have_one_embedding() {
    let engine = embedder().declaring(|can| can.inputs.extend([InputKind::Tokens]));
    let site = Site::start(engine.clone()).await;
    let tokens = tokenizer().encode("one two", true).expect("tokens");
    let expected = vec![embedding(&tokens)];
    for input in [
        json!("one two"),
        json!(["one two"]),
        json!(tokens),
        json!([tokens]),
    ] {
        let response = site.post(EMBEDDINGS, &embed(input, &json!({}))).await;
        assert_eq!(vectors(&response), expected);
        let usage = response.json()["usage"].clone();
        assert_eq!(usage["prompt_tokens"], tokens.len());
        assert_eq!(usage["total_tokens"], tokens.len());
    }
    assert_eq!(calls(&engine), vec![vec![tokens]; 4]);
    site.close().await;
}

#[tokio::test]
async fn the_models_default_prompt_stands_before_texts_and_not_before_tokens() {
    let prompts = json!({"prompts": {"query": "two "}, "default_prompt_name": "query"});
    let name = "config_sentence_transformers.json";
    let worker = with_file(worker_config(), name, prompts.to_string());
    let engine = embedder();
    let site = Site::with_worker(config(), worker, engine.clone()).await;
    let encode = |text: &str| tokenizer().encode(text, true).expect("tokens");
    let (prompted, plain) = (encode("two one"), encode("one"));
    assert_ne!(prompted, plain);
    for (input, tokens) in [(json!("one"), prompted), (json!(plain), plain.clone())] {
        let response = site.post(EMBEDDINGS, &embed(input, &json!({}))).await;
        assert_eq!(vectors(&response), [embedding(&tokens)]);
        assert_eq!(response.json()["usage"]["prompt_tokens"], tokens.len());
    }
    site.close().await;
}

#[tokio::test]
async fn a_large_batch_goes_to_the_engine_in_parts_and_keeps_its_order() {
    let engine = embedder();
    let site = Site::start(engine.clone()).await;
    let inputs: Vec<Vec<u32>> = (1..=300).map(|token| vec![token; 3]).collect();
    let response = site
        .post(EMBEDDINGS, &embed(json!(inputs), &json!({})))
        .await;
    let expected: Vec<_> = inputs.iter().map(|input| embedding(input)).collect();
    assert_eq!(vectors(&response), expected);
    assert_eq!(response.json()["usage"]["prompt_tokens"], 900);
    let calls = calls(&engine);
    assert!(calls.len() > 1 && calls.iter().all(|call| call.len() <= 64));
    assert_eq!(calls.iter().map(Vec::len).sum::<usize>(), 300);
    site.close().await;
}

#[tokio::test]
async fn embeddings_are_cut_only_where_the_model_was_trained_for_it() {
    let ask = async |model: Value, dimensions: u32| {
        let file = with(json_file("config.json"), model);
        let worker = with_file(worker_config(), "config.json", file.to_string());
        let engine = embedder();
        let site = Site::with_worker(config(), worker, engine).await;
        let further = json!({"dimensions": dimensions});
        let response = site.post(EMBEDDINGS, &embed(json!([3, 4]), &further)).await;
        site.close().await;
        response
    };
    for model in [
        json!({"is_matryoshka": true}),
        json!({"matryoshka_dimensions": [2]}),
    ] {
        let vector = vectors(&ask(model.clone(), 2).await).remove(0);
        // 2 tokens, of which the first is 3.
        let norm = 13.0_f32.sqrt();
        let expected = [2.0 / norm, 3.0 / norm];
        let is_close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
        assert!(
            vector.len() == 2 && vector.iter().zip(&expected).all(is_close),
            "{vector:?}"
        );
        ask(model, 4).await.blames("dimensions");
    }
    ask(json!({}), 2).await.does_not_support("dimensions");
}

#[tokio::test]
async fn bad_embeddings_requests_name_the_field() {
    let config = FrontendConfig {
        max_embedding_inputs: 3,
        ..config()
    };
    let site = Site::with(config, embedder()).await;
    let too_long = vec![1; CONTEXT as usize + 1];
    let too_long_text = "one ".repeat(CONTEXT as usize + 1);
    let cases = [
        ("model", json!({"model": null})),
        ("model", json!({"model": 1})),
        ("input", json!({"input": null})),
        ("input", json!({"input": []})),
        ("input", json!({"input": {}})),
        ("input", json!({"input": ""})),
        ("input", json!({"input": ["a", "b", "c", "d"]})),
        ("input[1]", json!({"input": ["a", ""]})),
        ("input[1]", json!({"input": ["a", 1]})),
        ("input[1]", json!({"input": ["a", []]})),
        ("input", json!({"input": [1, "a"]})),
        ("input[0]", json!({"input": [[-1]]})),
        ("input[0]", json!({"input": [2048]})),
        ("input[1]", json!({"input": [[1], too_long]})),
        ("input[1]", json!({"input": ["a", too_long_text]})),
        ("encoding_format", json!({"encoding_format": "int8"})),
        ("encoding_format", json!({"encoding_format": 8})),
        ("dimensions", json!({"dimensions": 0})),
        ("dimensions", json!({"dimensions": 2})),
        ("truncate", json!({"truncate": true})),
    ];
    for (field, further) in cases {
        let response = site.post(EMBEDDINGS, &embed("a", &further)).await;
        let message = response.blames(field);
        assert!(message.contains(field), "{message}");
        assert!(
            !message.contains("answer"),
            "nothing is generated: {message}"
        );
    }
    let filled = vec![1; CONTEXT as usize];
    let response = site
        .post(EMBEDDINGS, &embed(json!(filled), &json!({})))
        .await;
    assert_eq!(response.status, 200, "an input may fill the context");
    let (status, ..) = site
        .post(EMBEDDINGS, &embed("a", &json!({"model": "b"})))
        .await
        .refusal();
    assert_eq!(status, 404);
    assert_eq!(site.get(EMBEDDINGS).await.status, 405);
    site.close().await;
}

#[tokio::test]
async fn an_engines_faults_are_told_as_what_they_are() {
    let engine = embedder_that(|embeddings| drop(embeddings.pop()));
    let site = Site::start(engine.clone()).await;
    let full = EngineError::new(ErrorKind::Overloaded, "the queue is full");
    engine.refuse(Some(full));
    let response = site.post(EMBEDDINGS, &embed("a", &json!({}))).await;
    assert!(response.header("retry-after").is_some());
    assert_eq!(response.status, 429, "{}", response.text());
    engine.refuse(None);
    let response = site.post(EMBEDDINGS, &embed("a", &json!({}))).await;
    assert_eq!(response.status, 500);
    assert!(
        response
            .text()
            .contains("The server failed on this request")
    );
    site.idle().await;
    site.close().await;
}

#[tokio::test]
async fn models_do_what_they_declare_and_no_more() {
    let site = Site::start(echo()).await;
    let response = site.post(EMBEDDINGS, &embed("a", &json!({}))).await;
    let message = response.blames("model");
    assert!(
        message.contains(MODEL) && message.contains("embeddings"),
        "{message}"
    );
    site.close().await;
    let site = Site::start(embedder()).await;
    let body = chat("Hello", json!({}));
    for (path, body) in [(CHAT, body), (COMPLETIONS, completion("a", json!({})))] {
        site.post(path, &body).await.blames("model");
    }
    site.close().await;
}

#[tokio::test]
async fn text_and_tokens_there_and_back() {
    let site = Site::start(echo()).await;
    let body = json!({"model": MODEL, "prompt": "Hello <|im_end|> 🦊", "return_token_strs": true});
    let response = site.post("/tokenize", &body).await;
    check("tokenize", &response);
    let tokens = response.json()["tokens"].clone();
    let body = json!({"model": MODEL, "tokens": tokens});
    check("detokenize", &site.post("/detokenize", &body).await);
    let body = json!({"model": MODEL, "prompt": "Hello", "add_special_tokens": false});
    let response = site.post("/tokenize", &body).await.json();
    assert_eq!(response["tokens"], json!(encode("Hello")));
    assert_eq!(response["token_strs"], Value::Null);
    let empty = json!({"model": MODEL, "tokens": []});
    assert_eq!(
        site.post("/detokenize", &empty).await.json(),
        json!({"prompt": ""})
    );
    site.close().await;
}

#[tokio::test]
async fn the_tokens_of_messages_are_those_a_chat_pays_for() {
    let site = Site::start(echo()).await;
    for further in [json!({}), json!({"add_generation_prompt": false})] {
        let body = chat("Hello there", further);
        let tokens = site.post("/tokenize", &body).await.json()["count"].clone();
        let answer = site.post(CHAT, &body).await.json();
        assert_eq!(answer["usage"]["prompt_tokens"], tokens);
    }
    site.close().await;
}

#[tokio::test]
async fn bad_token_requests_name_the_field() {
    let site = Site::start(echo()).await;
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let cases = [
        ("/tokenize", "model", json!({"prompt": "a"})),
        ("/tokenize", "prompt", json!({"model": MODEL})),
        (
            "/tokenize",
            "prompt",
            json!({"model": MODEL, "prompt": ["a"]}),
        ),
        (
            "/tokenize",
            "prompt",
            json!({"model": MODEL, "prompt": "a", "messages": messages}),
        ),
        (
            "/tokenize",
            "messages",
            json!({"model": MODEL, "messages": []}),
        ),
        (
            "/tokenize",
            "return_token_strs",
            json!({"model": MODEL, "prompt": "a", "return_token_strs": 1}),
        ),
        (
            "/tokenize",
            "add_special_tokens",
            json!({"model": MODEL, "messages": messages, "add_special_tokens": true}),
        ),
        (
            "/tokenize",
            "tools",
            json!({"model": MODEL, "prompt": "a", "tools": []}),
        ),
        ("/detokenize", "tokens", json!({"model": MODEL})),
        (
            "/detokenize",
            "tokens",
            json!({"model": MODEL, "tokens": "a"}),
        ),
        (
            "/detokenize",
            "tokens",
            json!({"model": MODEL, "tokens": [1, -1]}),
        ),
        (
            "/detokenize",
            "tokens[1]",
            json!({"model": MODEL, "tokens": [1, 4_000_000]}),
        ),
    ];
    for (path, field, body) in cases {
        site.post(path, &body).await.blames(field);
    }
    let body = json!({"model": "b", "prompt": "a"});
    assert_eq!(site.post("/tokenize", &body).await.status, 404);
    site.close().await;
}

#[tokio::test]
async fn a_model_whose_engine_tokenizes_has_no_tokens_to_show() {
    let site = Site::start(echo_text()).await;
    for (path, body) in [
        ("/tokenize", json!({"model": MODEL, "prompt": "a"})),
        ("/tokenize", chat("Hello", json!({}))),
        ("/detokenize", json!({"model": MODEL, "tokens": [1]})),
        ("/v1/messages/count_tokens", chat("Hello", json!({}))),
    ] {
        let response = site.post(path, &body).await;
        assert_eq!(response.status, 400, "{}", response.text());
        assert!(response.text().contains(MODEL), "{}", response.text());
    }
    site.close().await;
}

/// The router's paths, as written in the document.
pub(crate) fn routes() -> Vec<String> {
    let source = include_str!("../../src/http/handlers.rs");
    let routes = source.split(".route(").skip(1).map(|rest| {
        let path = rest.split('"').nth(1).expect("a path");
        path.replace("{*", "{")
    });
    routes.collect()
}

#[tokio::test]
async fn the_openapi_document_has_every_route_and_its_methods() {
    let site = Site::start(echo()).await;
    let response = site.get("/openapi.json").await;
    assert_eq!(response.header("content-type"), Some("application/json"));
    let document = response.json();
    let paths = document["paths"].as_object().expect("paths");
    let mut documented: Vec<String> = paths.keys().cloned().collect();
    let mut routes = routes();
    documented.sort_unstable();
    routes.sort_unstable();
    assert_eq!(documented, routes);
    for (path, methods) in paths {
        let path = path.replace("{id}", MODEL);
        let response = site.send(request("PATCH", &path, "", "")).await;
        assert_eq!(response.status, 405, "{path}");
        let allowed = response.header("allow").expect("the methods there are");
        let mut allowed: Vec<String> = allowed.split(',').map(str::to_lowercase).collect();
        allowed.retain(|method| !matches!(method.as_str(), "head" | "options"));
        let documented: Vec<String> = methods
            .as_object()
            .expect("methods")
            .keys()
            .cloned()
            .collect();
        assert_eq!(allowed, documented, "{path}");
    }
    site.close().await;
}

#[tokio::test]
async fn what_the_openapi_document_refers_to_is_in_it() {
    let site = Site::start(echo()).await;
    let text = site.get("/openapi.json").await.text();
    site.close().await;
    let document: Value = serde_json::from_str(&text).expect("JSON");
    let schemas = document["components"]["schemas"]
        .as_object()
        .expect("schemas");
    let mut used: Vec<&str> = text
        .split("#/components/schemas/")
        .skip(1)
        .filter_map(|rest| rest.split('"').next())
        .collect();
    used.sort_unstable();
    used.dedup();
    let mut there: Vec<&str> = schemas.keys().map(String::as_str).collect();
    there.sort_unstable();
    assert_eq!(used, there);
}

#[tokio::test]
async fn a_body_that_is_no_request_is_refused_by_every_route() {
    let config = FrontendConfig {
        max_body_bytes: 1000,
        ..config()
    };
    let site = Site::with(config, echo()).await;
    site.refuses_what_is_no_request(&[
        EMBEDDINGS,
        "/v1/rerank",
        "/v1/score",
        "/tokenize",
        "/detokenize",
        "/v1/messages",
        "/v1/messages/count_tokens",
    ])
    .await;
    site.is_well().await;
    site.idle().await;
    site.close().await;
}
