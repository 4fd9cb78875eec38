//! `in=batch`: prompts in files, answers in `output.jsonl`.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::fleet::Fleet;
use crate::support::{Ended, genset, run_with, soon, until};

fn words(path: &Path) -> String {
    format!("in=batch:{}", path.display())
}

async fn batch(path: &Path, further: &[&str]) -> Ended {
    let words = words(path);
    run_with(genset(&[&["run", &words], further].concat()), b"").await
}

fn output(folder: &Path) -> Vec<Value> {
    let text = fs::read_to_string(folder.join("output.jsonl")).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn prompts(count: usize) -> String {
    let line = |number| format!("{}\n", json!({"text": format!("prompt {number}")}));
    (0..count).map(line).collect()
}

#[tokio::test]
async fn prompts_are_answered_in_their_order() {
    let folder = TempDir::new().unwrap();
    let input = folder.path().join("prompts.jsonl");
    let lines = [
        r#"{"text": "What is the capital of France?"}"#,
        "",
        r#"{"text": "What is the capital of France?", "max_tokens": 2}"#,
        "no json",
        r#"{"prompt": "Hello"}"#,
        r#"{"text": "Hello", "max_tokens": "many"}"#,
        // The last line may lack a newline.
        r#"{"text": "What is the capital of Spain?"}"#,
    ];
    fs::write(&input, lines.join("\n")).unwrap();
    let ended = batch(&input, &[]).await;
    ended.fails(1, "3 of 6 prompts have no answer");
    assert!(ended.stdout.contains("6, 3 without an answer"), "{ended:?}");
    let output = output(folder.path());
    let responses: Vec<&str> = output
        .iter()
        .map(|line| line["response"].as_str().unwrap_or("-"))
        .collect();
    let france = "The capital of France is Paris.";
    let spain = "The capital of Spain is Madrid.";
    assert_eq!(responses, [france, "The capital", "-", "-", "-", spain]);
    assert_eq!(output[1]["tokens_out"], 2);
    assert!(output[0]["tokens_in"].as_u64() > Some(5), "{output:?}");
    assert!(output[0]["elapsed_ms"].is_u64(), "{output:?}");
    for (line, expected) in [(2, "line 4"), (3, "\"text\""), (4, "max_tokens")] {
        let error = output[line]["error"].as_str().unwrap();
        assert!(error.contains(expected), "{error}");
    }
    assert!(!folder.path().join("output.jsonl.part").exists());
}

#[tokio::test]
async fn requests_in_openais_format_are_answered_as_over_http() {
    let folder = TempDir::new().unwrap();
    let input = folder.path().join("requests.jsonl");
    let france = json!([{"role": "user", "content": "What is the capital of France?"}]);
    let line = |id: &str, url: &str, body: Value| json!({"custom_id": id, "method": "POST", "url": url, "body": body});
    let chat = "/v1/chat/completions";
    let lines = [
        line(
            "chat",
            chat,
            json!({"model": "tiny-chat", "messages": france}),
        ),
        json!({"text": "What is the capital of Spain?"}),
        line(
            "completion",
            "/v1/completions",
            json!({"model": "tiny-chat", "prompt": "Hello", "max_tokens": 2}),
        ),
        line(
            "response",
            "/v1/responses",
            json!({"model": "tiny-chat", "input": "What is the capital of Spain?"}),
        ),
        line(
            "model",
            chat,
            json!({"model": "another", "messages": france}),
        ),
        line(
            "stream",
            chat,
            json!({"model": "tiny-chat", "messages": france, "stream": true}),
        ),
        line("url", "/v1/files", json!({})),
        json!({"custom_id": "method", "method": "GET", "url": chat}),
        json!({"custom_id": 7, "url": chat, "body": {}}),
    ];
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(&input, &text).unwrap();
    let ended = batch(&input, &[]).await;
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.contains("9, 5 without an answer"), "{ended:?}");
    let output = output(folder.path());
    let ids: Vec<&Value> = output.iter().map(|line| &line["custom_id"]).collect();
    let expected = json!([
        "chat",
        null,
        "completion",
        "response",
        "model",
        "stream",
        "url",
        "method",
        7
    ]);
    assert_eq!(json!(ids), expected);
    let body = |index: usize| &output[index]["response"]["body"];
    let paris = "The capital of France is Paris.";
    assert_eq!(body(0)["choices"][0]["message"]["content"], paris);
    assert_eq!(output[0]["response"]["status_code"], 200);
    assert!(
        output[0]["response"]["request_id"]
            .as_str()
            .is_some_and(|id| !id.is_empty())
    );
    assert_eq!(
        (&output[0]["error"], &output[0]["id"]),
        (&Value::Null, &json!("batch_req_1"))
    );
    assert_eq!(output[1]["response"], "The capital of Spain is Madrid.");
    assert_eq!(body(2)["usage"]["completion_tokens"], 2);
    assert_eq!(
        body(3)["output"][0]["content"][0]["text"],
        "The capital of Spain is Madrid."
    );
    assert_eq!(output[4]["response"]["status_code"], 404);
    assert_eq!(body(4)["error"]["code"], "model_not_found");
    for (index, expected) in [
        (5, "stream"),
        (6, "/v1/embeddings"),
        (7, "POST"),
        (8, "custom_id"),
    ] {
        assert_eq!(output[index]["response"], Value::Null);
        let message = output[index]["error"]["message"].as_str().unwrap();
        assert!(message.contains(expected), "{message}");
    }

    // Two answers with the same id would be ambiguous.
    fs::remove_file(folder.path().join("output.jsonl")).unwrap();
    fs::write(
        &input,
        text.replace("completion\",\"method", "chat\",\"method"),
    )
    .unwrap();
    let ended = batch(&input, &[]).await;
    ended.fails(1, "line 3: has the custom_id of");
}

#[tokio::test]
async fn prompts_are_asked_again_while_workers_are_full_or_away() {
    let folder = TempDir::new().unwrap();
    let input = folder.path().join("prompts.jsonl");
    fs::write(&input, prompts(2)).unwrap();
    let script = folder.path().join("script.toml");
    let refused = |kind: &str| {
        let fault = format!("{{ action = \"refuse\", kind = \"{kind}\" }}");
        format!("[[reply]]\nmatch.contains = \"prompt\"\ntimes = 1\nfault = {fault}\n\n")
    };
    let replies = ["overloaded", "unavailable"].map(refused);
    let answer = "[[reply]]\ntext = \"here again\"\n";
    fs::write(&script, replies.concat() + answer).unwrap();
    let engine = ["out=scripted", "--script", script.to_str().unwrap()];
    let ended = batch(&input, &engine).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for line in output(folder.path()) {
        assert_eq!(line["response"], "here again", "{line}");
    }
}

#[tokio::test]
async fn a_folder_stands_for_its_files() {
    let folder = TempDir::new().unwrap();
    let empty = batch(folder.path(), &["out=echo_full", "--model-name=m"]).await;
    empty.fails(2, "no file that ends in .jsonl");
    fs::write(folder.path().join("b.jsonl"), r#"{"text": "third"}"#).unwrap();
    fs::write(
        folder.path().join("a.jsonl"),
        "{\"text\": \"first\"}\n{\"text\": \"second\"}\n",
    )
    .unwrap();
    let ended = batch(folder.path(), &["out=echo_full", "--model-name=m"]).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    // The output in the folder is not an input, and is not overwritten.
    let file = folder.path().join("output.jsonl");
    let before = fs::read(&file).unwrap();
    for input in [folder.path(), &folder.path().join("b.jsonl")] {
        // Refused before there is an engine.
        let again = batch(input, &["out=cmd:/no/such/program"]).await;
        again.fails(2, "has the answers of an earlier run; move or remove it");
        assert_eq!(fs::read(&file).unwrap(), before);
    }
    let output = output(folder.path());
    let responses: Vec<&Value> = output.iter().map(|line| &line["response"]).collect();
    assert_eq!(responses, ["first", "second", "third"]);
}

#[tokio::test]
async fn what_cannot_be_a_batch_is_named() {
    let engine = ["out=echo_full", "--model-name=m"];
    let device = batch(Path::new("/dev/null"), &engine).await;
    device.fails(2, "error: in: /dev/null is neither a file nor a folder");
    // Before a model is fetched, which takes long, and here cannot be.
    let missing = batch(Path::new("/no/such.jsonl"), &["Qwen/Qwen3-0.6B"]).await;
    missing.fails(2, "error: in: /no/such.jsonl cannot be read");

    let mut command = genset(&["run"]);
    command.arg(OsStr::from_bytes(b"in=batch:caf\xe9.jsonl"));
    let ended = run_with(command, b"").await;
    ended.fails(2, "is not UTF-8 text");
}

#[tokio::test]
async fn an_interrupted_run_is_continued() {
    // So many prompts that no run finishes before it is interrupted, on any machine.
    const COUNT: usize = 2000;
    let folder = TempDir::new().unwrap();
    let input = folder.path().join("prompts.jsonl");
    fs::write(&input, prompts(COUNT)).unwrap();
    let part = folder.path().join("output.jsonl.part");
    let engine = ["out=echo_full", "--model-name=m", "--batch-concurrency=2"];
    // Not SIGINT: it is ignored if the tests run in the background of a shell.
    for signal in [Signal::TERM, Signal::KILL] {
        let input = words(&input);
        let slow = ["run", &input, "--token-echo-delay-ms=50"];
        let words = [&slow[..], &engine[..]].concat();
        let before = noted(&part);
        let child = genset(&words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = child
            .id()
            .and_then(|id| Pid::from_raw(id.cast_signed()))
            .unwrap();
        until(async || noted(&part) >= before + 2).await;
        kill_process(pid, signal).unwrap();
        let ended = soon(child.wait_with_output()).await.unwrap();
        let code = (signal == Signal::TERM).then_some(3);
        assert_eq!(ended.status.code(), code, "{ended:?}");
        assert!(!folder.path().join("output.jsonl").exists());
    }
    let other = batch(&input, &["out=echo_full", "--model-name=other"]).await;
    other.fails(1, "has the answers of the model m");
    // A line that a crash cut off is not an answer.
    let mut torn = fs::read(&part).unwrap();
    torn.extend(b"{\"prompt\":1999,\"line\":{\"te");
    fs::write(&part, torn).unwrap();
    let before = noted(&part);
    let ended = batch(
        &input,
        &[&engine[..], &["--token-echo-delay-ms=0"]].concat(),
    )
    .await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let told = format!("{before} of {COUNT} prompts were answered before");
    assert!(ended.stderr.contains(&told), "{told}: {ended:?}");
    let asked = format!("{}, 0 without an answer", COUNT - before);
    assert!(ended.stdout.contains(&asked), "{asked}: {ended:?}");
    let output = output(folder.path());
    assert_eq!(output.len(), COUNT);
    for (number, line) in output.iter().enumerate() {
        assert_eq!(line["response"], format!("prompt {number}"));
    }
    assert!(!part.exists());
}

#[tokio::test]
async fn of_several_models_the_one_that_is_named_answers() {
    let fleet = Fleet::new();
    let folder = TempDir::new().unwrap();
    let mut workers = Vec::new();
    for name in ["first", "second"] {
        let script = folder.path().join(name);
        fs::write(&script, format!("[[reply]]\ntext = \"I am {name}\"\n")).unwrap();
        let input = format!("in=dyn://{name}");
        let called = format!("--model-name={name}");
        let script = script.to_str().unwrap();
        let words = [input.as_str(), "out=scripted", &called, "--script", script];
        workers.push(fleet.worker_of(&words, &[]).await);
    }
    let input = folder.path().join("prompts.jsonl");
    fs::write(&input, prompts(1)).unwrap();
    let batch = words(&input);
    for name in ["second", "first"] {
        let called = format!("--model-name={name}");
        let ended = fleet.ask(&["run", &batch, "out=dyn", &called]).await;
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let output = output(folder.path());
        assert_eq!(output[0]["response"], format!("I am {name}"));
        fs::remove_file(folder.path().join("output.jsonl")).unwrap();
    }
    for input in ["in=stdin", &batch] {
        let ended = fleet.ask(&["run", input, "out=dyn"]).await;
        ended.fails(1, "name the one to ask: first, second");
    }
}

#[tokio::test]
async fn prompts_go_on_with_workers_that_replace_others() {
    const COUNT: usize = 40;
    let fleet = Fleet::new();
    let folder = TempDir::new().unwrap();
    let input = folder.path().join("prompts.jsonl");
    fs::write(&input, prompts(COUNT)).unwrap();
    // Aliases make their cards differ.
    let worker = async |aliases: &str| {
        let engine = ["in=dyn", "out=echo_full", "--model-name=m", aliases];
        let words = [&engine[..], &["--token-echo-delay-ms=50"]].concat();
        fleet.worker_of(&words, &[]).await
    };
    let first = worker("--aliases=first").await;
    let input = words(&input);
    let words = ["run", &input, "out=dyn", "--batch-concurrency=1"];
    let words = [&words[..], &["--migration-wait=0.1"]].concat();
    let child = fleet
        .command(&words, &[])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let part = folder.path().join("output.jsonl.part");
    until(async || noted(&part) > 0).await;
    first.stop().await;
    let second = worker("--aliases=second").await;
    let ended = Ended::of(&soon(child.wait_with_output()).await.unwrap());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for (number, line) in output(folder.path()).iter().enumerate() {
        assert_eq!(line["response"], format!("prompt {number}"));
    }
    second.stop().await;
}

/// The number of noted answers: all lines except the first, which identifies the batch.
fn noted(part: &Path) -> usize {
    let text = fs::read_to_string(part).unwrap_or_default();
    text.matches('\n').count().saturating_sub(1)
}

#[tokio::test]
async fn answers_to_other_prompts_are_kept_apart() {
    let folder = TempDir::new().unwrap();
    let input = folder.path().join("prompts.jsonl");
    fs::write(&input, prompts(2)).unwrap();
    let head = json!({"input": "of another", "prompts": 2});
    fs::write(folder.path().join("output.jsonl.part"), format!("{head}\n")).unwrap();
    let ended = batch(&input, &["out=echo_full", "--model-name=m"]).await;
    ended.fails(1, "remove it to begin anew");
    for (path, expected) in [
        ("none.jsonl", "cannot be read"),
        ("output.jsonl", "cannot be read"),
    ] {
        let ended = batch(
            &folder.path().join(path),
            &["out=echo_full", "--model-name=m"],
        )
        .await;
        assert!(ended.stderr.contains(expected), "{ended:?}");
    }
}
