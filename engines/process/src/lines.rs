//! The output of a process, line by line: [`follow`] reads it, [`Tail`] keeps the last lines, [`log`] logs them.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use tracing::Level;

/// The maximum length of a line in bytes; a longer one is cut. Progress bars and binary data have no line ends.
pub(crate) const MAX_LINE_BYTES: u64 = 16 << 10;
/// How long to wait for the last lines after the process group is gone. Only a process that left the group can delay them.
const LAST_LINES: Duration = Duration::from_millis(500);

/// The last lines that a process printed.
#[derive(Debug)]
pub struct Tail {
    lines: Mutex<VecDeque<String>>,
    capacity: usize,
}

impl Tail {
    /// Keeps `capacity` lines. With a capacity of 0, still keeps the last line for [`Self::last`].
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            lines: Mutex::default(),
            capacity,
        }
    }

    /// Adds a line.
    pub(crate) fn keep(&self, line: &str) {
        let mut lines = self.lines.lock();
        if lines.len() >= self.capacity.max(1) {
            lines.pop_front();
        }
        lines.push_back(line.to_owned());
    }

    /// The lines, oldest first.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let lines = self.lines.lock();
        lines.iter().take(self.capacity).cloned().collect()
    }

    /// The last line.
    #[must_use]
    pub fn last(&self) -> Option<String> {
        self.lines.lock().back().cloned()
    }
}

/// The level for a word, as most loggers write it.
#[must_use]
pub fn level_named(word: &str) -> Option<Level> {
    match word {
        "CRITICAL" | "FATAL" | "ERROR" => Some(Level::ERROR),
        "WARNING" | "WARN" => Some(Level::WARN),
        "INFO" => Some(Level::INFO),
        "DEBUG" => Some(Level::DEBUG),
        "TRACE" => Some(Level::TRACE),
        _ => None,
    }
}

/// Logs a line that a process printed, with the process's id and server name.
pub fn log(level: Level, pid: Option<u32>, server: Option<&str>, text: &str) {
    match level {
        Level::ERROR => tracing::error!(target: "genset::engine", pid, server, "{text}"),
        Level::WARN => tracing::warn!(target: "genset::engine", pid, server, "{text}"),
        Level::INFO => tracing::info!(target: "genset::engine", pid, server, "{text}"),
        Level::DEBUG => tracing::debug!(target: "genset::engine", pid, server, "{text}"),
        _ => tracing::trace!(target: "genset::engine", pid, server, "{text}"),
    }
}

/// Passes each non-empty line of `output` to `take` until the output ends. If a progress bar redraws a line, only its last
/// state is passed.
pub(crate) async fn follow(output: impl AsyncRead + Unpin, take: impl Fn(&str)) {
    let mut reader = BufReader::new(output);
    let mut line = Vec::new();
    while let Ok(true) = next_line(&mut reader, &mut line).await {
        let text = String::from_utf8_lossy(&line);
        let drawn = text.trim_end().rsplit('\r').next().unwrap_or_default();
        let text = drawn.trim_end();
        if !text.is_empty() {
            take(text);
        }
    }
}

/// Reads a line, up to the allowed length; `false` at the end.
async fn next_line(
    reader: &mut (impl AsyncBufRead + Unpin),
    line: &mut Vec<u8>,
) -> std::io::Result<bool> {
    line.clear();
    let mut limited = reader.take(MAX_LINE_BYTES);
    Ok(limited.read_until(b'\n', line).await? > 0)
}

/// Waits a short time for the tasks that read a dead process's output, so that its last lines are kept.
pub(crate) async fn last_lines(followers: Vec<AbortOnDropHandle<()>>) {
    for follower in followers {
        drop(timeout(LAST_LINES, follower).await);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn tail_of(text: &str, capacity: usize) -> Tail {
        let tail = Tail::new(capacity);
        follow(text.as_bytes(), |line| tail.keep(line)).await;
        tail
    }

    #[tokio::test]
    async fn the_last_lines_are_kept_and_endless_ones_are_cut() {
        let text = format!("one\ntwo\n\n{}", "x".repeat(40_000));
        let tail = tail_of(&text, 2).await;
        let lengths: Vec<_> = tail.lines().iter().map(String::len).collect();
        assert_eq!(lengths, [16 << 10, 40_000 - (32 << 10)]);
    }

    #[tokio::test]
    async fn of_a_progress_bar_the_last_state_counts_also_where_nothing_is_kept() {
        let tail = tail_of("one\n 10 %\r 20 %\r\n", 0).await;
        assert_eq!(tail.last().as_deref(), Some(" 20 %"));
        assert!(tail.lines().is_empty());
        assert_eq!(tail_of("one\n\n", 3).await.lines(), ["one"]);
    }
}
