//! A pseudo-terminal that waits like a person: it answers the queries that a program sends to its terminal, and reads the screen
//! as text.

use std::os::fd::{AsFd, OwnedFd};

use pty_process::{Pty, Size};
use rustix::termios::{LocalModes, tcgetattr};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Child;

use crate::support::soon;

/// The query that a program sends for the cursor's position.
const CURSOR_QUESTION: &str = "\x1b[6n";

/// Replaces that query in the shown text. The editor sends it once for each line that it reads, but redraws the prompt's own
/// characters with every key.
pub(crate) const PROMPT: &str = "\0";

pub(crate) struct Terminal {
    pub(crate) child: Child,
    pty: Pty,
    /// Keeps the terminal open after the program exits.
    program_side: OwnedFd,
    _home: TempDir,
    /// Bytes that are not yet decoded.
    bytes: Vec<u8>,
    /// Shown text that is not yet expected, without control sequences.
    shown: String,
    /// The screen that a person sees.
    screen: vt100::Parser,
}

/// Rows and columns of the terminal.
const SIZE: (u16, u16) = (24, 100);

impl Terminal {
    /// Starts `genset run in=text out=echo_core` with additional words.
    pub(crate) fn start(words: &[&str]) -> Self {
        Self::start_with("out=echo_core", words, &[])
    }

    /// Starts `genset run in=text` with another engine, additional words and variables.
    pub(crate) fn start_with(out: &str, words: &[&str], variables: &[(&str, &str)]) -> Self {
        Self::spawn(&[&["run", "in=text", out], words].concat(), variables)
    }

    /// Starts `genset` with words and variables.
    pub(crate) fn spawn(words: &[&str], variables: &[(&str, &str)]) -> Self {
        let home = tempfile::tempdir().expect("a home");
        let (pty, program_side) = pty_process::open().expect("a pseudo-terminal");
        pty.resize(Size::new(SIZE.0, SIZE.1)).expect("a size");
        let held = program_side.as_fd().try_clone_to_owned();
        let command = pty_process::Command::new(env!("CARGO_BIN_EXE_genset"))
            .args(words)
            .env_clear()
            .env("TERM", "xterm-256color")
            .env("HOME", home.path())
            .envs(variables.iter().copied())
            .kill_on_drop(true);
        Self {
            child: command.spawn(program_side).expect("the binary starts"),
            pty,
            program_side: held.expect("a second handle"),
            _home: home,
            bytes: Vec::new(),
            shown: String::new(),
            screen: vt100::Parser::new(SIZE.0, SIZE.1, 0),
        }
    }

    pub(crate) async fn type_keys(&mut self, keys: &str) {
        soon(self.pty.write_all(keys.as_bytes()))
            .await
            .expect("the terminal takes keys");
    }

    /// Types a line when the prompt appears.
    pub(crate) async fn enter(&mut self, line: &str) {
        self.expect(PROMPT).await;
        self.type_keys(&format!("{line}\r")).await;
    }

    /// Reads until `text` is shown; returns the text before it. Consumes what it reads.
    pub(crate) async fn expect(&mut self, text: &str) -> String {
        loop {
            if let Some(at) = self.shown.find(text) {
                let rest = self.shown.split_off(at + text.len());
                let mut before = std::mem::replace(&mut self.shown, rest);
                before.truncate(at);
                return before;
            }
            assert!(self.read().await, "no {text:?} in {:?}", self.shown);
        }
    }

    /// Reads until the screen satisfies `is_so`.
    pub(crate) async fn until(&mut self, is_so: impl Fn(&vt100::Screen) -> bool) {
        while !is_so(self.screen.screen()) {
            assert!(self.read().await, "it stayed as it was: {:?}", self.lines());
        }
    }

    async fn read(&mut self) -> bool {
        let read =
            tokio::time::timeout(crate::support::PATIENCE, self.pty.read_buf(&mut self.bytes));
        let Ok(Ok(1..)) = read.await else {
            return false;
        };
        let Ok(text) = std::str::from_utf8(&self.bytes) else {
            // An incomplete character or control sequence waits for the rest.
            return true;
        };
        let (shown, questions, rest) = without_control(text);
        let rest = rest.as_bytes().to_vec();
        let whole = text.len() - rest.len();
        self.screen.process(&text.as_bytes()[..whole]);
        self.shown += &shown;
        self.bytes = rest;
        for _ in 0..questions {
            self.type_keys("\x1b[1;1R").await;
        }
        true
    }

    /// The non-blank lines on the screen.
    pub(crate) fn lines(&self) -> Vec<String> {
        let contents = self.screen.screen().contents();
        let lines = contents.lines().map(|line| line.trim_end().to_owned());
        lines.filter(|line| !line.is_empty()).collect()
    }

    /// The style of `text` on the screen: that of its first character, in the last line that contains it.
    pub(crate) fn look(&self, text: &str) -> &vt100::Cell {
        let screen = self.screen.screen();
        let mut rows: Vec<_> = screen.rows(0, SIZE.1).collect();
        let place = loop {
            let row = rows.pop().expect("it is on the screen");
            if let Some(column) = row.find(text) {
                break (rows.len(), row[..column].chars().count());
            }
        };
        let place = (
            place.0.try_into().expect("a row"),
            place.1.try_into().expect("a column"),
        );
        screen.cell(place.0, place.1).expect("a cell")
    }

    /// The exit code.
    pub(crate) async fn exit_code(&mut self) -> Option<i32> {
        // Read the remaining output, or the program blocks on a full buffer.
        loop {
            tokio::select! {
                ended = soon(self.child.wait()) => return ended.expect("it ends").code(),
                _ = self.pty.read_buf(&mut self.bytes) => {}
            }
        }
    }

    /// Whether the terminal has a shell's settings: line mode, echo, and keys that send signals.
    pub(crate) fn is_cooked(&self) -> bool {
        let modes = tcgetattr(&self.program_side)
            .expect("a terminal")
            .local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }
}

/// Returns the text without its control sequences, the number of cursor queries, and the start of an incomplete sequence.
fn without_control(text: &str) -> (String, usize, &str) {
    let (mut shown, mut questions, mut rest) = (String::new(), 0, text);
    while let Some(at) = rest.find('\x1b') {
        shown += &rest[..at];
        rest = &rest[at..];
        let Some(len) = control_length(rest) else {
            return (shown, questions, rest);
        };
        if &rest[..len] == CURSOR_QUESTION {
            shown += PROMPT;
            questions += 1;
        }
        rest = &rest[len..];
    }
    (shown + rest, questions, "")
}

/// The length of the control sequence at the start of `text`; `None` if it is incomplete.
fn control_length(text: &str) -> Option<usize> {
    match text.as_bytes().get(1)? {
        b'[' => text[2..]
            .find(|c: char| ('@'..='~').contains(&c))
            .map(|at| at + 3),
        b']' => text.find('\x07').map(|at| at + 1),
        _ => Some(2),
    }
}

#[test]
fn control_sequences_are_taken_out() {
    let (shown, questions, rest) = without_control("a\x1b[31mb\x1b[6n\x1b]0;title\x07\x1b7c\x1b[2");
    assert_eq!((shown.as_str(), questions, rest), ("ab\0c", 1, "\x1b[2"));
}
