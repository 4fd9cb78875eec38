//! If nobody reads standard output and standard error, the exit code does not change; a full disk is a failure.

use std::fs::File;
use std::process::Stdio;

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;

use crate::support::{genset, send_signal, soon};

/// A pipe without a reader, as behind `| head -1` after its line.
fn unread() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

/// A full disk.
fn full() -> Stdio {
    let device = File::options().write(true).open("/dev/full").unwrap();
    device.into()
}

/// The same command with both outputs closed, as by `>&- 2>&-`.
fn closed(command: &Command) -> Command {
    let command = command.as_std();
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", "exec \"$0\" \"$@\" >&- 2>&-"]);
    shell.arg(command.get_program()).args(command.get_args());
    shell.env_clear().kill_on_drop(true);
    shell
}

async fn code(mut command: Command, input: &[u8]) -> Option<i32> {
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // A program that does not read its input may have exited already.
    drop(stdin.write_all(input).await);
    drop(stdin);
    soon(child.wait()).await.unwrap().code()
}

#[tokio::test]
async fn outputs_that_nobody_reads_change_no_exit_code_and_full_ones_fail() {
    let ask: &[&str] = &["run", "in=stdin", "out=echo_full", "-vv"];
    let cases: [(&[&str], &[u8], i32); 12] = [
        (ask, b"hello", 0),
        (ask, b"", 1),
        (
            &["run", "in=stdin", "out=cmd:/no/such/program"],
            b"hello",
            1,
        ),
        (&["run", "in=text", "out=echo_full"], b"hello\n/help\n", 0),
        (&["run", "in=nowhere"], b"", 2),
        (&["run", "in=http", "--http-port", "no"], b"", 2),
        (&["--no-such-flag"], b"", 2),
        (&["--help"], b"", 0),
        (&["key", "team-a"], b"", 0),
        (&["run", "--print-config"], b"", 0),
        (&["conform", "list"], b"", 0),
        (&["bench", "engine", "/no/such/model"], b"", 2),
    ];
    let ended = cases.map(|(words, input, expected)| async move {
        let command = |output: fn() -> Stdio| {
            let mut command = genset(words);
            command.stdout(output()).stderr(output());
            command
        };
        assert_eq!(
            code(command(unread), input).await,
            Some(expected),
            "unread: {words:?}"
        );
        // clap itself exits after the help.
        let failed = if words == ["--help"] {
            0
        } else {
            expected.max(1)
        };
        assert_eq!(
            code(command(full), input).await,
            Some(failed),
            "full: {words:?}"
        );
        let command = closed(&genset(words));
        assert_eq!(
            code(command, input).await,
            Some(expected),
            "closed: {words:?}"
        );
    });
    futures_util::future::join_all(ended).await;
}

#[tokio::test]
async fn an_answer_ends_once_its_reader_has_gone() {
    // It would take minutes.
    let question = "word ".repeat(2000) + "\n";
    for input in ["in=stdin", "in=text"] {
        let words = ["run", input, "out=echo_full", "--token-echo-delay-ms=200"];
        let mut command = genset(&words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(question.as_bytes()).await.unwrap();
        // A chat could read further questions; in=stdin asks at the end of its input.
        let _open = (input == "in=text").then_some(stdin);
        let mut stdout = child.stdout.take().unwrap();
        soon(stdout.read_u8()).await.unwrap();
        drop(stdout);
        let ended = soon(child.wait()).await.unwrap();
        assert_eq!(ended.code(), Some(0), "{input}");
    }
}

#[tokio::test]
async fn a_server_whose_log_nobody_reads_serves_and_ends_well() {
    let mut command = genset(&["run", "in=http", "out=echo_full", "--http-port", "0", "-vv"]);
    command.stdout(Stdio::piped()).stderr(unread());
    let mut child = command.spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("listening on ") {
        line.clear();
        assert!(soon(stdout.read_line(&mut line)).await.unwrap() > 0);
    }
    drop(stdout);
    send_signal(&child, Signal::TERM);
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(0));
}
