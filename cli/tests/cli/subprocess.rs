//! `out=cmd:COMMAND`: engines in a process of their own, here the sample of the Python package.

use std::path::PathBuf;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::process::Command;

use crate::support::{Server, genset, run_with, soon, tiny_chat};

fn repository(path: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", path].iter().collect()
}

/// The command of the Python sample engine, and what its environment needs. `cargo xtask python-package-test` installs the
/// interpreter.
fn python_sample() -> (String, [(&'static str, PathBuf); 1]) {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let python = target.with_file_name("venv-engine/bin/python");
    assert!(
        python.exists(),
        "{} is not there: run `cargo xtask python-package-test`, which makes it",
        python.display()
    );
    let sample = repository("python/sample_engine.py");
    let command = format!("'{}' -B '{}'", python.display(), sample.display());
    (command, [("PYTHONPATH", repository("python/src"))])
}

fn with_python(words: &[&str]) -> Command {
    let (_, environment) = python_sample();
    let mut command = genset(words);
    command.envs(environment);
    command
}

#[tokio::test]
async fn an_engine_in_python_answers_the_api() {
    let (sample, _) = python_sample();
    let output = format!("out=cmd:{sample}");
    let mut command = with_python(&["run", "in=http", &output]);
    command.arg(tiny_chat()).args(["--http-port", "0"]);
    let mut server = Server::spawn(command).await;
    let body = json!({
        "model": "tiny-chat",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "Hello"}],
    });
    let exchange = server.post("/v1/chat/completions", &body.to_string()).await;
    let answer = exchange.response().await;
    assert_eq!(answer.status, 200, "{}{}", answer.body, server.log());
    assert!(
        answer.body.contains(r#""completion_tokens":5"#),
        "{}",
        answer.body
    );
    server.stop().await;
}

async fn chat_status(server: &Server) -> u16 {
    let body = json!({
        "model": "tiny-chat",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": "Hello"}],
    });
    let exchange = server.post("/v1/chat/completions", &body.to_string()).await;
    exchange.response().await.status
}

#[tokio::test]
async fn an_engine_that_was_killed_is_started_again_when_asked() {
    let (sample, _) = python_sample();
    let folder = tempfile::tempdir().unwrap();
    let notes = folder.path().join("pids");
    let output = format!(
        "out=cmd:sh -c \"echo $$ >> '{}'; exec {sample}\"",
        notes.display()
    );
    let mut command = with_python(&["run", "in=http", &output, "--engine-restarts", "2"]);
    command.arg(tiny_chat()).args(["--http-port", "0"]);
    let server = Server::spawn(command).await;
    assert_eq!(chat_status(&server).await, 200);
    let pid: i32 = std::fs::read_to_string(&notes)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let is_back = async {
        loop {
            let lives = std::fs::read_to_string(&notes).unwrap().lines().count();
            if lives == 2 && chat_status(&server).await == 200 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    soon(is_back).await;
    server.stop().await;
}

#[tokio::test]
async fn the_kit_tests_a_command() {
    let (sample, _) = python_sample();
    let words = [
        "conform",
        "run",
        "--engine-cmd",
        &sample,
        "--only",
        "ST,US,SP",
    ];
    let ended = run_with(with_python(&words), b"").await;
    assert_eq!(ended.code, Some(0), "{}{}", ended.stdout, ended.stderr);
    assert!(ended.stdout.contains("CONFORMANT"), "{}", ended.stdout);
}

#[tokio::test]
async fn a_command_that_cannot_run_is_named() {
    let ended = run_with(
        genset(&["run", "in=stdin", "out=cmd:/no/such/program"]),
        b"hi",
    )
    .await;
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("/no/such/program"),
        "{}",
        ended.stderr
    );
    for (words, named) in [
        (["run", "out=cmd"], "--engine-cmd"),
        (["run", "out=cmd:'open"], "--engine-cmd"),
    ] {
        let ended = run_with(genset(&words), b"").await;
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert!(ended.stderr.contains(named), "{}", ended.stderr);
    }
}
