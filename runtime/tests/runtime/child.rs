//! A test of this binary in a process of its own, for other tests to kill, stop and starve.
//!
//! The test finds a variable in its environment and then plays the child: it reads commands from standard input and [says](say)
//! lines to its parent.

use std::io::Write as _;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};

use crate::support::soon;

/// The prefix of the child's lines among those of the test harness.
const SAID: &str = "child says: ";

/// A child, killed on drop.
pub(crate) struct Child {
    process: tokio::process::Child,
    commands: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Child {
    /// Runs `test` of the module with the path `module`, with this variable.
    pub(crate) fn start(module: &str, test: &str, (name, value): (&str, &str)) -> Self {
        let (_, module) = module.split_once("::").unwrap();
        // Exceeding the file size limit must be an error and not kill the child: the shell ignores the signal for it.
        let mut process = Command::new("sh")
            .args(["-c", r#"trap '' XFSZ; exec "$0" "$@""#])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", &format!("{module}::{test}")])
            .args(["--nocapture", "--test-threads=1"])
            .env(name, value)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        Self {
            commands: process.stdin.take().unwrap(),
            output: BufReader::new(process.stdout.take().unwrap()).lines(),
            process,
        }
    }

    /// Sends a command and returns the answer.
    pub(crate) async fn ask(&mut self, command: &str) -> String {
        let line = format!("{command}\n");
        soon(self.commands.write_all(line.as_bytes()))
            .await
            .unwrap();
        self.said().await
    }

    /// The next line that it says.
    pub(crate) async fn said(&mut self) -> String {
        loop {
            let line = soon(self.output.next_line()).await.unwrap();
            let line = line.expect("the child lives");
            // The harness may have written the start of the line.
            if let Some((_, said)) = line.split_once(SAID) {
                return said.to_owned();
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let id = self.process.id().expect("the child lives");
        let id = Pid::from_raw(id.try_into().unwrap()).unwrap();
        kill_process(id, signal).unwrap();
    }

    /// Kills it without notice.
    pub(crate) async fn kill(&mut self) {
        soon(self.process.kill()).await.unwrap();
    }

    /// Ends its input, waits for it to exit, and returns whether it succeeded.
    pub(crate) async fn end(mut self) -> bool {
        drop(self.commands);
        soon(self.process.wait()).await.unwrap().success()
    }
}

/// Sends a line from the child to its parent.
pub(crate) fn say(line: &str) {
    let mut parent = std::io::stdout().lock();
    writeln!(parent, "{SAID}{line}").unwrap();
}
