//! The lifecycle of a server: its start, its death, and the effect on its requests.

use std::process::{Command, Stdio};
use std::time::Duration;

use futures_util::StreamExt as _;
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, LLMEngine, Output, OutputStream, RequestContext,
    StartContext,
};
use genset_engine_launcher::{
    LauncherConfig, LauncherEngine, RestartPolicy, ServerFailure, ServerInput, ServerKind,
};
use tokio::time::timeout;

use crate::support::{self, LONG, Reports, answer, config, kill, read};

fn request(max_tokens: u32) -> GenerateRequest {
    support::request(&[1, 2, 3], max_tokens)
}

async fn started(config: LauncherConfig) -> (LauncherEngine, StartContext) {
    let engine = LauncherEngine::new(config);
    let ctx = StartContext::detached(1);
    engine.start(ctx.clone()).await.unwrap();
    (engine, ctx)
}

async fn fails_to_start(config: LauncherConfig) -> EngineError {
    let engine = LauncherEngine::new(config);
    let error = engine.start(StartContext::detached(1)).await.unwrap_err();
    engine.cleanup().await.unwrap();
    error
}

async fn stream(engine: &LauncherEngine, request: GenerateRequest) -> OutputStream {
    engine
        .generate(request, RequestContext::new("r"))
        .await
        .unwrap()
}

fn failure(error: &EngineError) -> &ServerFailure {
    std::error::Error::source(error)
        .and_then(|source| source.downcast_ref())
        .unwrap()
}

/// Polls until a condition holds that nothing announces.
async fn until(holds: impl Fn() -> bool) {
    let held = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LONG, held).await.unwrap();
}

/// Waits until no process has this id.
async fn is_gone(pid: u64) {
    until(|| std::fs::metadata(format!("/proc/{pid}")).is_err()).await;
}

#[tokio::test]
async fn a_start_tells_the_servers_last_line_and_waits_for_its_health() {
    let mut config = config("vllm", &["--slow-start", "0.5"]);
    config.name = "served".into();
    let engine = LauncherEngine::new(config);
    let ctx = StartContext::detached(1);
    let mut progress = ctx.progress.subscribe();
    let told = async {
        loop {
            progress.changed().await.unwrap();
            if progress
                .borrow_and_update()
                .stage
                .starts_with("vLLM: INFO:")
            {
                return;
            }
        }
    };
    let (declared, ()) = tokio::join!(engine.start(ctx.clone()), async {
        timeout(LONG, told).await.unwrap()
    });
    let declared = declared.unwrap();
    assert_eq!(
        (declared.model.as_str(), declared.context_length_tokens),
        ("served", 256)
    );
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_server_that_is_never_healthy_is_given_up() {
    let mut config = config("sglang", &["--fault", "never-healthy"]);
    config.start_timeout = Duration::from_secs(1);
    let error = fails_to_start(config).await;
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(
        failure(&error),
        &ServerFailure::TooLate {
            limit: Duration::from_secs(1)
        }
    );
}

#[tokio::test]
async fn a_server_that_ends_at_its_start_is_told_with_its_last_lines() {
    let error = fails_to_start(config("vllm", &["--fault", "exit-at-start"])).await;
    assert_eq!(failure(&error), &ServerFailure::Exited { code: 3 });
    assert!(error.message().contains("ERROR: no GPU here"), "{error}");
}

#[tokio::test]
async fn what_is_not_installed_comes_with_the_line_that_installs_it() {
    let tokens = ServerInput::Tokens { vocab_size: None };
    let nowhere = tempfile::tempdir().unwrap();
    let mut missing = config("vllm", &[]);
    missing.command = Some(vec![nowhere.path().join("vllm").display().to_string()]);
    let error = fails_to_start(missing).await;
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.message().contains("pip install vllm"), "{error}");

    // An interpreter that finds no module.
    let python = nowhere.path().join("python3");
    std::fs::write(&python, "#!/bin/sh\nexit 1\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&python, mode).unwrap();
    let mut sglang = LauncherConfig::new(ServerKind::Sglang, "/m", tokens);
    sglang.python = python;
    let error = fails_to_start(sglang.clone()).await;
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(
        error.message().contains("pip install 'sglang[all]'"),
        "{error}"
    );

    sglang.python = nowhere.path().join("none");
    let error = fails_to_start(sglang).await;
    assert!(error.message().contains("there is no Python"), "{error}");
}

#[tokio::test]
async fn a_server_that_is_killed_ends_its_requests_at_once_and_is_reported_dead() {
    let mut reports = Reports::listen().await;
    let flag = reports.flag();
    let (engine, ctx) = started(config("vllm", &[&flag, "--delay", "0.2"])).await;
    let pid = reports.next("pid").await.as_u64().unwrap();
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut outputs = stream(&engine, request(200)).await;
        assert!(matches!(outputs.next().await, Some(Ok(Output::Tokens(_)))));
        streams.push(outputs);
    }
    kill(pid);
    for outputs in streams {
        let error = read(outputs).await.end.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        assert!(error.policy().is_migratable);
        assert_eq!(failure(&error), &ServerFailure::Killed);
    }
    timeout(LONG, ctx.health.died()).await.unwrap();
    is_gone(pid).await;
    let error = engine
        .generate(request(1), RequestContext::new("late"))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Disconnected);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_server_that_exits_is_told_with_its_last_lines() {
    let (engine, ctx) = started(config("sglang", &["--fault", "exit"])).await;
    let answer = answer(&engine, request(50)).await;
    // Unread output is lost when the server dies.
    assert!(answer.tokens.len() <= 3, "{answer:?}");
    assert_eq!(failure(answer.error()), &ServerFailure::Exited { code: 7 });
    let reason = timeout(LONG, ctx.health.died()).await.unwrap();
    assert!(reason.contains("ERROR: the device is gone"), "{reason}");
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_server_that_answers_without_a_word_of_its_health_lives_on() {
    let mut config = config("llama", &["--fault", "deaf", "--delay", "0.05"]);
    config.health_interval = Duration::from_millis(50);
    config.health_timeout = Duration::from_secs(2);
    let (engine, _) = started(config).await;
    let answer = answer(&engine, request(80)).await;
    assert_eq!(answer.tokens.len(), 80, "{answer:?}");
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_server_that_answers_nothing_and_says_nothing_of_its_health_is_hung() {
    let mut config = config("trtllm", &["--fault", "hang"]);
    config.health_interval = Duration::from_millis(50);
    // It must report that it is healthy before its first request, which may take a while on a busy machine.
    let silent_for = Duration::from_secs(5);
    config.health_timeout = silent_for;
    let (engine, ctx) = started(config).await;
    let answer = answer(&engine, request(250)).await;
    assert_eq!(failure(answer.error()), &ServerFailure::Hung { silent_for });
    timeout(LONG, ctx.health.died()).await.unwrap();
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_server_is_started_again_as_often_as_asked() {
    let mut reports = Reports::listen().await;
    let mut config = config("vllm", &[&reports.flag()]);
    config.restart = Some(RestartPolicy {
        first_pause: Duration::from_millis(10),
        ..RestartPolicy::new(1)
    });
    let (engine, ctx) = started(config).await;
    let mut downs = ctx.health.downs();
    let first = reports.next("pid").await.as_u64().unwrap();
    kill(first);
    timeout(LONG, downs.wait_for(Option::is_some))
        .await
        .unwrap()
        .unwrap();
    timeout(LONG, downs.wait_for(Option::is_none))
        .await
        .unwrap()
        .unwrap();
    let second = reports.next("pid").await.as_u64().unwrap();
    let answer = answer(&engine, request(5)).await;
    assert_eq!(answer.tokens.len(), 5, "{answer:?}");
    kill(second);
    timeout(LONG, ctx.health.died()).await.unwrap();
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_cleanup_during_a_start_ends_it_and_the_server() {
    let mut reports = Reports::listen().await;
    let engine = LauncherEngine::new(config(
        "vllm",
        &[&reports.flag(), "--fault", "never-healthy"],
    ));
    let starting = engine.start(StartContext::detached(1));
    let cleaned = async {
        let pid = reports.next("pid").await.as_u64().unwrap();
        engine.cleanup().await.unwrap();
        pid
    };
    let (started, pid) = tokio::join!(starting, cleaned);
    assert_eq!(started.unwrap_err().kind(), ErrorKind::EngineShutdown);
    is_gone(pid).await;
}

#[tokio::test]
async fn a_start_that_is_dropped_leaves_no_server() {
    let mut reports = Reports::listen().await;
    let engine = LauncherEngine::new(config(
        "vllm",
        &[&reports.flag(), "--fault", "never-healthy"],
    ));
    let pid = tokio::select! {
        pid = reports.next("pid") => pid.as_u64().unwrap(),
        started = engine.start(StartContext::detached(1)) => panic!("{started:?}"),
    };
    is_gone(pid).await;
    engine.cleanup().await.unwrap();
}

/// The parent is this test binary, run again for the test below.
#[tokio::test]
async fn the_server_and_its_files_go_with_a_parent_that_is_killed() {
    // One has a folder for its KV events, the other a file with its key.
    for api in ["vllm", "sglang"] {
        let mut reports = Reports::listen().await;
        let temporary = tempfile::tempdir().unwrap();
        let files = || std::fs::read_dir(temporary.path()).unwrap().count();
        let mut parent = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "life::parent_for_the_test_above", "--nocapture"])
            .env("LAUNCHER_TEST_REPORT", reports.flag())
            .env("LAUNCHER_TEST_API", api)
            .env("TMPDIR", temporary.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let pid = reports.next("pid").await.as_u64().unwrap();
        assert_eq!(files(), 1, "{api}");
        kill(parent.id());
        parent.wait().unwrap();
        is_gone(pid).await;
        // They are removed once the server is dead, by a process of their own.
        until(|| files() == 0).await;
    }
}

#[tokio::test]
async fn parent_for_the_test_above() {
    let read = |name| std::env::var(name).ok();
    let (Some(flag), Some(api)) = (read("LAUNCHER_TEST_REPORT"), read("LAUNCHER_TEST_API")) else {
        return;
    };
    let _running = started(config(&api, &[&flag])).await;
    std::future::pending::<()>().await;
}
