//! `in=text`: a chat on a terminal, and on pipes.

use rustix::process::Signal;

use crate::support::{genset, run_with, send_signal};
use crate::terminal::{PROMPT, Terminal};

const FAST: &[&str] = &["--token-echo-delay-ms", "0"];

#[tokio::test]
async fn a_question_is_answered_and_ctrl_d_leaves() {
    let mut terminal = Terminal::start(FAST);
    terminal
        .expect("Chat with tiny-chat. /help lists the commands")
        .await;
    terminal.enter("/system marker of the system").await;
    terminal.expect("The system prompt is set").await;
    terminal.enter("what is a lighthouse").await;
    // The echo is the whole prompt: the system's text comes back, which was not typed in this line.
    terminal.expect("marker of the system").await;
    terminal.expect("what is a lighthouse").await;
    terminal.expect(PROMPT).await;
    terminal.type_keys("\x04").await;
    assert_eq!(terminal.exit_code().await, Some(0));
    assert!(terminal.is_cooked());
}

#[tokio::test]
async fn ctrl_c_stops_an_answer_and_the_prompt_returns() {
    let mut terminal = Terminal::start(&["--token-echo-delay-ms", "200"]);
    terminal.enter("/system a marker").await;
    terminal.expect("The system prompt is set").await;
    let long = "one two three four five six seven eight nine ten ".repeat(20);
    terminal.enter(&long).await;
    terminal.expect("marker").await;
    terminal.type_keys("\x03").await;
    terminal.expect("[stopped]").await;
    // At the prompt it drops the line.
    terminal.expect(PROMPT).await;
    terminal.type_keys("half a li\x03").await;
    terminal.enter("/exit").await;
    assert_eq!(terminal.exit_code().await, Some(0));
}

#[tokio::test]
async fn commands_do_what_help_says() {
    let mut terminal = Terminal::start(FAST);
    terminal.enter("/help").await;
    for command in ["/clear", "/system TEXT", "/exit", "Ctrl-C"] {
        terminal.expect(command).await;
    }
    terminal.enter("/nonsense now").await;
    terminal
        .expect("/nonsense is no command; /help lists them.")
        .await;
    terminal.enter("first alpha").await;
    terminal.enter("second beta").await;
    terminal.enter("/clear").await;
    terminal.expect("The conversation is forgotten.").await;
    terminal.enter("third gamma").await;
    let answer = terminal.expect(PROMPT).await;
    assert!(
        answer.contains("third gamma") && !answer.contains("alpha"),
        "{answer:?}"
    );
    terminal.type_keys("/exit\r").await;
    assert_eq!(terminal.exit_code().await, Some(0));
}

#[tokio::test]
async fn a_conversation_keeps_its_turns_and_no_failed_one() {
    let mut terminal = Terminal::start(&["--token-echo-delay-ms", "0", "--context-length", "200"]);
    terminal.enter("remember alpha").await;
    terminal.expect("remember alpha").await;
    terminal.enter(&"too much ".repeat(100)).await;
    terminal.expect("error: ").await;
    terminal.enter("and now").await;
    let answer = terminal.expect(PROMPT).await;
    assert!(answer.contains("remember alpha"), "{answer:?}");
    assert!(!answer.contains("too much"), "{answer:?}");
    terminal.type_keys("\x04").await;
    assert_eq!(terminal.exit_code().await, Some(0));
}

#[tokio::test]
async fn arrow_up_brings_the_last_line_back() {
    let mut terminal = Terminal::start(FAST);
    terminal.enter("/first-of-all").await;
    terminal.expect("/first-of-all is no command").await;
    terminal.enter("/second-of-all").await;
    terminal.expect("/second-of-all is no command").await;
    terminal.expect(PROMPT).await;
    terminal.type_keys("\x1b[A").await;
    terminal.expect("/second-of-all").await;
    terminal.type_keys("\x1b[A").await;
    terminal.expect("/first-of-all").await;
    terminal.type_keys("\r").await;
    terminal.expect("/first-of-all is no command").await;
    terminal.expect(PROMPT).await;
    terminal.type_keys("\x04").await;
    assert_eq!(terminal.exit_code().await, Some(0));
}

#[tokio::test]
async fn sigterm_at_the_prompt_gives_the_terminal_back() {
    let mut terminal = Terminal::start(FAST);
    terminal.expect(PROMPT).await;
    assert!(!terminal.is_cooked(), "the editor takes single keys");
    send_signal(&terminal.child, Signal::TERM);
    assert_eq!(terminal.exit_code().await, Some(0));
    assert!(terminal.is_cooked());
}

#[tokio::test]
async fn sigterm_in_an_answer_leaves_cleanly() {
    let mut terminal = Terminal::start(&["--token-echo-delay-ms", "200"]);
    terminal.enter("/system a marker").await;
    terminal.expect("The system prompt is set").await;
    terminal.enter(&"a long question ".repeat(50)).await;
    terminal.expect("marker").await;
    send_signal(&terminal.child, Signal::TERM);
    assert_eq!(terminal.exit_code().await, Some(0));
    assert!(terminal.is_cooked());
}

#[tokio::test]
async fn without_a_terminal_lines_are_read_from_the_pipe() {
    let words = [
        "run",
        "in=text",
        "out=echo_full",
        "--token-echo-delay-ms",
        "0",
    ];
    let input = "hello there\n\n/nonsense\n/exit\nnot read\n";
    let ended = run_with(genset(&words), input.as_bytes()).await;
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let expected = "hello there\n/nonsense is no command; /help lists them.\n";
    assert_eq!(ended.stdout, expected);

    let ended = run_with(genset(&words), b"a\nb").await;
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "a\nb\n"));
    let ended = run_with(genset(&words), b"\xff\xfe\n").await;
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("error: "), "{ended:?}");
}
