//! `in=stdin`: reads one question and writes its answer.

use std::process::Stdio;

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr};

use crate::fleet::Fleet;
use crate::support::{Ended, genset, run_with, send_signal, soon};

async fn ask(words: &[&str], input: &[u8]) -> Ended {
    let mut command = genset(&["run", "in=stdin", "--token-echo-delay-ms", "0"]);
    command.args(words);
    run_with(command, input).await
}

#[tokio::test]
async fn the_answer_and_nothing_else_is_on_standard_output() {
    let ended = ask(&["out=echo_full"], b"What is the capital of France?\n").await;
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stdout, "What is the capital of France?\n");
    assert_eq!(ended.stderr, "");

    let ended = ask(&["out=echo_core"], "zwei\nZeilen: äöü 🙂".as_bytes()).await;
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended.stdout.contains("zwei\nZeilen: äöü 🙂"),
        "{}",
        ended.stdout
    );
}

#[tokio::test]
async fn what_windows_puts_around_a_text_is_not_asked() {
    for input in ["in=stdin", "in=text"] {
        let command = genset(&["run", input, "out=echo_full", "--token-echo-delay-ms=0"]);
        let ended = run_with(command, "\u{feff}one line\r\n".as_bytes()).await;
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert_eq!(ended.stdout, "one line\n", "{input}");
    }
}

#[tokio::test]
async fn a_backslash_at_the_end_of_a_text_is_asked() {
    for input in ["in=stdin", "in=text"] {
        let command = genset(&["run", input, "out=echo_full", "--token-echo-delay-ms=0"]);
        let ended = run_with(command, b"what is in C:\\\n").await;
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert_eq!(ended.stdout, "what is in C:\\\n", "{input}");
    }
}

#[tokio::test]
async fn a_text_without_end_is_not_read_to_its_end() {
    let mut endless = vec![b'a'; 32 << 20];
    // What is read ends within a character.
    endless.extend("é".as_bytes());
    for (input, at) in [
        ("in=stdin", "standard input"),
        ("in=text", "a line of standard input"),
    ] {
        let command = genset(&["run", input, "out=echo_full"]);
        let ended = run_with(command, &endless).await;
        let expected = format!("error: {at}: is over the limit of 33554432 bytes");
        ended.fails(1, &expected);
        assert_eq!(ended.stdout, "", "{input}");
    }
}

#[tokio::test]
async fn what_cannot_be_asked_fails_with_one_line() {
    let cases: [(&[u8], &str); 5] = [
        (b"", "standard input: is empty"),
        (b"\r\n", "standard input: is empty"),
        (b"\n\n", "standard input: is empty"),
        (b"caf\xe9", "standard input: is not UTF-8 text"),
        (&[b'a'; 100_000], "2048"),
    ];
    for (input, expected) in cases {
        let ended = ask(&[], input).await;
        ended.fails(1, expected);
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
        assert_eq!(ended.stdout, "");
    }
}

#[tokio::test]
async fn without_a_worker_an_input_that_nobody_watches_ends_with_code_1() {
    let fleet = Fleet::new();
    let folder = tempfile::tempdir().unwrap();
    let prompts = folder.path().join("prompts.jsonl");
    std::fs::write(&prompts, r#"{"text": "Hello"}"#).unwrap();
    for input in ["in=stdin", &format!("in=batch:{}", prompts.display())] {
        let words = ["run", input, "out=dyn://nobody", "--worker-wait=0.1"];
        let ended = fleet.ask(&words).await;
        assert_eq!(ended.code, Some(1), "{ended:?}");
        let told = ended.stderr.lines().last().unwrap_or_default();
        let expected =
            "error: no worker of out=dyn://nobody served a model within 0.1 s (--worker-wait)";
        assert!(told.starts_with(expected), "{ended:?}");
    }
}

/// The exit code and standard error of a run with `stdout` as standard output.
async fn ended_with(words: &[&str], stdout: impl Into<Stdio>) -> (Option<i32>, String) {
    let mut command = genset(words);
    command
        .stdin(Stdio::piped())
        .stdout(stdout)
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // A program that does not read its input may have exited already.
    stdin.write_all(b"hello\n").await.unwrap_or_default();
    drop(stdin);
    let ended = soon(child.wait_with_output()).await.unwrap();
    let stderr = String::from_utf8_lossy(&ended.stderr).into_owned();
    (ended.status.code(), stderr)
}

#[tokio::test]
async fn an_output_that_is_full_is_a_failure_and_a_reader_that_has_gone_is_none() {
    for words in [
        &["run", "in=stdin", "out=echo_full"][..],
        &["run", "in=text", "out=echo_full"],
        &["key", "app"],
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full");
        let (code, stderr) = ended_with(words, full.unwrap()).await;
        assert_eq!(code, Some(1), "{words:?}: {stderr}");
        let expected = "error: standard output cannot be written: ";
        assert!(stderr.starts_with(expected), "{words:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{words:?}: {stderr}");

        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let (code, stderr) = ended_with(words, writer).await;
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{words:?}");
    }
}

/// Starts a program whose input stays open, with its log on a pipe.
fn open_ended(words: &[&str]) -> Child {
    let mut command = genset(&["run", "in=stdin"]);
    command.args(words).env("GENSET_LOG", "info");
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

async fn until_log(log: &mut BufReader<ChildStderr>, text: &str) {
    let mut line = String::new();
    while !line.contains(text) {
        line.clear();
        assert!(
            soon(log.read_line(&mut line)).await.unwrap() > 0,
            "the log ended"
        );
    }
}

#[tokio::test]
async fn a_signal_before_the_question_ends_the_wait_with_code_3() {
    let mut child = open_ended(&[]);
    let _open = child.stdin.take();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    until_log(&mut log, "model ready").await;
    send_signal(&child, Signal::TERM);
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(3));
}

#[tokio::test]
async fn an_answer_that_a_signal_cuts_short_ends_with_code_3() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut child = open_ended(&["--token-echo-delay-ms", "200"]);
        let mut stdin = child.stdin.take().unwrap();
        let question = "a long question ".repeat(100);
        stdin.write_all(question.as_bytes()).await.unwrap();
        drop(stdin);
        let mut stdout = child.stdout.take().unwrap();
        soon(stdout.read_u8()).await.unwrap();
        send_signal(&child, signal);
        assert_eq!(soon(child.wait()).await.unwrap().code(), Some(3));
    }
}

#[tokio::test]
async fn a_second_signal_cuts_short_what_others_ask() {
    let fleet = Fleet::new();
    let mut words = vec!["run", "in=stdin", "out=sample", "--token-delay-ms=30"];
    words.extend(["--grace=100000", "--discovery-backend=file"]);
    let mut command = fleet.command(&words, &[("GENSET_LOG", "info")]);
    command.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let _open = child.stdin.take();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let frontend = fleet.frontend(&[]).await;
    let mut stream = frontend.stream(10_000).await;
    stream.first_piece().await;
    send_signal(&child, Signal::TERM);
    until_log(&mut log, "finishing requests").await;
    send_signal(&child, Signal::TERM);
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(3));
}
