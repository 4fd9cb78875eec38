//! If the model of this process cannot be served, the process ends and says why, instead of waiting forever.

use std::fs;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::{Server, genset, run_with, soon, tiny_chat, until};

/// tiny-chat's files for text, one of them broken.
fn broken_model(file: &str, content: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(tiny_chat().join(name), folder.path().join(name)).unwrap();
    }
    fs::write(folder.path().join(file), content).unwrap();
    folder
}

fn broken_template() -> TempDir {
    broken_model("chat_template.jinja", "{% for message in messages %}")
}

#[tokio::test]
async fn every_input_ends_with_code_1_and_the_reason() {
    let models = [
        (
            broken_template(),
            "chat_template.jinja: line 1 of the chat template: syntax error",
        ),
        (broken_model("tokenizer.json", "{}"), "tokenizer.json"),
    ];
    for (model, expected) in &models {
        let ended = ["in=stdin", "in=text", "in=http"].map(|input| {
            let mut command = genset(&["run", input, "out=sample", "--http-port", "0"]);
            command.arg(model.path());
            run_with(command, b"hello\n")
        });
        for ended in futures_util::future::join_all(ended).await {
            assert_eq!(ended.code, Some(1), "{ended:?}");
            let told = ended.stderr.lines().last().unwrap_or_default();
            assert!(told.starts_with("error: the model "), "{}", ended.stderr);
            assert!(told.contains("cannot be served"), "{}", ended.stderr);
            assert!(told.contains(expected), "{}", ended.stderr);
        }
    }
}

#[tokio::test]
async fn a_frontend_of_other_processes_goes_on_without_the_model() {
    let discovery = tempfile::tempdir().unwrap();
    let model = broken_template();
    let shared = ["--discovery-path", discovery.path().to_str().unwrap()];
    let mut worker = genset(&["run", "in=dyn", "out=sample"]);
    worker.args(shared).arg(model.path());
    let mut worker = worker.stderr(std::process::Stdio::null()).spawn().unwrap();
    let frontend = Server::start(&[&["out=dyn"], &shared[..]].concat()).await;
    until(async || frontend.log().contains("cannot be served")).await;
    assert_eq!(frontend.get("/live").await.status, 200);
    frontend.stop().await;
    crate::support::send_signal(&worker, Signal::TERM);
    assert_eq!(soon(worker.wait()).await.unwrap().code(), Some(0));
}
