//! What is refused without calling the server, and the profile folders.

use genset_backend_common::ErrorKind;
use tokio_util::task::TaskTracker;

use super::*;
use crate::config::ServerInput;
use crate::key::ApiKey;
use crate::kind::ServerKind;

fn config(kind: ServerKind, command: &[&str]) -> LauncherConfig {
    let mut config = LauncherConfig::new(kind, "/m", ServerInput::Tokens { vocab_size: None });
    config.command = Some(command.iter().map(|word| (*word).to_owned()).collect());
    config
}

/// A server that does not exist.
fn server(dialect: Dialect) -> Server {
    Server::new(dialect, 1, &ApiKey::random(), TaskTracker::new())
}

/// The error of each operation.
async fn refusals(config: &LauncherConfig, dialect: Dialect, role: Role) -> Vec<String> {
    let controls = Controls::new(config, dialect, role);
    let server = server(dialect);
    let refused = [
        controls.sleep(&server, SleepLevel::Weights).await,
        controls.wake(&server).await,
        controls.update_weights(&server, "/w".into()).await,
        controls.start_profile(&server).await,
        controls.stop_profile(&server).await.map(drop),
    ];
    let mut messages = Vec::new();
    for error in refused.into_iter().filter_map(Result::err) {
        if error.kind() == ErrorKind::Unsupported {
            assert_eq!(error.at(), Some(&At::other("op")));
            messages.push(error.message().to_owned());
        }
    }
    messages
}

#[tokio::test]
async fn a_vllm_without_flags_says_which_it_needs() {
    let config = config(ServerKind::Vllm, &["vllm", "serve"]);
    let refused = refusals(&config, Dialect::Vllm, Role::Aggregated).await;
    let sleep = "sleep needs enable-sleep-mode among the extra arguments, and VLLM_SERVER_DEV_MODE=1 in the worker's environment";
    assert_eq!(refused[..2], [sleep, sleep]);
    assert!(refused[2].contains("start a worker with the new ones"));
    for (message, op) in refused[3..].iter().zip(["start_profile", "stop_profile"]) {
        let begins = format!("{op} needs profiler-config among the extra arguments, such as {{");
        assert!(message.starts_with(&begins), "{message}");
    }
}

#[tokio::test]
async fn servers_without_controls_refuse_them_by_their_name() {
    for (kind, dialect) in [
        (ServerKind::Trtllm, Dialect::Trtllm),
        (ServerKind::LlamaCpp, Dialect::LlamaServer),
    ] {
        let config = config(kind, &["server"]);
        let refused = refusals(&config, dialect, Role::Aggregated).await;
        let title = kind.title();
        let ops = [
            "sleep",
            "sleep",
            "update_weights",
            "start_profile",
            "stop_profile",
        ];
        assert_eq!(
            refused,
            ops.map(|op| format!("{op} is not asked of {title}"))
        );
    }
}

#[tokio::test]
async fn what_a_server_needs_to_load_adapters_is_named() {
    let adapter = || Adapter {
        name: "french".into(),
        source: "/a/french".into(),
    };
    let variable = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in the worker's environment";
    for (kind, dialect, takes, needs) in [
        (
            ServerKind::Vllm,
            Dialect::Vllm,
            Takes::Nothing,
            format!("needs enable-lora among the extra arguments, and {variable}"),
        ),
        (
            ServerKind::Vllm,
            Dialect::Vllm,
            Takes::AtStart,
            format!("needs {variable}"),
        ),
        (
            ServerKind::Sglang,
            Dialect::Sglang,
            Takes::Nothing,
            "is not asked of SGLang".to_owned(),
        ),
    ] {
        let config = config(kind, &["server"]);
        let mut controls = Controls::new(&config, dialect, Role::Aggregated);
        controls.takes = takes;
        let server = server(dialect);
        let load = controls.load_adapter(&server, adapter()).await;
        let unload = controls.unload_adapter(&server, "french").await;
        for (result, op) in [(load, "load_adapter"), (unload, "unload_adapter")] {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert_eq!(error.message(), format!("{op} {needs}"));
        }
    }
}

#[tokio::test]
async fn instances_that_hold_blocks_for_others_do_not_sleep() {
    let config = config(ServerKind::Vllm, &["vllm", "serve", "--enable-sleep-mode"]);
    for role in [Role::Prefill, Role::Decode] {
        let refused = refusals(&config, Dialect::Vllm, role).await;
        assert!(refused[0].contains("role aggregated"), "{refused:?}");
    }
}

#[tokio::test]
async fn a_source_of_weights_is_a_folder_or_names_one() {
    let config = config(ServerKind::Sglang, &["sglang"]);
    let controls = Controls::new(&config, Dialect::Sglang, Role::Aggregated);
    let server = server(Dialect::Sglang);
    for source in [json!(null), json!(7), json!({"folder": "/w"}), json!([])] {
        let error = controls.update_weights(&server, source).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.at(), Some(&At::other("source")));
    }
    assert!(!server.gate.is_closed());
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_long_for_a_profile_may_move() {
    // Accepts the connection, and never answers.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = Server::new(Dialect::Sglang, port, &ApiKey::random(), TaskTracker::new());
    server.operated.lock().await.is_profiling = true;
    let config = config(ServerKind::Sglang, &["sglang"]);
    let controls = Controls::new(&config, Dialect::Sglang, Role::Aggregated);
    let pass = server.gate.enter().unwrap();
    let begun = Instant::now();
    let waits = async {
        let ended = tokio::time::timeout(controls.slow, pass.ended()).await;
        assert!(ended.unwrap().policy().is_migratable);
        assert!((GRACE..controls.slow).contains(&begun.elapsed()));
        assert!(server.gate.is_closed());
        drop(pass);
    };
    let (stopped, ()) = tokio::join!(controls.stop_profile(&server), waits);
    assert_eq!(stopped.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    assert!(!server.gate.is_closed());
}

#[test]
fn profiles_are_where_the_arguments_say() {
    let place = |command: &[&str]| vllm_profiles(&config(ServerKind::Vllm, command));
    let torch = r#"{"profiler": "torch", "torch_profiler_dir": "/p"}"#;
    for command in [
        &["vllm", "serve", "--profiler-config", torch][..],
        &[
            "vllm",
            "--profiler-config.profiler=torch",
            "--profiler-config.torch_profiler_dir=/p",
        ],
    ] {
        assert_eq!(place(command).as_deref(), Some("/p"), "{command:?}");
    }
    let remote = r#"{"profiler": "torch", "torch_profiler_dir": "s3://b/p"}"#;
    let remote = place(&["vllm", "--profiler-config", remote]);
    assert_eq!(remote.as_deref(), Some("s3://b/p"));
    let cuda = place(&["vllm", "--profiler-config", r#"{"profiler": "cuda"}"#]);
    assert!(cuda.unwrap().contains("cuda"));

    let mut older = config(ServerKind::Vllm, &["vllm"]);
    older.env.insert(VLLM_PROFILES.into(), "/older".into());
    assert_eq!(vllm_profiles(&older).as_deref(), Some("/older"));
    older.env.insert(VLLM_PROFILES.into(), String::new());
    assert_eq!(vllm_profiles(&older), None);
}
