//! `out=vllm` and its like: servers of other projects, here stand-ins that speak their APIs.

use std::path::PathBuf;

use serde_json::{Value, json};
use tokio::process::Command;

use crate::support::{Server, genset, run_with, tiny_chat};

/// The flag that starts the stand-in for `api`.
fn stand_in(api: &str) -> String {
    let script: PathBuf = [
        env!("CARGO_MANIFEST_DIR"),
        "../engines/launcher/tests/stand_in.py",
    ]
    .iter()
    .collect();
    format!("--server-cmd=python3 -B '{}' {api}", script.display())
}

/// The binary where it finds a shell and an interpreter.
fn with_path(words: &[&str]) -> Command {
    let mut command = genset(words);
    command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command
}

async fn chat(mut server: Server, model: &str) -> Value {
    let body = json!({
        "model": model,
        "max_tokens": 5,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Hello you there"}],
    });
    let exchange = server.post("/v1/chat/completions", &body.to_string()).await;
    let answer = exchange.response().await;
    assert_eq!(answer.status, 200, "{}{}", answer.body, server.log());
    server.stop().await;
    serde_json::from_str(&answer.body).unwrap()
}

#[tokio::test]
async fn a_server_of_tokens_answers_the_api() {
    for api in ["vllm", "sglang", "trtllm"] {
        let output = format!("out={api}");
        let mut command = with_path(&["run", "in=http", &output, "--http-port", "0"]);
        command.arg(tiny_chat()).arg(stand_in(api));
        let answer = chat(Server::spawn(command).await, "tiny-chat").await;
        assert_eq!(answer["usage"]["completion_tokens"], 5, "{api}: {answer}");
        assert_eq!(answer["choices"][0]["finish_reason"], "length", "{api}");
    }
}

#[tokio::test]
async fn a_gguf_file_is_served_as_text_or_with_its_folder_as_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("parrot.gguf");
    std::fs::write(&model, "GGUF").unwrap();
    let run = ["run", "in=http", "out=llamacpp", "--http-port", "0"];

    let mut command = with_path(&run);
    command.arg(&model).arg(stand_in("llama_cpp.server"));
    let answer = chat(Server::spawn(command).await, "parrot").await;
    assert_eq!(answer["model"], "parrot");
    assert_eq!(
        answer["choices"][0]["message"]["content"],
        "Hello you there"
    );

    let mut command = with_path(&run);
    command.arg(&model).arg(stand_in("llama"));
    command.arg("--model-config").arg(tiny_chat());
    let answer = chat(Server::spawn(command).await, "tiny-chat").await;
    assert_eq!(answer["usage"]["completion_tokens"], 5, "{answer}");
}

#[tokio::test]
async fn what_cannot_be_started_is_told() {
    let model = tiny_chat().display().to_string();
    let run = ["run", "in=stdin", "out=vllm", &model];
    let cases: [(&[&str], i32, &str); 4] = [
        (&["--server-cmd=/no/such/vllm"], 1, "pip install vllm"),
        (&["--node-rank=1"], 2, "--node-rank"),
        (&["--extra-engine-args=/no/such.json"], 2, "/no/such.json"),
        (
            &["--kv-transfer-host=127.0.0.1"],
            2,
            "--role prefill and decode",
        ),
    ];
    for (flags, code, expected) in cases {
        let words = [&run[..], flags].concat();
        let ended = run_with(with_path(&words), b"hi").await;
        assert_eq!(ended.code, Some(code), "{words:?} {}", ended.stderr);
        assert!(ended.stderr.contains(expected), "{}", ended.stderr);
    }
}

#[tokio::test]
async fn a_role_that_a_server_cannot_play_is_told_before_it_starts() {
    let model = tiny_chat().display().to_string();
    for (api, named) in [("sglang", "at the same time"), ("trtllm", "not driven")] {
        let output = format!("out={api}");
        let words = ["run", "in=dyn", &output, &model, "--role=prefill"];
        let ended = run_with(with_path(&words), b"").await;
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert!(ended.stderr.contains("--role"), "{}", ended.stderr);
        assert!(ended.stderr.contains(named), "{}", ended.stderr);
    }
}
