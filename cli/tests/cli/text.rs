//! `in=text`: a chat on a terminal and on pipes.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::process::Stdio;

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};

use crate::fleet::Fleet;
use crate::support::{file, genset, run_with, send_signal, soon};
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
    // The echo is the whole prompt: it includes the system's text, which was not typed in this line.
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
    // At the prompt, Ctrl-C drops the line.
    terminal.expect(PROMPT).await;
    terminal.type_keys("half a li\x03").await;
    terminal.enter("/exit").await;
    assert_eq!(terminal.exit_code().await, Some(0));
}

/// Some templates refuse an answer without a text.
#[tokio::test]
async fn an_answer_that_is_stopped_before_its_text_is_not_kept() {
    let parser = ["--reasoning-parser", "deepseek_r1"];
    let words = [&["--token-echo-delay-ms", "200"][..], &parser].concat();
    let mut terminal = Terminal::start(&words);
    terminal.enter("/system a marker").await;
    terminal.expect("The system prompt is set").await;
    terminal.enter(&"one two three ".repeat(60)).await;
    // The echo is all reasoning.
    terminal.expect("marker").await;
    terminal.type_keys("\x03").await;
    terminal.expect("[stopped]").await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk.json");
    terminal.enter(&format!("/save {}", file.display())).await;
    terminal.expect("0 messages are saved.").await;
}

#[tokio::test]
async fn commands_do_what_help_says() {
    let mut terminal = Terminal::start(FAST);
    terminal.enter("/help").await;
    for command in [
        "/clear",
        "/system TEXT",
        "/model",
        "/set",
        "/tokens",
        "/save FILE",
        "/load FILE",
        "/exit",
        "Ctrl-C",
    ] {
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
    terminal.expect("/clear forgets it.").await;
    terminal.enter("and now").await;
    let answer = terminal.expect(PROMPT).await;
    assert!(answer.contains("remember alpha"), "{answer:?}");
    assert!(!answer.contains("too much"), "{answer:?}");
    terminal.type_keys("\x04").await;
    assert_eq!(terminal.exit_code().await, Some(0));
}

#[tokio::test]
async fn a_dumb_terminal_edits_the_line_itself() {
    let mut terminal = Terminal::start_with("out=echo_full", FAST, &[("TERM", "dumb")]);
    terminal.expect("Ctrl-D leaves.\r\n> ").await;
    assert!(terminal.is_cooked());
    terminal.type_keys("hello\r").await;
    terminal.expect("hello\r\nhello\r\n> ").await;
    terminal.type_keys("\x04").await;
    assert_eq!(terminal.exit_code().await, Some(0));
}

#[tokio::test]
async fn arrow_up_brings_the_last_lines_back() {
    let state = tempfile::tempdir().unwrap();
    fs::create_dir(state.path().join("genset")).unwrap();
    symlink("/dev/null", state.path().join("genset/history")).unwrap();
    let kept_nowhere = [("XDG_STATE_HOME", state.path().to_str().unwrap())];
    for variables in [&[][..], &kept_nowhere] {
        let mut terminal = Terminal::start_with("out=echo_core", FAST, variables);
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
}

#[tokio::test]
async fn the_history_is_private_and_outlives_sigterm() {
    let state = tempfile::tempdir().unwrap();
    let folder = state.path().join("genset");
    let file = folder.join("history");
    fs::create_dir(&folder).unwrap();
    fs::write(&file, "earlier\n").unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
    let variables = [("XDG_STATE_HOME", state.path().to_str().unwrap())];
    let mut terminal = Terminal::start_with("out=echo_core", FAST, &variables);
    terminal.enter("/first-of-all").await;
    terminal.expect("/first-of-all is no command").await;
    send_signal(&terminal.child, Signal::TERM);
    assert_eq!(terminal.exit_code().await, Some(0));
    let kept = fs::read_to_string(&file).unwrap();
    assert_eq!(kept, "earlier\n/first-of-all\n");
    let mode = fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn sigterm_at_the_prompt_gives_the_terminal_back() {
    let mut terminal = Terminal::start(FAST);
    terminal.expect(PROMPT).await;
    assert!(!terminal.is_cooked(), "the editor takes single keys");
    terminal.until(vt100::Screen::bracketed_paste).await;
    send_signal(&terminal.child, Signal::TERM);
    terminal.until(|screen| !screen.bracketed_paste()).await;
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
    let input = "hello there\n\n/nonsense\n/exit now\nnot read\n";
    let ended = run_with(genset(&words), input.as_bytes()).await;
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stdout, "hello there\n");
    let expected = "/nonsense is no command; /help lists them.\n";
    assert!(ended.stderr.ends_with(expected), "{}", ended.stderr);

    let ended = run_with(genset(&words), b"a\nb").await;
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "a\nb\n"));
    let input = b"/set max_tokens 2\nword word word word word word\n";
    let ended = run_with(genset(&words), input).await;
    let expected = "[cut off: max_tokens or the end of the context is reached]\n";
    assert!(ended.stderr.ends_with(expected), "{}", ended.stderr);
    let ended = run_with(genset(&words), b"\xff\xfe\n").await;
    ended.fails(1, "error: a line of standard input: is not UTF-8 text");
}

#[tokio::test]
async fn ctrl_c_ends_a_chat_whose_questions_come_through_a_pipe() {
    let words = ["run", "in=text", "out=echo_full"];
    let mut command = genset(&words);
    command.arg("--token-echo-delay-ms=200");
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    // Each answer would take minutes.
    let question = "word ".repeat(2000) + "\n";
    let mut stdin = child.stdin.take().unwrap();
    stdin
        .write_all(question.repeat(2).as_bytes())
        .await
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    soon(stdout.read_u8()).await.unwrap();
    send_signal(&child, Signal::INT);
    let ended = soon(child.wait()).await.unwrap();
    assert_eq!(ended.code(), Some(0));
}

#[tokio::test]
async fn a_chat_goes_on_with_workers_that_replace_others() {
    let fleet = Fleet::new();
    // Aliases make their cards differ.
    let worker = async |aliases: &str| {
        let words = ["in=dyn", "out=echo_full", "--model-name=m", aliases];
        fleet.worker_of(&words, &[]).await
    };
    let first = worker("--aliases=first").await;
    let words = ["run", "in=text", "out=dyn", "--migration-wait=0.1"];
    let mut child = fleet
        .command(&words, &[])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut ask = async |question: &str| {
        stdin.write_all(question.as_bytes()).await.unwrap();
        let mut line = String::new();
        soon(stdout.read_line(&mut line)).await.unwrap();
        line
    };
    assert_eq!(ask("before\n").await, "before\n");
    first.stop().await;
    let second = worker("--aliases=second").await;
    // Discovery tells the chat a moment later. Until then, the answer is an empty line.
    soon(async { while ask("after\n").await != "after\n" {} }).await;
    second.stop().await;
}

#[tokio::test]
async fn an_answer_that_fails_is_not_in_the_pipe_and_makes_the_end_a_failure() {
    let words = [
        "run",
        "in=text",
        "out=echo_core",
        "--token-echo-delay-ms=0",
        "--context-length=200",
    ];
    let input = format!("{}\nand now\n", "too much ".repeat(100));
    let ended = run_with(genset(&words), input.as_bytes()).await;
    ended.fails(1, "error: ");
    assert!(!ended.stdout.contains("error: "), "{}", ended.stdout);
    assert!(ended.stdout.contains("and now"), "{}", ended.stdout);
}

/// Two answers: one with most markup that models write, and one with reasoning.
const SCRIPT: &str = r##"
[[reply]]
match.contains = "style"
text = """
# The plan

Take **two eggs** and *some* `flour`.
- beat
- bake

```sh
genset run
```
> done \u001b[2J
"""
chunk_chars = 3

[[reply]]
match.contains = "why"
text = "<think>The sky scatters.</think>Because of **blue**."
chunk_chars = 4

[[reply]]
text = "You said: {{last_user}}"
"##;

fn scripted(words: &[&str], variables: &[(&str, &str)]) -> (Terminal, tempfile::NamedTempFile) {
    let script = file(SCRIPT);
    let path = script.path().to_str().unwrap();
    let words = [&["--script", path], words].concat();
    let terminal = Terminal::start_with("out=scripted", &words, variables);
    (terminal, script)
}

#[tokio::test]
async fn an_answer_has_the_look_of_its_markdown() {
    let (mut terminal, _script) = scripted(&[], &[]);
    terminal.enter("style").await;
    terminal.expect(PROMPT).await;
    let lines = terminal.lines();
    let at = lines
        .iter()
        .position(|line| line == "The plan")
        .expect("a heading");
    assert_eq!(
        lines[at..at + 7],
        [
            "The plan",
            "Take two eggs and some flour.",
            "• beat",
            "• bake",
            "```sh",
            "genset run",
            "```",
        ]
    );
    // Its control character did not clear the screen.
    assert_eq!(lines[at + 7], "│ done [2J");
    assert!(terminal.look("The plan").bold());
    assert!(terminal.look("two eggs").bold());
    assert!(!terminal.look("and some").bold());
    assert!(terminal.look("some flour").italic());
    assert_ne!(terminal.look("flour").fgcolor(), vt100::Color::Default);
    assert!(terminal.look("```sh").dim());
    assert_ne!(terminal.look("genset run").fgcolor(), vt100::Color::Default);
    assert!(!terminal.look("done").dim());
    terminal.type_keys("\x04").await;
    assert_eq!(terminal.exit_code().await, Some(0));
}

#[tokio::test]
async fn the_log_has_no_colours_where_there_shall_be_none() {
    let words = ["run", "in=http", "out=echo_full", "--http-port=0"];
    for (variables, has_colours) in [
        (&[("NO_COLOR", "")][..], true),
        (&[("NO_COLOR", "1")], false),
        (&[("TERM", "dumb")], false),
    ] {
        let mut terminal = Terminal::spawn(&words, variables);
        terminal.expect("INFO").await;
        let is_default = terminal.look("INFO").fgcolor() == vt100::Color::Default;
        assert_eq!(!is_default, has_colours, "{variables:?}");
    }
}

#[tokio::test]
async fn reasoning_is_dimmed_and_named_where_there_is_no_colour() {
    let parser = ["--reasoning-parser", "deepseek_r1"];
    let (mut terminal, _script) = scripted(&parser, &[]);
    terminal.enter("why").await;
    terminal.expect("blue").await;
    terminal.expect(PROMPT).await;
    assert!(terminal.look("The sky scatters.").dim());
    assert!(!terminal.look("Because").dim());
    assert!(terminal.look("blue").bold());
    terminal.type_keys("\x04").await;
    assert_eq!(terminal.exit_code().await, Some(0));

    let (mut terminal, _script) = scripted(&parser, &[("NO_COLOR", "1")]);
    terminal.enter("why").await;
    terminal.expect("Because of **blue**.").await;
    terminal.expect(PROMPT).await;
    let lines = terminal.lines();
    assert!(
        lines.contains(&"reasoning: The sky scatters.".to_owned()),
        "{lines:?}"
    );
    assert!(!terminal.look("The sky scatters.").dim());
    terminal.type_keys("\x04").await;
    assert_eq!(terminal.exit_code().await, Some(0));
}

#[tokio::test]
async fn settings_are_checked_and_a_conversation_is_kept_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk.json");
    let file = file.to_str().unwrap();
    let (mut terminal, _script) = scripted(&[], &[]);
    for (line, told) in [
        ("/tokens", "Nothing was answered yet."),
        ("/set", "All settings are the model's own."),
        ("/set temperature 0.2", "temperature is 0.2."),
        (
            "/set temperature hot",
            "error: Invalid value for 'temperature'",
        ),
        ("/set n 3", "error: n: is no setting of this chat"),
        (
            "/set temprature 1",
            "error: Unrecognized request argument supplied: temprature",
        ),
        ("/set temprature", "temprature was not set."),
        ("/set", "temperature 0.2"),
        ("/model none", "error: no model has the name \"none\""),
        ("/save", "error: /save needs a file"),
        ("hello", "You said: hello"),
        ("/tokens", "prompt "),
        (&format!("/save {file}"), "2 messages are saved."),
        ("/clear", "The conversation is forgotten."),
        ("/load /no/such", "error: /no/such cannot be read"),
        (&format!("/load {file}"), "2 messages are loaded."),
        ("//not a command", "You said: /not a command"),
        ("/model", "* "),
        ("one \\", "::: "),
    ] {
        terminal.enter(line).await;
        terminal.expect(told).await;
    }
    terminal.type_keys("two\r").await;
    terminal.expect("You said: one").await;
    terminal.expect(PROMPT).await;
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(saved["settings"]["temperature"], 0.2);
    assert_eq!(saved["messages"][1]["content"], "You said: hello");
    terminal.type_keys("\x04").await;
    assert_eq!(terminal.exit_code().await, Some(0));
}

#[tokio::test]
async fn a_pasted_text_is_one_question_and_ctrl_c_twice_leaves() {
    let (mut terminal, _script) = scripted(&[], &[]);
    terminal.expect(PROMPT).await;
    terminal
        .type_keys("\x1b[200~first line\nsecond line\x1b[201~")
        .await;
    terminal.expect("second line").await;
    terminal.type_keys("\r").await;
    terminal.expect("You said: first line").await;
    terminal.expect(PROMPT).await;
    terminal.type_keys("half\x03").await;
    terminal.expect("Ctrl-C again leaves.").await;
    terminal.enter("/tokens").await;
    terminal.expect("prompt ").await;
    terminal.expect(PROMPT).await;
    // A line that is dropped after another one was typed: no conversation ends by that.
    for keys in ["\x03", "another half\x03"] {
        terminal.type_keys(keys).await;
        terminal.expect("Ctrl-C again leaves.").await;
        terminal.expect(PROMPT).await;
    }
    terminal.type_keys("\x03").await;
    assert_eq!(terminal.exit_code().await, Some(0));
    assert!(terminal.is_cooked());
}
