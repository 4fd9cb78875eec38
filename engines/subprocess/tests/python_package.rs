//! What an engine on the Python package can do, from the worker's side.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod support;

use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use genset_backend_common::kv::{KvEventPublisher, hash_blocks, sequence_root};
use genset_backend_common::{
    CancelReason, DrainContext, EngineError, ErrorKind, FinishReason, GenerateRequest,
    GuidedDecoding, Input, LLMEngine, Output, OutputStream, RequestContext, StartContext,
    context::TraceContext,
    controls::SleepLevel,
    request::{ChatInput, ScorePair},
};
use genset_engine_subprocess::SubprocessEngine;
use tokio::time::Instant;

const PATIENCE: Duration = Duration::from_secs(60);

/// The maximum number of unread items.
const WINDOW: u32 = 64;

async fn started(ctx: StartContext) -> SubprocessEngine {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/children/full.py");
    let mut config = support::program(&script);
    config.window = WINDOW;
    let engine = SubprocessEngine::new(config);
    let config = engine.start(ctx).await.unwrap();
    assert_eq!(config.model, "full-42");
    engine
}

async fn engine() -> SubprocessEngine {
    started(StartContext::detached(42)).await
}

fn request(what: &str) -> GenerateRequest {
    GenerateRequest::from_tokens(what, vec![1, 2, 3])
}

async fn ask(engine: &SubprocessEngine, request: GenerateRequest) -> OutputStream {
    let ctx = RequestContext::new("the-request");
    engine.generate(request, ctx).await.unwrap()
}

async fn items(engine: &SubprocessEngine, request: GenerateRequest) -> Vec<Output> {
    let outputs = ask(engine, request).await;
    outputs.map(Result::unwrap).collect().await
}

async fn error(engine: &SubprocessEngine, what: &str) -> EngineError {
    let outputs = ask(engine, request(what)).await;
    let mut errors: Vec<_> = outputs.filter_map(async |item| item.err()).collect().await;
    errors.pop().unwrap()
}

/// Waits until `check` returns a value; fails if it never does.
async fn soon<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = check().await {
            return value;
        }
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The aborts and ends that the engine has recorded.
async fn notes(engine: &SubprocessEngine) -> Vec<String> {
    let adapters = engine.controls().unwrap().adapters().await.unwrap();
    adapters.into_iter().map(|adapter| adapter.name).collect()
}

/// Waits until so many requests are stuck in the engine. One that is cancelled before its turn never reaches it.
async fn have_begun(count: usize, engine: &SubprocessEngine) {
    soon("stuck in the engine", async || {
        let notes = notes(engine).await;
        let begun = notes.iter().filter(|note| *note == "stuck began").count();
        (begun == count).then_some(())
    })
    .await;
}

fn text(items: &[Output]) -> &str {
    let Some(Output::Text(chunk)) = items.first() else {
        panic!("no text, but {items:?}")
    };
    &chunk.text
}

#[tokio::test]
async fn what_is_published_reaches_the_workers_handles() {
    let ctx = StartContext::detached(42);
    let (load, metrics, kv_events) = (
        ctx.load.subscribe(),
        ctx.metrics.clone(),
        ctx.kv_events.clone(),
    );
    let progress = ctx.progress.subscribe();
    let engine = started(ctx).await;
    assert_eq!(progress.borrow().fraction, Some(0.25));
    soon("the metric", async || {
        let is_there = metrics.encode().contains("full_steps_total 3.0");
        is_there.then_some(())
    })
    .await;
    let text = metrics.encode();
    for line in [
        "full_queue{rank=\"0\"} 2.5",
        "full_step_seconds_bucket{le=\"1.0\"} 1",
        "full_step_seconds_bucket{le=\"+Inf\"} 1",
        "full_step_seconds_sum 0.5",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    assert_eq!(load.borrow().kv_used_blocks, 5);
    let blocks = |cache: &KvEventPublisher| cache.subscribe().snapshot.blocks.len();
    let ranks = [0, 1, 2, 3].map(|rank| blocks(&kv_events.known_rank(rank).unwrap()));
    assert_eq!((ranks, blocks(&kv_events)), ([1, 3, 0, 2], 5));
    let cache = kv_events.known_rank(1).unwrap().subscribe();
    let mut hashed: Vec<_> = { cache.snapshot.blocks.iter() }.map(|it| it.hash).collect();
    hashed.sort_unstable();
    let root = sequence_root(Some("tenant"), Some("french"));
    let tokens: Vec<u32> = (0..100).collect();
    let size = NonZeroU32::new(32).unwrap();
    let mut expected = hash_blocks(root, &tokens, size);
    expected.sort_unstable();
    assert_eq!(hashed, expected, "Python hashes as routers do");
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn steps_reach_the_workers_health() {
    let ctx = StartContext::detached(42);
    let health = ctx.health.clone();
    let engine = started(ctx).await;
    assert_eq!(health.steps(), 0);
    items(&engine, request("step")).await;
    soon("a step", async || (health.steps() > 0).then_some(())).await;
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_request_arrives_with_its_context() {
    let engine = engine().await;
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let ctx = RequestContext::new("r-1")
        .with_header("X-Tenant", "acme")
        .with_trace(TraceContext::parse(parent, "").unwrap())
        .with_deadline(Instant::now() + PATIENCE);
    let outputs = engine.generate(request("echo_context"), ctx).await.unwrap();
    let items: Vec<Output> = outputs.map(Result::unwrap).collect().await;
    assert_eq!(text(&items), "['r-1', 'acme', '00', True]");
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn every_kind_of_input_and_guided_decoding_arrives() {
    let engine = engine().await;
    let mut guided = request("echo_request");
    guided.guided = Some(GuidedDecoding::JsonObject.into());
    guided.stop.max_tokens = Some(9);
    let shown = items(&engine, guided).await;
    let shown = text(&shown);
    assert!(shown.contains("'token_ids': [1, 2, 3]"), "{shown}");
    assert!(
        shown.contains("'guided_decoding': {'json_object': True}"),
        "{shown}"
    );
    assert!(shown.contains("'max_tokens': 9"), "{shown}");
    let mut schema = GenerateRequest::from_text("echo_request", "hello");
    schema.guided = Some(GuidedDecoding::JsonSchema(serde_json::json!({"type": "object"})).into());
    let shown = items(&engine, schema).await;
    assert!(text(&shown).contains("'text': 'hello'"));
    assert!(text(&shown).contains("{'json_schema': {'type': 'object'}}"));
    let messages = vec![serde_json::json!({"role": "user", "content": "hi"})];
    let chat = ChatInput {
        messages,
        tools: Vec::new(),
    };
    let shown = items(&engine, GenerateRequest::from_chat("echo_request", chat)).await;
    assert!(text(&shown).contains("'content': 'hi'"));
    let mut embed = request("embed");
    embed.input = Input::Embed(vec![vec![1], vec![2, 3]].into());
    let embedded = items(&engine, embed).await;
    assert_eq!(embedded[0], Output::Embeddings(vec![vec![0.5, 1.0]; 2]));
    let mut score = request("score");
    let pair = |first_tokens| ScorePair {
        token_ids: vec![1, 2, 3, 4],
        first_tokens,
    };
    score.input = Input::Score([pair(1), pair(3)].into());
    let scored = items(&engine, score).await;
    assert_eq!(scored[0], Output::Scores(vec![0.25, 0.75]));
    let Some(Output::Finished(finished)) = scored.last() else {
        panic!("a terminal comes last: {scored:?}")
    };
    assert_eq!(finished.usage.prompt_tokens, 8);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn every_kind_of_grammar_and_the_rank_arrive() {
    let engine = engine().await;
    let cases = [
        (GuidedDecoding::Regex("a+".into()), "{'regex': 'a+'}"),
        (
            GuidedDecoding::Choice(vec!["a".into(), "b".into()]),
            "{'choice': ['a', 'b']}",
        ),
        (GuidedDecoding::Grammar("g".into()), "{'grammar': 'g'}"),
    ];
    for (guided, expected) in cases {
        let mut request = request("echo_request");
        request.guided = Some(guided.into());
        request.data_parallel_rank = Some(3);
        let shown = items(&engine, request).await;
        let shown = text(&shown);
        assert!(shown.contains(expected), "{shown}");
        assert!(shown.contains("'data_parallel_rank': 3"), "{shown}");
    }
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn an_engine_declares_its_ranks_and_its_canary() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/children/full.py");
    let engine = SubprocessEngine::new(support::program(&script));
    let config = engine.start(StartContext::detached(42)).await.unwrap();
    assert_eq!(config.data_parallel_size, 4);
    let canary = config.canary.unwrap();
    assert!(matches!(&canary.input, Input::Chat(chat) if chat.messages.len() == 1));
    assert_eq!(canary.stop.max_tokens, Some(1));
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn logprobs_and_usage_come_through() {
    let engine = engine().await;
    let items = items(&engine, request("logprobs")).await;
    let Output::Tokens(chunk) = &items[0] else {
        panic!("no tokens: {items:?}")
    };
    assert_eq!(chunk.logprobs[0].top[0].token_id, 7);
    let Output::Finished(finished) = &items[1] else {
        panic!("no terminal: {items:?}")
    };
    assert_eq!(finished.reason, FinishReason::Length);
    assert_eq!(finished.last.token_ids[..], [8]);
    assert_eq!(
        (
            finished.usage.prompt_tokens,
            finished.usage.completion_tokens
        ),
        (3, 2)
    );
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn exceptions_keep_their_kind_and_end_no_other_request() {
    let engine = engine().await;
    let overloaded = error(&engine, "overloaded").await;
    assert_eq!(overloaded.kind(), ErrorKind::Overloaded);
    assert_eq!(
        overloaded.details().retry_after,
        Some(Duration::from_millis(1500))
    );
    let bug = error(&engine, "bug").await;
    assert_eq!(bug.kind(), ErrorKind::Internal);
    assert_eq!(bug.message(), "ZeroDivisionError: by nought");
    for (what, kind) in [
        ("bad_token", ErrorKind::Internal),
        ("no_such_method", ErrorKind::Internal),
        ("no_end", ErrorKind::StreamIncomplete),
    ] {
        assert_eq!(error(&engine, what).await.kind(), kind, "{what}");
    }
    // An unknown finish reason counts as stop.
    let ended = items(&engine, request("bad_reason")).await.pop();
    assert!(
        matches!(ended, Some(Output::Finished(finished)) if matches!(finished.reason, genset_backend_common::FinishReason::Stop)),
    );
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_reader_that_stops_makes_the_engine_wait() {
    let engine = engine().await;
    let mut outputs = ask(&engine, request("endless")).await;
    outputs.next().await.unwrap().unwrap();
    let controls = engine.controls().unwrap();
    let produced = async || {
        let location = controls.stop_profile().await.unwrap();
        let count: u64 = location.rsplit(' ').next().unwrap().parse().unwrap();
        count
    };
    // The window, and one item that waits for credit.
    let at_rest = soon("the window is full", async || {
        let count = produced().await;
        (count > u64::from(WINDOW)).then_some(count)
    })
    .await;
    for _ in 0..20 {
        assert_eq!(produced().await, at_rest);
    }
    assert_eq!(at_rest, u64::from(WINDOW) + 1);
    for _ in 0..40 {
        outputs.next().await.unwrap().unwrap();
    }
    soon("the engine goes on", async || {
        (produced().await > at_rest).then_some(())
    })
    .await;
    drop(outputs);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_cancelled_request_ends_at_once_and_is_aborted() {
    let engine = engine().await;
    let ctx = RequestContext::new("cancelled-one");
    let mut outputs = engine
        .generate(request("stuck"), ctx.clone())
        .await
        .unwrap();
    assert!(outputs.next().now_or_never().is_none());
    have_begun(1, &engine).await;
    ctx.cancel(CancelReason::Client);
    let Some(Ok(Output::Finished(finished))) = outputs.next().await else {
        panic!("a terminal")
    };
    assert_eq!(finished.reason, FinishReason::Cancelled);
    let outputs = ask(&engine, request("stuck")).await;
    have_begun(2, &engine).await;
    drop(outputs);
    soon("both aborted, and ended where they waited", async || {
        let notes = notes(&engine).await;
        let both = notes.contains(&"cancelled-one".into()) && notes.contains(&"the-request".into());
        let ended = notes.iter().filter(|note| *note == "stuck ended").count();
        (both && ended == 2).then_some(())
    })
    .await;
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn controls_and_drain_reach_the_engine() {
    let engine = engine().await;
    let controls = engine.controls().unwrap();
    controls.sleep(SleepLevel::Weights).await.unwrap();
    assert_eq!(controls.stop_profile().await.unwrap(), "weights 0");
    let missing = controls.wake().await.unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Unsupported);
    let drain = DrainContext { deadline: PATIENCE };
    engine.drain(drain).await.unwrap();
    assert_eq!(notes(&engine).await, ["drained"]);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn requests_of_a_stopped_engine_end_as_shut_down() {
    let engine = engine().await;
    let mut outputs = ask(&engine, request("stuck")).await;
    engine.cleanup().await.unwrap();
    let error = outputs.next().await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::EngineShutdown);
    let refused = engine.generate(request("stuck"), RequestContext::new("r"));
    assert_eq!(refused.await.unwrap_err().kind(), ErrorKind::EngineShutdown);
}
