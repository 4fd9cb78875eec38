//! What the process prints: each line goes to the log, and the last ones are kept for errors.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt as _, BufReader};
use tracing::Level;

/// Bytes after which a line without an end is cut: a process that prints a progress bar, or binary data.
const MAX_LINE_BYTES: u64 = 16 << 10;

/// The last lines that the process wrote to standard error.
#[derive(Debug)]
pub(crate) struct Tail {
    lines: Mutex<VecDeque<String>>,
    capacity: usize,
}

impl Tail {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            lines: Mutex::default(),
            capacity,
        }
    }

    fn keep(&self, line: &str) {
        let mut lines = self.lines.lock();
        if lines.len() >= self.capacity {
            lines.pop_front();
        }
        if self.capacity > 0 {
            lines.push_back(line.to_owned());
        }
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lock().iter().cloned().collect()
    }
}

/// Logs every line of `output` until it ends, at the level the line names first or else at `level`.
pub(crate) async fn follow(
    output: impl AsyncRead + Unpin,
    level: Level,
    pid: u32,
    tail: Option<&Tail>,
) {
    let mut reader = BufReader::new(output);
    let mut line = Vec::new();
    while let Ok(true) = next_line(&mut reader, &mut line).await {
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if text.is_empty() {
            continue;
        }
        if let Some(tail) = tail {
            tail.keep(text);
        }
        log(text, level, pid);
    }
}

/// Reads a line, or as much of one as is allowed; `false` at the end.
async fn next_line(
    reader: &mut (impl AsyncBufRead + Unpin),
    line: &mut Vec<u8>,
) -> std::io::Result<bool> {
    line.clear();
    let mut limited = reader.take(MAX_LINE_BYTES);
    Ok(limited.read_until(b'\n', line).await? > 0)
}

fn log(text: &str, otherwise: Level, pid: u32) {
    let (level, text) = split_level(text).unwrap_or((otherwise, text));
    match level {
        Level::ERROR => tracing::error!(target: "genset::engine", pid, "{text}"),
        Level::WARN => tracing::warn!(target: "genset::engine", pid, "{text}"),
        Level::INFO => tracing::info!(target: "genset::engine", pid, "{text}"),
        Level::DEBUG => tracing::debug!(target: "genset::engine", pid, "{text}"),
        _ => tracing::trace!(target: "genset::engine", pid, "{text}"),
    }
}

/// The level that a line begins with, as most loggers write it, and the rest.
fn split_level(line: &str) -> Option<(Level, &str)> {
    let (word, rest) = line.split_once([' ', ':'])?;
    let level = match word.trim_matches(['[', ']']) {
        "CRITICAL" | "FATAL" | "ERROR" => Level::ERROR,
        "WARNING" | "WARN" => Level::WARN,
        "INFO" => Level::INFO,
        "DEBUG" => Level::DEBUG,
        "TRACE" => Level::TRACE,
        _ => return None,
    };
    Some((level, rest.trim_start_matches([':', ' '])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_level_it_begins_with() {
        let cases = [
            (
                "WARNING my_engine: low memory",
                Some((Level::WARN, "my_engine: low memory")),
            ),
            ("[ERROR] x", Some((Level::ERROR, "x"))),
            ("INFO: ready", Some((Level::INFO, "ready"))),
            ("Traceback (most recent call last):", None),
            ("INFO", None),
        ];
        for (line, expected) in cases {
            assert_eq!(split_level(line), expected, "{line}");
        }
    }

    #[tokio::test]
    async fn the_last_lines_are_kept_and_endless_ones_are_cut() {
        let tail = Tail::new(2);
        let long = "x".repeat(40_000);
        let text = format!("one\ntwo\n\n{long}");
        follow(text.as_bytes(), Level::INFO, 1, Some(&tail)).await;
        let lengths: Vec<_> = tail.lines().iter().map(String::len).collect();
        assert_eq!(lengths, [16 << 10, 40_000 - (32 << 10)]);
    }
}
