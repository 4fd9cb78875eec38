//! Operations on stand-in servers, which have the routes of the real servers and crash where those would.

use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use genset_backend_common::controls::{Adapter, SleepLevel};
use genset_backend_common::{
    EngineControls, EngineError, ErrorKind, LLMEngine, OutputStream, RequestContext, StartContext,
};
use genset_engine_launcher::{LauncherEngine, RestartPolicy};
use serde_json::json;
use tempfile::TempDir;
use tokio::time::{sleep, timeout};

use crate::support::{
    Answer, LONG, Reports, adapter_folder, config, kill, operated, read, request, started,
};

fn controls(engine: &LauncherEngine) -> &dyn EngineControls {
    engine.controls().unwrap()
}

async fn ask(engine: &LauncherEngine, tokens: u32) -> Result<OutputStream, EngineError> {
    let mut request = request(&[5, 6, 7, 8], tokens);
    request.stop.ignore_eos = true;
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

/// Requests and canaries are refused as `Overloaded`, so that they can be sent elsewhere; nothing reaches the server.
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

fn adapter(name: &str, folder: &TempDir) -> Adapter {
    Adapter {
        name: name.into(),
        source: folder.path().display().to_string(),
    }
}

/// A request of three blocks of 32 tokens and a few more, under an adapter or for the model alone.
async fn ask_under(
    engine: &LauncherEngine,
    adapter: Option<&str>,
) -> Result<OutputStream, EngineError> {
    let prompt: Vec<u32> = (300..400).collect();
    let mut request = request(&prompt, 6);
    request.adapter = adapter.map(str::to_owned);
    request.stop.ignore_eos = true;
    engine.generate(request, RequestContext::new("r")).await
}

async fn under(engine: &LauncherEngine, adapter: Option<&str>) -> Answer {
    let answer = read(ask_under(engine, adapter).await.unwrap()).await;
    assert_eq!(answer.finished().usage.completion_tokens, 6);
    answer
}

async fn is_unknown(engine: &LauncherEngine, adapter: &str) {
    let error = ask_under(engine, Some(adapter)).await.map(drop);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn a_vllm_takes_adapters_while_it_serves_and_reuses_nothing_of_a_former_one() {
    let mut reports = Reports::listen().await;
    let config = operated("vllm", &[&reports.flag(), "--block-size=32"]);
    let engine = LauncherEngine::new(config);
    let declared = engine.start(StartContext::detached(1)).await.unwrap();
    assert!(declared.capabilities.adapters);
    let controls = controls(&engine);
    let (four, eight) = (adapter_folder(4), adapter_folder(8));
    let base = under(&engine, None).await.tokens;
    is_unknown(&engine, "french").await;

    let first = adapter("french", &four);
    controls.load_adapter(first.clone()).await.unwrap();
    let loaded = std::slice::from_ref(&first);
    assert_eq!(controls.adapters().await.unwrap(), loaded);
    let french = under(&engine, Some("french")).await.tokens;
    assert_ne!(french, base);
    let twice = controls.load_adapter(first.clone()).await.unwrap_err();
    assert_eq!(twice.kind(), ErrorKind::InvalidArgument);
    assert!(twice.message().contains("unload it first"), "{twice}");
    controls.unload_adapter("french").await.unwrap();
    assert!(controls.adapters().await.unwrap().is_empty());
    is_unknown(&engine, "french").await;

    controls
        .load_adapter(adapter("french", &eight))
        .await
        .unwrap();
    let other = under(&engine, Some("french")).await;
    assert_eq!(other.finished().usage.cached_tokens, Some(0));
    assert!(other.tokens != french && other.tokens != base);
    let again = under(&engine, Some("french")).await;
    assert_eq!(again.finished().usage.cached_tokens, Some(96));
    assert_eq!(again.tokens, other.tokens);
    assert_eq!(under(&engine, None).await.tokens, base);
    let (load, unload) = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter");
    let (four, eight) = (four.path(), eight.path());
    let expected = [
        (load, json!({"lora_name": "french#1", "lora_path": four})),
        (unload, json!({"lora_name": "french#1"})),
        (load, json!({"lora_name": "french#2", "lora_path": eight})),
    ];
    let expected = expected.map(|(path, body)| (path.to_owned(), body));
    assert_eq!(asked(&mut reports, 3).await, expected);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn an_adapter_that_cannot_be_loaded_or_unloaded_changes_nothing() {
    let engine = started(operated("vllm", &["--fault", "unload-fails"])).await;
    let controls = controls(&engine);
    let base = under(&engine, None).await.tokens;
    let empty = tempfile::tempdir().unwrap();
    let large = adapter_folder(64);
    for (folder, kind, says) in [
        (&empty, ErrorKind::NotFound, "No adapter found"),
        (&large, ErrorKind::InvalidArgument, "max_lora_rank 16"),
    ] {
        let error = controls.load_adapter(adapter("french", folder)).await;
        let error = error.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(says), "{error}");
        assert!(controls.adapters().await.unwrap().is_empty());
        is_unknown(&engine, "french").await;
    }
    let unknown = controls.unload_adapter("french").await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::NotFound);

    let folder = adapter_folder(4);
    controls.sleep(SleepLevel::Weights).await.unwrap();
    let asleep = controls.load_adapter(adapter("french", &folder)).await;
    assert_eq!(asleep.unwrap_err().kind(), ErrorKind::Unavailable);
    controls.wake().await.unwrap();
    controls
        .load_adapter(adapter("french", &folder))
        .await
        .unwrap();
    let french = under(&engine, Some("french")).await.tokens;
    assert_ne!(french, base);
    controls.unload_adapter("french").await.unwrap_err();
    assert_eq!(controls.adapters().await.unwrap().len(), 1);
    assert_eq!(under(&engine, Some("french")).await.tokens, french);
    controls.unload_adapter("french").await.unwrap();
    is_unknown(&engine, "french").await;
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_vllm_without_the_variable_keeps_the_adapters_of_its_start() {
    let mut config = operated("vllm", &[]);
    config.env.remove("VLLM_ALLOW_RUNTIME_LORA_UPDATING");
    let engine = started(config.clone()).await;
    let error = refused(controls(&engine).unload_adapter("french")).await;
    assert!(
        error.contains("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        "{error}"
    );
    let listed = controls(&engine).adapters().await.unwrap();
    assert!(listed.is_empty());
    engine.cleanup().await.unwrap();

    let engine = LauncherEngine::new(config);
    let folder = adapter_folder(4);
    let mut ctx = StartContext::detached(1);
    ctx.adapters = vec![adapter("french", &folder)];
    let declared = engine.start(ctx).await.unwrap();
    assert!(declared.capabilities.adapters);
    refused(controls(&engine).unload_adapter("french")).await;
    under(&engine, Some("french")).await;
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_server_that_is_started_again_has_the_adapters_of_its_start_that_are_not_unloaded() {
    let mut reports = Reports::listen().await;
    let mut config = operated("vllm", &[&reports.flag()]);
    config.restart = Some(RestartPolicy {
        first_pause: Duration::from_millis(10),
        ..RestartPolicy::new(1)
    });
    let engine = LauncherEngine::new(config);
    let folders = [4, 8, 12].map(adapter_folder);
    let [stays, goes, late] = ["stays", "goes", "late"];
    let mut ctx = StartContext::detached(1);
    ctx.adapters = vec![adapter(stays, &folders[0]), adapter(goes, &folders[1])];
    engine.start(ctx.clone()).await.unwrap();
    let pid = reports.next("pid").await;
    let controls = controls(&engine);
    controls.unload_adapter(goes).await.unwrap();
    let loaded = adapter(late, &folders[2]);
    controls.load_adapter(loaded.clone()).await.unwrap();
    let before = [
        under(&engine, Some(stays)).await.tokens,
        under(&engine, Some(late)).await.tokens,
    ];

    let mut downs = ctx.health.downs();
    kill(pid);
    for is_down in [true, false] {
        let waited = downs.wait_for(|down| down.is_some() == is_down);
        timeout(LONG, waited).await.unwrap().unwrap();
    }
    let listed = controls.adapters().await.unwrap();
    assert_eq!(listed, [adapter(stays, &folders[0])]);
    is_unknown(&engine, goes).await;
    is_unknown(&engine, late).await;
    // The Worker does this.
    controls.load_adapter(loaded).await.unwrap();
    let after = [
        under(&engine, Some(stays)).await.tokens,
        under(&engine, Some(late)).await.tokens,
    ];
    assert_eq!(after, before);
    engine.cleanup().await.unwrap();
}
