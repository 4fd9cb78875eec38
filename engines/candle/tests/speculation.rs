//! Speculation with a real model: answers equal those without it, bit for bit, alone and in batches; and rejected settings.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::path::{Path, PathBuf};

use futures_util::StreamExt;
use futures_util::future::join_all;
use genset_backend_common::byte_size::ByteSize;
use genset_backend_common::{
    GenerateRequest, LLMEngine, RequestContext, Role, StartContext, TokenId,
};
use genset_conformance::Answer;
use genset_devtools::checkout::read_tokenizer;
use genset_devtools::synthetic::{SyntheticSize, make_model};
use genset_devtools::tiny_chat;
use genset_engine_candle::{CandleArgs, CandleEngine, DeviceChoice, SpeculationArgs};
use serde_json::Value;

fn args(speculation: SpeculationArgs) -> CandleArgs {
    CandleArgs {
        device: DeviceChoice::Cpu,
        kv_cache_memory: Some(ByteSize(16 << 20)),
        max_num_seqs: Some(8),
        max_num_batched_tokens: Some(64),
        speculation,
        ..CandleArgs::default()
    }
}

fn ngram(tokens: u32) -> SpeculationArgs {
    SpeculationArgs {
        speculate: "ngram".parse().ok(),
        num_speculative_tokens: tokens.try_into().ok(),
        ..SpeculationArgs::default()
    }
}

fn draft_model(path: PathBuf, tokens: u32) -> SpeculationArgs {
    SpeculationArgs {
        draft_model: Some(path),
        num_speculative_tokens: tokens.try_into().ok(),
        ..SpeculationArgs::default()
    }
}

/// A model with random weights, and tiny-chat's tokenizer changed by `change`.
fn random_model(folder: &Path, change: impl FnOnce(&mut Value)) -> PathBuf {
    let text = std::fs::read(tiny_chat::folder().join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_slice(&text).unwrap();
    change(&mut tokenizer);
    let model = folder.join("random");
    make_model(&model, SyntheticSize::Tiny, 1).unwrap();
    std::fs::write(model.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    model
}

/// Prompts of several lengths, some with repetitions; greedy and seeded, with log probabilities.
fn requests() -> Vec<GenerateRequest> {
    let tokenizer = read_tokenizer(tiny_chat::folder()).unwrap();
    let texts = [
        "one two three four one two three",
        "The capital of France is",
        "a b c d e f g a b c d e f g a b c",
        "What is the capital of France? The capital of France is Paris. What is the capital of France?",
        "Hello",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4,",
        "Once upon a time there was a",
        "yes yes yes yes yes",
    ];
    let mut requests = Vec::new();
    for (number, text) in (0u64..).zip(texts) {
        for temperature in [0.0, 0.8] {
            let prompt: Vec<TokenId> = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
            let mut request = GenerateRequest::from_tokens("m", prompt);
            request.stop.max_tokens = Some(32);
            request.stop.ignore_eos = true;
            request.sampling.temperature = Some(temperature);
            request.sampling.seed = Some(number);
            request.output.logprobs = Some(4);
            requests.push(request);
        }
    }
    requests
}

async fn answer(engine: &CandleEngine, request: GenerateRequest) -> Answer {
    let outputs = engine.generate(request, RequestContext::new("r")).await;
    Answer::of(outputs.unwrap().collect().await)
}

async fn started(speculation: SpeculationArgs) -> CandleEngine {
    let engine = CandleEngine::from_args(&args(speculation), tiny_chat::folder());
    engine.start(StartContext::detached(1)).await.unwrap();
    engine
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_those_without_it_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let same = tiny_chat::folder().join("tiny-chat-q8_0.gguf");
    let random = random_model(folder.path(), |_| {});
    let plain = started(SpeculationArgs::default()).await;
    let mut expected = Vec::new();
    for request in requests() {
        expected.push(answer(&plain, request).await);
    }
    plain.cleanup().await.unwrap();
    for (speculation, least_accepted) in [
        (ngram(4), 20),
        (draft_model(same, 5), 300),
        (draft_model(random, 3), 0),
    ] {
        let engine = started(speculation.clone()).await;
        // All at once, so that drafts run beside chunks of prompts; then one after another, with cached prompts.
        let mut answers = join_all(requests().into_iter().map(|it| answer(&engine, it))).await;
        for request in requests() {
            answers.push(answer(&engine, request).await);
        }
        let (mut accepted, mut rejected) = (0, 0);
        for (answer, expected) in answers.iter().zip(expected.iter().cycle()) {
            assert_eq!(answer.tokens(), expected.tokens(), "{speculation:?}");
            // Compared exactly: equal logits, bit for bit.
            assert_eq!(answer.logprobs(), expected.logprobs(), "{speculation:?}");
            let predictions = answer.usage().unwrap().predictions.unwrap_or_default();
            accepted += predictions.accepted;
            rejected += predictions.rejected;
        }
        assert!(accepted >= least_accepted, "{speculation:?}: {accepted}");
        assert!(rejected > 0, "{speculation:?}: {rejected}");
        engine.cleanup().await.unwrap();
    }
}

async fn refusal(speculation: SpeculationArgs, role: Role) -> (String, String) {
    let engine = CandleEngine::from_args(&args(speculation), tiny_chat::folder());
    let start = StartContext {
        role,
        ..StartContext::detached(1)
    };
    let error = engine.start(start).await.unwrap_err();
    engine.cleanup().await.unwrap();
    let at = error
        .at()
        .map(|at| at.name().to_owned())
        .unwrap_or_default();
    (at, error.message().to_owned())
}

#[tokio::test]
async fn a_draft_model_with_another_vocabulary_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let other = random_model(folder.path(), |tokenizer| {
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let names: Vec<String> = vocab
            .iter()
            .filter(|(_, id)| [Some(300), Some(301)].contains(&id.as_u64()))
            .map(|(name, _)| name.clone())
            .collect();
        let ids: Vec<Value> = names.iter().map(|name| vocab[name].clone()).collect();
        vocab.insert(names[0].clone(), ids[1].clone());
        vocab.insert(names[1].clone(), ids[0].clone());
    });
    let (at, message) = refusal(draft_model(other, 4), Role::Aggregated).await;
    assert_eq!(at, "--draft-model");
    assert!(
        message.contains("random has another vocabulary than tiny-chat")
            && message.contains("2 are others or have other ids"),
        "{message}"
    );
}

#[tokio::test]
async fn a_draft_model_that_is_none_and_roles_without_one_are_refused() {
    let (at, message) = refusal(draft_model("/nowhere".into(), 4), Role::Aggregated).await;
    assert_eq!(at, "--draft-model");
    assert!(message.contains("/nowhere"), "{message}");
    let same = tiny_chat::folder().to_owned();
    for role in [Role::Prefill, Role::Decode] {
        let (at, message) = refusal(draft_model(same.clone(), 4), role).await;
        assert_eq!(at, "--draft-model");
        assert!(message.contains("--speculate ngram"), "{message}");
    }
    let (at, _) = refusal(draft_model(same, 33), Role::Aggregated).await;
    assert_eq!(at, "--num-speculative-tokens");
}

#[tokio::test]
async fn one_cache_memory_is_for_both_models() {
    let blocks = |speculation| async {
        let engine = CandleEngine::from_args(&args(speculation), tiny_chat::folder());
        let config = engine.start(StartContext::detached(1)).await.unwrap();
        engine.cleanup().await.unwrap();
        config.kv_total_blocks.unwrap()
    };
    let alone = blocks(SpeculationArgs::default()).await;
    let both = blocks(draft_model(tiny_chat::folder().into(), 4)).await;
    assert_eq!(both, alone / 2);
}
