//! Operations on stand-in servers, which have the routes of the real servers and crash where those would.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    dead_code,
    reason = "a test fails by panicking, and no test file needs all of the support"
)]

mod support;

use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use genset_backend_common::controls::SleepLevel;
use genset_backend_common::{
    EngineControls, EngineError, ErrorKind, GenerateRequest, LLMEngine, OutputStream,
    RequestContext, StartContext,
};
use genset_engine_launcher::{LauncherConfig, LauncherEngine};
use serde_json::json;
use tokio::time::{sleep, timeout};

use support::{LONG, Reports, config, operated, read};

async fn started(config: LauncherConfig) -> LauncherEngine {
    let engine = LauncherEngine::new(config);
    engine.start(StartContext::detached(1)).await.unwrap();
    engine
}

fn controls(engine: &LauncherEngine) -> &dyn EngineControls {
    engine.controls().unwrap()
}

async fn ask(engine: &LauncherEngine, tokens: u32) -> Result<OutputStream, EngineError> {
    let mut request = GenerateRequest::from_tokens("m", vec![5, 6, 7, 8]);
    request.stop.max_tokens = Some(tokens);
    request.stop.ignore_eos = true;
    request.sampling.temperature = Some(0.0);
    engine.generate(request, RequestContext::new("r")).await
}

async fn answer(engine: &LauncherEngine, tokens: u32) -> Vec<u32> {
    let answer = read(ask(engine, tokens).await.unwrap()).await;
    answer.end.unwrap();
    answer.tokens
}

/// The paths and bodies of the next `count` calls.
async fn asked(reports: &mut Reports, count: usize) -> Vec<(String, serde_json::Value)> {
    let mut asked = Vec::new();
    for _ in 0..count {
        let mut control = reports.next("control").await;
        let path = control["path"].as_str().unwrap().to_owned();
        asked.push((path, control["body"].take()));
    }
    asked
}

fn bare(paths: &[&str]) -> Vec<(String, serde_json::Value)> {
    let bare = paths.iter().map(|path| ((*path).to_owned(), json!(null)));
    bare.collect()
}

async fn refused(asked: impl Future<Output = Result<(), EngineError>>) -> String {
    let error = asked.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    error.message().to_owned()
}

/// Requests and canaries are refused with an error that lets them migrate; nothing reaches the server.
async fn is_closed(engine: &LauncherEngine) {
    let refused = ask(engine, 4).await.map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Overloaded);
    assert!(refused.message().contains("sleeps"), "{refused}");
}

#[tokio::test]
async fn a_vllm_sleeps_at_both_levels_and_answers_as_before() {
    let mut reports = Reports::listen().await;
    let engine = started(operated("vllm", &[&reports.flag()])).await;
    let before = answer(&engine, 6).await;
    let controls = controls(&engine);

    controls.sleep(SleepLevel::KvCache).await.unwrap();
    controls.sleep(SleepLevel::KvCache).await.unwrap();
    is_closed(&engine).await;
    controls.wake().await.unwrap();
    controls.wake().await.unwrap();
    let paths = ["/sleep?level=0", "/release_kv_cache_memory", "/wake_up"];
    assert_eq!(asked(&mut reports, 3).await, bare(&paths));
    assert_eq!(answer(&engine, 6).await, before);

    controls.sleep(SleepLevel::KvCache).await.unwrap();
    controls.sleep(SleepLevel::Weights).await.unwrap();
    controls.sleep(SleepLevel::KvCache).await.unwrap();
    is_closed(&engine).await;
    controls.wake().await.unwrap();
    let paths = [paths[0], paths[1], "/sleep?level=1", paths[2]];
    assert_eq!(asked(&mut reports, 4).await, bare(&paths));
    assert_eq!(answer(&engine, 6).await, before);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn an_sglang_sleeps_and_nobody_has_it_generate_meanwhile() {
    let mut reports = Reports::listen().await;
    let mut config = operated("sglang", &[&reports.flag()]);
    // Its health check is a request, which would crash it.
    config.health_interval = Duration::from_millis(5);
    let engine = started(config).await;
    let before = answer(&engine, 6).await;
    let controls = controls(&engine);

    controls.sleep(SleepLevel::KvCache).await.unwrap();
    controls.sleep(SleepLevel::Weights).await.unwrap();
    is_closed(&engine).await;
    sleep(Duration::from_millis(100)).await;
    controls.clear_prefix_cache().await.unwrap();
    controls.wake().await.unwrap();
    controls.wake().await.unwrap();
    let tags = |tags: &[&str]| json!({ "tags": tags });
    let expected = [
        ("/flush_cache?timeout=5", json!(null)),
        ("/release_memory_occupation", tags(&["kv_cache"])),
        ("/release_memory_occupation", tags(&["weights"])),
        ("/resume_memory_occupation", tags(&["kv_cache", "weights"])),
    ];
    let expected = expected.map(|(path, body)| (path.to_owned(), body));
    assert_eq!(asked(&mut reports, 4).await, expected);
    assert_eq!(answer(&engine, 6).await, before);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn requests_under_way_end_before_the_server_sleeps() {
    for api in ["vllm", "sglang"] {
        let engine = started(operated(api, &["--delay=0.01"])).await;
        let outputs = ask(&engine, 20).await.unwrap();
        let sleep = controls(&engine).sleep(SleepLevel::Weights);
        let (answer, slept) = tokio::join!(read(outputs), sleep);
        answer.end.unwrap();
        assert_eq!(answer.tokens.len(), 20, "{api}");
        slept.unwrap();
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn what_sleep_needs_is_named() {
    let engine = started(config("vllm", &[])).await;
    let error = refused(controls(&engine).sleep(SleepLevel::KvCache)).await;
    assert!(error.contains("enable-sleep-mode"), "{error}");
    let error = refused(controls(&engine).clear_prefix_cache()).await;
    assert!(error.contains("VLLM_SERVER_DEV_MODE=1"), "{error}");
    answer(&engine, 2).await;
    engine.cleanup().await.unwrap();

    // The flag alone, without the routes.
    let engine = started(config("vllm", &["--enable-sleep-mode"])).await;
    let error = refused(controls(&engine).sleep(SleepLevel::KvCache)).await;
    assert_eq!(
        error,
        "sleep needs VLLM_SERVER_DEV_MODE=1 in the worker's environment"
    );
    answer(&engine, 2).await;
    engine.cleanup().await.unwrap();

    let engine = started(config("sglang", &[])).await;
    let error = refused(controls(&engine).sleep(SleepLevel::KvCache)).await;
    assert!(error.contains("enable-memory-saver"), "{error}");
    engine.cleanup().await.unwrap();

    let engine = started(config("sglang", &["--enable-memory-saver"])).await;
    let error = refused(controls(&engine).sleep(SleepLevel::Weights)).await;
    assert!(error.contains("enable-weights-cpu-backup"), "{error}");
    controls(&engine).sleep(SleepLevel::KvCache).await.unwrap();
    controls(&engine).wake().await.unwrap();
    answer(&engine, 2).await;
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_sleep_that_is_refused_leaves_the_server_awake() {
    let engine = started(operated("vllm", &["--fault", "sleep-fails"])).await;
    let error = controls(&engine).sleep(SleepLevel::Weights).await;
    let error = error.unwrap_err();
    assert!(error.message().contains("CUDA error"), "{error}");
    answer(&engine, 2).await;
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn an_older_vllm_that_cannot_free_its_kv_cache_alone_keeps_its_weights_and_its_requests() {
    let engine = started(operated("vllm", &["--fault", "old", "--delay=0.02"])).await;
    let before = answer(&engine, 6).await;
    let mut reading = pin!(read(ask(&engine, 150).await.unwrap()));
    let error = tokio::select! {
        _ = &mut reading => panic!("it waited for the request"),
        error = refused(controls(&engine).sleep(SleepLevel::KvCache)) => error,
    };
    assert!(error.contains("ask for level weights"), "{error}");
    let long = reading.await;
    long.end.unwrap();
    assert_eq!(long.tokens.len(), 150);
    assert_eq!(answer(&engine, 6).await, before);

    controls(&engine).wake().await.unwrap();
    controls(&engine).sleep(SleepLevel::Weights).await.unwrap();
    controls(&engine).wake().await.unwrap();
    assert_eq!(answer(&engine, 6).await, before);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_server_that_does_not_wake_gets_no_requests_until_it_does() {
    let engine = started(operated("vllm", &["--fault", "wake-fails"])).await;
    controls(&engine).sleep(SleepLevel::Weights).await.unwrap();
    let error = controls(&engine).wake().await.unwrap_err();
    assert!(error.message().contains("CUDA out of memory"), "{error}");
    is_closed(&engine).await;
    controls(&engine).wake().await.unwrap();
    answer(&engine, 2).await;
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn the_prefix_cache_is_cleared_beside_requests() {
    let mut reports = Reports::listen().await;
    let flag = reports.flag();
    let engine = started(operated("vllm", &[&flag, "--delay=0.02"])).await;
    let mut outputs = ask(&engine, 150).await.unwrap();
    timeout(LONG, outputs.next()).await.unwrap();
    controls(&engine).clear_prefix_cache().await.unwrap();
    let path = "/reset_prefix_cache";
    let paths = [path, "/reset_prefix_cache?reset_running_requests=true"];
    assert_eq!(asked(&mut reports, 2).await, bare(&paths));
    read(outputs).await.end.unwrap();
    controls(&engine).clear_prefix_cache().await.unwrap();
    assert_eq!(asked(&mut reports, 1).await, bare(&[path]));
    engine.cleanup().await.unwrap();

    // An older vLLM does not report whether anything was cleared.
    let flags = [flag.as_str(), "--delay=0.02", "--fault", "old"];
    let engine = started(operated("vllm", &flags)).await;
    let mut outputs = ask(&engine, 150).await.unwrap();
    timeout(LONG, outputs.next()).await.unwrap();
    controls(&engine).clear_prefix_cache().await.unwrap();
    assert_eq!(asked(&mut reports, 2).await, bare(&paths));
    engine.cleanup().await.unwrap();

    // SGLang waits some time for running requests to end.
    let engine = started(operated("sglang", &["--delay=0.01"])).await;
    let outputs = ask(&engine, 30).await.unwrap();
    let clear = controls(&engine).clear_prefix_cache();
    let (read, cleared) = tokio::join!(read(outputs), clear);
    read.end.unwrap();
    cleared.unwrap();
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn blocks_that_are_being_transferred_are_cleared_later() {
    let flags = ["--delay=0.02", "--fault", "transfers"];
    let engine = started(operated("vllm", &flags)).await;
    let mut outputs = ask(&engine, 150).await.unwrap();
    timeout(LONG, outputs.next()).await.unwrap();
    let held = controls(&engine).clear_prefix_cache().await.unwrap_err();
    assert_eq!(held.kind(), ErrorKind::Unavailable, "{held}");
    assert!(held.message().contains("ask again"), "{held}");
    read(outputs).await.end.unwrap();
    controls(&engine).clear_prefix_cache().await.unwrap();
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn sglang_exchanges_its_weights_and_says_why_not() {
    let mut reports = Reports::listen().await;
    let engine = started(operated("sglang", &[&reports.flag()])).await;
    let controls = controls(&engine);
    let error = controls
        .update_weights(json!("no/such/folder"))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("is not a local folder"), "{error}");
    answer(&engine, 2).await;
    let folder = env!("CARGO_MANIFEST_DIR");
    let source = json!({"model_path": folder, "load_format": "auto"});
    controls.update_weights(source.clone()).await.unwrap();
    let expected = [
        ("/flush_cache?timeout=5", json!(null)),
        ("/flush_cache?timeout=5", json!(null)),
        ("/update_weights_from_disk", source),
    ];
    let expected = expected.map(|(path, body)| (path.to_owned(), body));
    assert_eq!(asked(&mut reports, 3).await, expected);
    controls.sleep(SleepLevel::KvCache).await.unwrap();
    let error = controls.update_weights(json!(folder)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_server_that_does_not_say_what_became_of_its_weights_gets_requests_once_it_answers() {
    let mut reports = Reports::listen().await;
    let config = operated("sglang", &[&reports.flag(), "--fault", "update-lost"]);
    let engine = started(config).await;
    let folder = env!("CARGO_MANIFEST_DIR");
    let lost = controls(&engine).update_weights(json!(folder)).await;
    assert_eq!(lost.unwrap_err().kind(), ErrorKind::Disconnected);
    let path = "/flush_cache?timeout=5";
    assert_eq!(asked(&mut reports, 2).await, bare(&[path, path]));
    answer(&engine, 2).await;
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_profile_is_begun_once_and_ended_once() {
    for (api, place) in [("vllm", "/profiles"), ("sglang", "/sglang-profiles")] {
        let mut config = operated(api, &[]);
        let variable = "SGLANG_TORCH_PROFILER_DIR".to_owned();
        config.env.insert(variable, "/sglang-profiles".into());
        let engine = started(config).await;
        let controls = controls(&engine);
        let early = controls.stop_profile().await.unwrap_err();
        assert_eq!(early.kind(), ErrorKind::InvalidArgument, "{api}");
        controls.start_profile().await.unwrap();
        let twice = controls.start_profile().await.unwrap_err();
        assert_eq!(twice.kind(), ErrorKind::InvalidArgument, "{api}");
        assert_eq!(controls.stop_profile().await.unwrap(), place);
        let late = controls.stop_profile().await.unwrap_err();
        assert_eq!(late.kind(), ErrorKind::InvalidArgument, "{api}");
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn requests_under_way_go_on_behind_a_profile_and_new_ones_are_refused_meanwhile() {
    for api in ["vllm", "sglang"] {
        let engine = started(operated(api, &["--delay=0.01"])).await;
        let controls = controls(&engine);
        controls.start_profile().await.unwrap();
        let outputs = ask(&engine, 20).await.unwrap();
        // `stop_profile` makes its call before its first await.
        let (stopped, refused) = tokio::join!(controls.stop_profile(), ask(&engine, 2));
        stopped.unwrap();
        let refused = refused.map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Overloaded, "{api}");
        assert!(refused.message().contains("a profile"), "{refused}");
        let long = read(outputs).await;
        long.end.unwrap();
        assert_eq!(long.tokens.len(), 20, "{api}");
        answer(&engine, 2).await;
        engine.cleanup().await.unwrap();
    }
}
