//! Every kind of request, cut at the places where a seam would show.

use std::path::Path;
use std::sync::Arc;

use genset_backend_common::LLMEngine;
use genset_engine_candle::{ByteSize, CandleArgs, CandleEngine, DeviceChoice};
use genset_engine_mocker::{MockerArgs, MockerEngine, MockerModel};
use genset_engine_sample::{SampleArgs, SampleEngine};
use serde_json::{Value, json};

use crate::recital::Recital;
use crate::site::{Site, encode};
use crate::support::tiny_chat;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const QUESTION: &str = "What is the capital of Spain?";

/// Compares the answer cut at every place of `cuts`, given its length, with the undisturbed one.
async fn is_exact(site: &Site, path: &str, body: &Value, cuts: impl Fn(u32) -> Vec<Vec<u32>>) {
    let whole = site.ask(path, body, &[]).await;
    let tokens = whole.tokens();
    assert!(tokens > 1, "{path} {body}: {whole:?}");
    assert_eq!(whole.moves, 0);
    for cuts in cuts(tokens) {
        let cut = site.ask(path, body, &cuts).await;
        assert_eq!(cut.parts, whole.parts, "{path} {body} cut at {cuts:?}");
        assert!(cut.moves > 0, "{path} {body} was not cut at {cuts:?}");
    }
}

/// After the first token, in the middle, before the last, and twice.
fn usual(tokens: u32) -> Vec<Vec<u32>> {
    let (middle, last) = (tokens.div_ceil(2), tokens - 1);
    let mut cuts = vec![vec![1], vec![middle.min(last)], vec![last]];
    if middle > 1 && last > middle {
        cuts.push(vec![1, middle]);
        cuts.push(vec![1, middle, last]);
    }
    cuts
}

/// After every token.
fn everywhere(tokens: u32) -> Vec<Vec<u32>> {
    (1..tokens).map(|at| vec![at]).collect()
}

/// The answers of several choices differ in length: cut early, where all have tokens.
fn early(_: u32) -> Vec<Vec<u32>> {
    vec![vec![1], vec![3], vec![1, 4]]
}

fn chat(further: Value) -> Value {
    let mut body =
        json!({"model": "tiny-chat", "messages": [{"role": "user", "content": QUESTION}]});
    extend(&mut body, further);
    body
}

fn completion(further: Value) -> Value {
    let mut body = json!({"model": "tiny-chat", "prompt": "The capital of", "max_tokens": 12});
    extend(&mut body, further);
    body
}

fn extend(body: &mut Value, further: Value) {
    let (Value::Object(body), Value::Object(further)) = (body, further) else {
        panic!("further fields are an object")
    };
    body.extend(further);
}

/// The same, as a whole and as a stream.
async fn both_ways(site: &Site, path: &str, body: Value, cuts: fn(u32) -> Vec<Vec<u32>>) {
    is_exact(site, path, &body, cuts).await;
    let mut streamed = body;
    streamed["stream"] = true.into();
    if path == CHAT || path == COMPLETIONS {
        streamed["stream_options"] = json!({"include_usage": true});
    }
    is_exact(site, path, &streamed, cuts).await;
}

/// A seeded request with every sampling option.
fn every_option() -> Value {
    json!({
        "temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.001, "seed": 7, "max_tokens": 24,
        "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.1,
        "logit_bias": {"300": 1.5, "301": -100}, "ignore_eos": true,
    })
}

/// The test model, quantized.
fn candle() -> Arc<dyn LLMEngine> {
    candle_of(&tiny_chat().join("tiny-chat-q8_0.gguf"))
}

fn candle_of(model: &Path) -> Arc<dyn LLMEngine> {
    let args = CandleArgs {
        device: DeviceChoice::Cpu,
        kv_cache_memory: Some(ByteSize(8 << 20)),
        max_num_seqs: Some(8),
        threads: Some(1),
        ..CandleArgs::default()
    };
    Arc::new(CandleEngine::from_args(&args, model))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_models_answers_have_no_seam() {
    let site = Site::start(candle, |_| {}).await;
    let mut rated = every_option();
    extend(&mut rated, json!({"logprobs": true, "top_logprobs": 3}));
    let chats = [
        json!({"temperature": 0}),
        every_option(),
        rated,
        json!({"temperature": 0, "min_tokens": 18, "max_tokens": 24}),
        json!({"temperature": 0, "min_tokens": 6, "logit_bias": {"300": 3.0}}),
    ];
    for further in chats {
        both_ways(&site, CHAT, chat(further), usual).await;
    }
    let echo = json!({"echo": true, "temperature": 0});
    both_ways(&site, COMPLETIONS, completion(echo), usual).await;
    let rated = json!({"logprobs": 2, "temperature": 0});
    both_ways(&site, COMPLETIONS, completion(rated), usual).await;
    site.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_as_they_were_trained_answer_without_a_seam() {
    let site = Site::start(|| candle_of(&tiny_chat()), |_| {}).await;
    let regex = json!({"guided_regex": "[a-z]{4,9} [0-9]{3,6}!", "temperature": 0.8, "seed": 3});
    for further in [json!({"temperature": 0}), every_option(), regex] {
        both_ways(&site, CHAT, chat(further), usual).await;
    }
    site.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_strings_are_found_across_a_seam() {
    let site = Site::start(candle, |_| {}).await;
    let text = async |further: Value| {
        let whole = site.ask(CHAT, &chat(further), &[]).await;
        let text = whole.parts[0].pointer("/choices/0/message/content");
        text.and_then(Value::as_str).unwrap().to_owned()
    };
    let stop = json!({"temperature": 0, "stop": ["is Madrid"]});
    let all = text(json!({"temperature": 0})).await;
    let (before, _) = all.split_once("is Madrid").expect("it is in the answer");
    assert_eq!(text(stop.clone()).await, before);
    // A cut after every token: one of them is between the words.
    both_ways(&site, CHAT, chat(stop), everywhere).await;
    site.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_choice_moves_alone() {
    let site = Site::start(candle, |_| {}).await;
    let mut body = every_option();
    extend(&mut body, json!({"n": 4}));
    is_exact(&site, CHAT, &chat(body.clone()), early).await;
    extend(&mut body, json!({"best_of": 4, "echo": true}));
    is_exact(&site, COMPLETIONS, &completion(body), early).await;
    site.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bound_answers_keep_to_their_language_across_a_seam() {
    let site = Site::start(candle, |_| {}).await;
    let schema = json!({
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Madrid"]}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": false,
    });
    let weather =
        json!({"type": "function", "function": {"name": "weather", "parameters": schema}});
    let bound = [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}),
        json!({"guided_regex": "[a-z]{4,9} [0-9]{3,6}!"}),
        json!({"guided_choice": ["Paris is the capital", "Madrid is the capital"]}),
        json!({"guided_grammar": "start: \"a\" NUMBER \"b\" NUMBER\nNUMBER: /[0-9]{3}/"}),
        json!({"tools": [weather], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    ];
    for mut further in bound {
        extend(
            &mut further,
            json!({"temperature": 0.8, "seed": 3, "max_tokens": 60}),
        );
        both_ways(&site, CHAT, chat(further), everywhere).await;
    }
    site.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_apis_have_no_seam() {
    let site = Site::start(candle, |_| {}).await;
    let response = json!({"model": "tiny-chat", "input": QUESTION, "temperature": 0});
    both_ways(&site, "/v1/responses", response, usual).await;
    let messages = json!([{"role": "user", "content": QUESTION}]);
    let message =
        json!({"model": "tiny-chat", "max_tokens": 32, "messages": messages, "temperature": 0});
    both_ways(&site, "/v1/messages", message, usual).await;
    site.close().await;
}

/// Thoughts, text in between, and two calls, taken apart while they come.
const RECITED: &str = "<think>Let me see: 2 < 3.</think>Here it is. <tool_call>{\"name\": \"weather\", \"arguments\": \
    {\"city\": \"Orléans 🦀\", \"days\": [1, 2]}}</tool_call><tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call>";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thoughts_and_tool_calls_are_taken_apart_across_a_seam() {
    let tokens = encode(RECITED);
    let site = Site::start(
        || Arc::new(Recital(tokens.clone())),
        |config| {
            config.tool_parser = Some("hermes".into());
            config.reasoning_parser = Some("deepseek_r1".into());
        },
    )
    .await;
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    let tools = json!({"tools": [tool("weather"), tool("time")]});
    both_ways(&site, CHAT, chat(tools), everywhere).await;
    site.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_mocker_goes_on_where_it_was() {
    let mocker = || -> Arc<dyn LLMEngine> {
        let args = MockerArgs {
            speedup_ratio: 1000.0,
            ..MockerArgs::default()
        };
        let model = MockerModel::new(2000, 2048);
        Arc::new(MockerEngine::try_new(args, model).unwrap())
    };
    let site = Site::start(mocker, |_| {}).await;
    let body = chat(json!({"max_tokens": 40, "ignore_eos": true}));
    both_ways(&site, CHAT, body, everywhere).await;
    let several = completion(json!({"prompt": ["One", "Two"], "n": 2, "ignore_eos": true}));
    is_exact(&site, COMPLETIONS, &several, early).await;
    site.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sample_engine_goes_on_where_it_was() {
    let args = SampleArgs {
        vocab_size: 2000,
        token_delay_ms: 0,
    };
    let site = Site::start(|| Arc::new(SampleEngine::from_args(&args)), |_| {}).await;
    let body = chat(json!({"max_tokens": 40, "ignore_eos": true}));
    both_ways(&site, CHAT, body, everywhere).await;
    let several = completion(json!({"prompt": ["One", "Two"], "n": 2, "ignore_eos": true}));
    is_exact(&site, COMPLETIONS, &several, early).await;
    site.close().await;
}
