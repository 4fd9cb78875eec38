//! `out=cmd:COMMAND`: engines in their own process, here the sample of the Python package.

use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::process::Command;

use crate::support::{
    PYTHON_CACHE, Server, genset, python_engine, run_with, soon, tiny_chat, until,
};

fn with_python(words: &[&str]) -> Command {
    let (_, environment) = python_engine("sample_engine.py");
    let mut command = genset(words);
    command.envs(environment);
    command
}

#[tokio::test]
async fn an_engine_in_python_answers_the_api() {
    let (sample, _) = python_engine("sample_engine.py");
    let output = format!("out=cmd:{sample}");
    for model in [tiny_chat(), tiny_chat().join("tiny-chat-q8_0.gguf")] {
        let words = ["run", "in=http", &output, "--model-name", "tiny-chat"];
        let mut command = with_python(&words);
        command.arg(model).args(["--http-port", "0"]);
        let server = Server::spawn(command).await;
        let body = json!({
            "model": "tiny-chat",
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "Hello"}],
        });
        let answer = server.ask("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200, "{}{}", answer.body, server.log());
        assert!(
            answer.body.contains(r#""completion_tokens":5"#),
            "{}",
            answer.body
        );
        server.stop().await;
    }
}

/// The engine fails a request whose id is already in use.
#[tokio::test]
async fn the_prompts_of_a_batch_are_asked_under_ids_of_their_own() {
    const ENGINE: &str = r#"
from genset.backend import run
from genset.exceptions import InvalidArgument
from sample_engine import SampleEngine

class Ids(SampleEngine):
    in_flight = set()

    async def generate(self, request, context):
        if context.id in self.in_flight:
            raise InvalidArgument(f"{context.id} is in flight")
        self.in_flight.add(context.id)
        try:
            async for chunk in super().generate(request, context):
                yield chunk
        finally:
            self.in_flight.discard(context.id)

run(Ids)
"#;
    let folder = tempfile::tempdir().unwrap();
    let (engine, prompts) = (
        folder.path().join("ids_engine.py"),
        folder.path().join("prompts.jsonl"),
    );
    std::fs::write(&engine, ENGINE).unwrap();
    let line = "{\"text\": \"Hello\", \"max_tokens\": 3}\n";
    std::fs::write(&prompts, line.repeat(16)).unwrap();
    let (sample, [(name, package)]) = python_engine("sample_engine.py");
    let python = sample.split(PYTHON_CACHE).next().unwrap();
    let output = format!(
        "out=cmd:{python} {PYTHON_CACHE} '{}' --token-delay-ms 50",
        engine.display()
    );
    let input = format!("in=batch:{}", prompts.display());
    let mut command = genset(&["run", &input, &output]);
    let paths = [package.clone(), package.join("..")];
    command.env(name, std::env::join_paths(paths).unwrap());
    command.arg(tiny_chat());
    let ended = run_with(command, b"").await;
    assert_eq!(ended.code, Some(0), "{}{}", ended.stdout, ended.stderr);
}

async fn chat_status(server: &Server) -> u16 {
    let body = json!({
        "model": "tiny-chat",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": "Hello"}],
    });
    server.ask("/v1/chat/completions", &body).await.status
}

#[tokio::test]
async fn an_engine_that_was_killed_is_started_again_when_asked() {
    let (sample, _) = python_engine("sample_engine.py");
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
    until(async || {
        let lives = std::fs::read_to_string(&notes).unwrap().lines().count();
        lives == 2 && chat_status(&server).await == 200
    })
    .await;
    server.stop().await;
}

#[tokio::test]
async fn a_terminal_input_ends_with_its_engine() {
    let (sample, _) = python_engine("sample_engine.py");
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let prompt = json!({"text": "Hello", "ignore_eos": true});
    std::fs::write(at("prompts.jsonl"), prompt.to_string()).unwrap();
    let output = format!(
        "out=cmd:sh -c \"echo $$ > '{}'; exec {sample} --token-delay-ms 500\"",
        at("pid")
    );
    let batch = format!("in=batch:{}", at("prompts.jsonl"));
    for input in ["in=stdin", &batch] {
        let log = || std::fs::read_to_string(at("log")).unwrap();
        let mut command = with_python(&["run", input, &output]);
        command.arg(tiny_chat()).env("GENSET_LOG", "info");
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        command.stderr(std::fs::File::create(at("log")).unwrap());
        let mut child = command.spawn().unwrap();
        // The question never arrives, and the answer of the batch takes hours.
        let _open = child.stdin.take();
        until(async || log().contains("model ready")).await;
        let pid = std::fs::read_to_string(at("pid")).unwrap();
        let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
        let code = soon(child.wait()).await.unwrap().code();
        assert_eq!(code, Some(1), "{}", log());
        assert!(log().contains("SIGKILL"), "{}", log());
        // The prompt has no answer, not even an error: another run can still answer it.
        let output = std::fs::read_to_string(at("output.jsonl"));
        assert!(output.is_err(), "{output:?}");
    }
}

#[tokio::test]
async fn the_kit_tests_a_command() {
    let (sample, _) = python_engine("sample_engine.py");
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
    assert!(ended.stdout.contains("\nPASSED, with "), "{}", ended.stdout);
}

/// A shell program, which needs a `PATH`.
fn with_shell(words: &[&str], script: &str) -> Command {
    let mut command = genset(words);
    command.arg(format!("out=cmd:sh -c '{script}'"));
    command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command
}

/// Waits until a process has ended, no matter which process reaps it.
async fn is_over(pid: &str) {
    let state = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit(") ").next()?.chars().next()
    };
    until(async || state().is_none_or(|state| state == 'Z')).await;
}

/// The engine reads no socket and ignores every signal that it can; so do its children.
#[tokio::test]
async fn nothing_that_a_command_started_outlives_a_kill_of_the_binary() {
    let folder = tempfile::tempdir().unwrap();
    let pids = folder.path().join("pids");
    let script = format!(
        "trap \"\" HUP INT QUIT TERM PIPE; (sleep 1000 & echo $! >> {0}; wait) & sleep 1000 & echo $! $$ done >> {0}; \
         while :; do sleep 1000; done",
        pids.display()
    );
    let mut child = with_shell(&["run", "in=http", "--http-port", "0"], &script)
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut started = String::new();
    until(async || {
        started = std::fs::read_to_string(&pids).unwrap_or_default();
        started.contains("done") && started.lines().count() == 2
    })
    .await;
    let started = started.replace("done", "");
    child.kill().await.unwrap();
    let pids: Vec<&str> = started.split_whitespace().collect();
    assert_eq!(pids.len(), 3, "{started}");
    for pid in pids {
        is_over(pid).await;
    }
}

#[tokio::test]
async fn a_command_gets_the_environment_that_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let printed = folder.path().join("env");
    let script = format!("env > {}", printed.display());
    let cases: [(&[&str], bool, bool); 3] = [
        (&[], true, true),
        (&["--engine-env", "minimal"], false, false),
        (&["--engine-env", "minimal,HF_H*"], true, false),
    ];
    for (flags, has_home, has_token) in cases {
        let mut command = with_shell(&["run", "in=stdin"], &script);
        command.args(flags);
        command.env("HF_HOME", "/hub").env("HF_TOKEN", "secret");
        let ended = run_with(command, b"hello").await;
        // The engine serves nothing, which is reported but not the subject of this test.
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        let environment = std::fs::read_to_string(&printed).unwrap();
        let has = |name: &str| environment.lines().any(|line| line.starts_with(name));
        assert!(has("PATH=") && has("GENSET_ENGINE_FD="), "{environment}");
        assert_eq!((has("HF_HOME="), has("HF_TOKEN=")), (has_home, has_token));
    }
    let refused = run_with(genset(&["run", "out=cmd:true", "--engine-env", "A=1"]), b"").await;
    refused.fails(2, "--engine-env");
}

#[tokio::test]
async fn a_command_that_prints_without_end_fills_no_log() {
    let words = ["run", "in=stdin", "--engine-log-lines", "10"];
    let mut command = with_shell(&words, "yes flood | head -n 300000; echo over; exit 7");
    command.env("GENSET_LOG", "info");
    let ended = run_with(command, b"hello").await;
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(
        ended.stderr.lines().count() < 3000,
        "{} bytes",
        ended.stderr.len()
    );
    assert!(ended.stderr.contains("flood"), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("lines of the process were dropped"),
        "{}",
        ended.stderr
    );
}

#[tokio::test]
async fn a_command_that_cannot_run_is_named() {
    let ended = run_with(
        genset(&["run", "in=stdin", "out=cmd:/no/such/program"]),
        b"hi",
    )
    .await;
    ended.fails(1, "/no/such/program");
    for (words, named) in [
        (["run", "out=cmd"], "--engine-cmd"),
        (["run", "out=cmd:'open"], "--engine-cmd"),
    ] {
        let ended = run_with(genset(&words), b"").await;
        ended.fails(2, named);
    }
}
