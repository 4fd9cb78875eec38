//! Every way in which a process can fail has its typed error and leaves nothing behind.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod support;

use std::error::Error as _;
use std::path::Path;
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::{
    EngineConfig, EngineError, ErrorKind, GenerateRequest, LLMEngine, Output, RequestContext,
    StartContext, controls::SleepLevel,
};
use genset_engine_subprocess::{ChildFailure, SubprocessConfig, SubprocessEngine};

/// A process with one fault.
fn config(fault: &str) -> SubprocessConfig {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/children/bad.py");
    support::program(&script).with_args([fault])
}

fn engine(fault: &str) -> SubprocessEngine {
    SubprocessEngine::new(config(fault))
}

async fn start(engine: &SubprocessEngine) -> Result<EngineConfig, EngineError> {
    engine.start(StartContext::detached(1)).await
}

/// The error of a start with the fault.
async fn start_error(config: SubprocessConfig) -> EngineError {
    let engine = SubprocessEngine::new(config);
    let error = start(&engine).await.unwrap_err();
    engine.cleanup().await.unwrap();
    error
}

fn request() -> GenerateRequest {
    GenerateRequest::from_tokens("bad", vec![1])
}

/// The outputs of a request up to its terminal, and its error.
async fn answer(engine: &SubprocessEngine) -> (Vec<Output>, Option<EngineError>) {
    let outputs = engine.generate(request(), RequestContext::new("r")).await;
    let mut outputs = match outputs {
        Ok(outputs) => outputs,
        Err(error) => return (Vec::new(), Some(error)),
    };
    let mut items = Vec::new();
    while let Some(item) = outputs.next().await {
        match item {
            Ok(output) => items.push(output),
            Err(error) => return (items, Some(error)),
        }
    }
    (items, None)
}

/// The error of a request to a process with the fault.
async fn request_error(config: SubprocessConfig) -> EngineError {
    let engine = SubprocessEngine::new(config);
    start(&engine).await.unwrap();
    let (items, error) = answer(&engine).await;
    let error = error.unwrap_or_else(|| panic!("no error, but {items:?}"));
    engine.cleanup().await.unwrap();
    error
}

fn failure(error: &EngineError) -> ChildFailure {
    let source = error.source().and_then(|source| source.downcast_ref());
    let failure: Option<&ChildFailure> = source;
    failure
        .unwrap_or_else(|| panic!("no failure of the process: {error:?}"))
        .clone()
}

/// The process failure that a request with the fault ends with; the request may migrate.
async fn request_failure(fault: &str) -> ChildFailure {
    let error = request_error(config(fault)).await;
    assert!(error.policy().is_migratable, "{error:?}");
    failure(&error)
}

#[tokio::test]
async fn a_good_process_answers_and_a_batch_is_an_answer() {
    for fault in ["none", "batch"] {
        let engine = engine(fault);
        assert_eq!(start(&engine).await.unwrap().model, "bad");
        let (items, error) = answer(&engine).await;
        assert!(error.is_none(), "{error:?}");
        assert_eq!(items[0], Output::from(5));
        assert!(items[1].is_terminal());
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn a_process_without_the_endpoint_control_supports_no_operation() {
    let engine = engine("none");
    start(&engine).await.unwrap();
    let controls = engine.controls().unwrap();
    let error = controls.sleep(SleepLevel::KvCache).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    // Here the name of the adapter may be what was not found.
    let error = controls.unload_adapter("french").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_missing_program_or_directory_is_named() {
    let missing = start_error(SubprocessConfig::new("no-such-program")).await;
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    assert!(missing.message().contains("no-such-program"), "{missing}");
    let mut nowhere = config("none");
    nowhere.cwd = Some("/no/such/directory".into());
    let error = start_error(nowhere).await;
    assert_eq!(error.at().map(|at| at.name()), Some("cwd"));
}

#[tokio::test]
async fn a_program_that_is_no_engine_is_told_by_its_exit() {
    let error = start_error(SubprocessConfig::new("true")).await;
    assert_eq!(failure(&error), ChildFailure::Exited { code: 0 });
}

#[tokio::test]
async fn an_exit_during_start_carries_the_last_lines_of_stderr() {
    let error = start_error(config("exit_in_start")).await;
    assert_eq!(failure(&error), ChildFailure::Exited { code: 4 });
    assert!(error.message().contains("the last words"), "{error}");
}

#[tokio::test]
async fn a_start_that_is_refused_has_the_processs_kind() {
    let error = start_error(config("start_refused")).await;
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(error.message(), "no such weights");
    let error = start_error(config("start_without_config")).await;
    assert_eq!(error.kind(), ErrorKind::Internal);
}

#[tokio::test]
async fn a_process_that_never_greets_or_never_starts_is_given_up() {
    let mut silent = config("silent_hello");
    silent.hello_timeout = Duration::from_millis(500);
    assert_eq!(
        start_error(silent).await.kind(),
        ErrorKind::DeadlineExceeded
    );
    let mut silent = config("silent_start");
    silent.start_timeout = Duration::from_secs(2);
    let error = start_error(silent).await;
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.message().contains("`start`"), "{error}");
}

#[tokio::test]
async fn another_version_is_refused_by_either_end() {
    for fault in ["other_version", "refuses"] {
        let error = start_error(config(fault)).await;
        assert_eq!(error.kind(), ErrorKind::CannotConnect, "{error:?}");
    }
}

#[tokio::test]
async fn text_on_the_socket_breaks_the_protocol() {
    let error = start_error(config("prints_on_the_socket")).await;
    assert!(matches!(failure(&error), ChildFailure::Protocol { .. }));
}

#[tokio::test]
async fn broken_frames_end_the_process() {
    for fault in [
        "garbage",
        "unknown_stream",
        "bad_batch",
        "request_frame",
        "no_credit",
    ] {
        let failure = request_failure(fault).await;
        let is_protocol = matches!(failure, ChildFailure::Protocol { .. });
        assert!(is_protocol, "{fault}: {failure:?}");
    }
}

#[tokio::test]
async fn half_a_frame_is_told_from_an_exit() {
    assert_eq!(request_failure("half_frame").await, ChildFailure::HalfFrame);
}

#[tokio::test]
async fn exits_crashes_kills_and_closed_sockets_are_told_apart() {
    let cases = [
        ("exit_0", ChildFailure::Exited { code: 0 }),
        ("exit_3", ChildFailure::Exited { code: 3 }),
        (
            "abort",
            ChildFailure::Crashed {
                signal: 6,
                name: "SIGABRT",
            },
        ),
        ("killed", ChildFailure::Killed),
        ("closed_socket", ChildFailure::ClosedSocket),
    ];
    for (fault, expected) in cases {
        assert_eq!(request_failure(fault).await, expected, "{fault}");
    }
}

#[tokio::test]
async fn an_end_while_it_serves_carries_the_last_lines_of_stderr() {
    let error = request_error(config("exit_3")).await;
    assert!(error.message().contains("the last words"), "{error}");
}

#[tokio::test]
async fn a_hang_is_noticed_by_its_silence() {
    let mut hanging = config("hang");
    hanging.heartbeat_interval = Duration::from_millis(50);
    hanging.heartbeat_timeout = Duration::from_secs(2);
    let error = request_error(hanging).await;
    assert!(matches!(failure(&error), ChildFailure::Hung { .. }));
    assert!(error.policy().is_migratable);
}

#[tokio::test]
async fn a_broken_answer_ends_its_request_and_no_other() {
    let cases = [
        ("after_terminal", ErrorKind::Internal),
        ("two_terminals", ErrorKind::Internal),
        ("token_out_of_range", ErrorKind::Internal),
        ("no_output", ErrorKind::Internal),
        ("empty_chunk", ErrorKind::Internal),
        ("no_terminal", ErrorKind::StreamIncomplete),
        ("kinds", ErrorKind::Overloaded),
    ];
    for (fault, kind) in cases {
        let engine = engine(fault);
        start(&engine).await.unwrap();
        for _ in 0..2 {
            let (items, error) = answer(&engine).await;
            let error = error.unwrap_or_else(|| panic!("{fault}: no error, but {items:?}"));
            assert_eq!(error.kind(), kind, "{fault}: {error:?}");
            if fault == "no_output" {
                let detail = "unknown variant `not an output`";
                assert!(error.message().contains(detail), "{error:?}");
            }
        }
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn what_an_item_lacks_is_named() {
    let error = request_error(config("no_usage")).await;
    let message = error.message();
    assert!(message.contains("missing field `usage`"), "{message}");
    let error = start_error(config("config_without_context")).await;
    let message = error.message();
    assert!(
        message.contains("missing field `context_length_tokens`"),
        "{message}"
    );
}

#[tokio::test]
async fn a_death_is_reported_and_reaches_every_request() {
    let engine = engine("killed");
    let ctx = StartContext::detached(1);
    let health = ctx.health.clone();
    engine.start(ctx).await.unwrap();
    let requests = (0..8).map(|_| answer(&engine));
    for (_, error) in futures_util::future::join_all(requests).await {
        assert!(error.unwrap().policy().is_migratable);
    }
    assert!(health.died().await.contains("SIGKILL"));
    let (_, refused) = answer(&engine).await;
    assert_eq!(refused.unwrap().kind(), ErrorKind::Disconnected);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn an_ignored_cleanup_ends_in_a_kill_and_says_so() {
    let mut ignoring = config("ignores_cleanup");
    ignoring.cleanup_timeout = Duration::from_millis(300);
    let engine = SubprocessEngine::new(ignoring);
    start(&engine).await.unwrap();
    let error = engine.cleanup().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_process_may_end_by_itself_after_its_cleanup() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("said");
    let path = file.display().to_string();
    let mut slow = config("says_goodbye").with_args([path]);
    slow.exit_timeout = Duration::from_secs(60);
    let engine = SubprocessEngine::new(slow);
    start(&engine).await.unwrap();
    engine.cleanup().await.unwrap();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "goodbye");
}

#[tokio::test]
async fn a_process_that_stays_after_its_cleanup_is_killed() {
    let mut staying = config("stays");
    staying.exit_timeout = Duration::from_millis(300);
    let engine = SubprocessEngine::new(staying);
    start(&engine).await.unwrap();
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_cleanup_that_fails_is_reported() {
    let engine = engine("cleanup_fails");
    start(&engine).await.unwrap();
    let error = engine.cleanup().await.unwrap_err();
    assert_eq!(error.message(), "the device is stuck");
}

#[tokio::test]
async fn a_flood_of_output_harms_nothing() {
    let engine = engine("noisy");
    start(&engine).await.unwrap();
    assert!(answer(&engine).await.1.is_none());
    engine.cleanup().await.unwrap();
}

/// Whether a process exists and is not a zombie.
fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .unwrap_or("")
            .trim_start()
            .starts_with('Z')
    })
}

#[tokio::test]
async fn what_the_process_started_ends_with_it_and_it_is_reaped() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pids");
    let engine = SubprocessEngine::new(config("forks").with_args([file.display().to_string()]));
    start(&engine).await.unwrap();
    let pids = std::fs::read_to_string(&file).unwrap();
    let (child, grandchild) = pids.split_once(' ').unwrap();
    assert!(is_alive(child) && is_alive(grandchild));
    engine.cleanup().await.unwrap();
    let is_reaped = !Path::new("/proc").join(child).exists();
    assert!(is_reaped, "the child is a zombie");
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while is_alive(grandchild) {
        assert!(
            tokio::time::Instant::now() < deadline,
            "the grandchild lives on"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_start_that_is_dropped_or_overtaken_by_cleanup_leaves_no_process() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pid");
    let silent = config("silent_start").with_args([file.display().to_string()]);
    let engine = SubprocessEngine::new(silent);
    let written = async {
        loop {
            match std::fs::read_to_string(&file) {
                Ok(pid) if !pid.is_empty() => return pid,
                _ => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    let pid = tokio::select! {
        pid = written => pid,
        started = start(&engine) => panic!("{started:?}"),
    };
    let gone = async {
        while Path::new("/proc").join(&pid).exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let gone = tokio::time::timeout(Duration::from_secs(60), gone).await;
    assert!(gone.is_ok(), "the process lives on");
    engine.cleanup().await.unwrap();

    let engine = self::engine("silent_start");
    let (started, cleaned) = tokio::join!(start(&engine), async {
        tokio::task::yield_now().await;
        engine.cleanup().await
    });
    assert_eq!(started.unwrap_err().kind(), ErrorKind::EngineShutdown);
    cleaned.unwrap();
}

#[tokio::test]
async fn impossible_settings_are_refused_before_anything_starts() {
    let mut impossible = config("none");
    impossible.window = 1;
    let error = start_error(impossible).await;
    assert_eq!(error.at().map(|at| at.name()), Some("window"));
}
