//! What the server prints: each line goes to the log with the server's name, the last ones are kept for errors, and the very
//! last one tells how far a start is.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tracing::Level;

use crate::kind::ServerKind;

/// Bytes after which a line without an end is cut: progress bars end none of theirs.
const MAX_LINE_BYTES: u64 = 16 << 10;

/// The server's last lines, of both its outputs.
#[derive(Debug)]
pub(crate) struct Tail {
    lines: Mutex<VecDeque<String>>,
    capacity: usize,
}

impl Tail {
    /// Keeps `capacity` lines, and one in any case, for the progress.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            lines: Mutex::default(),
            capacity,
        }
    }

    fn keep(&self, line: &str) {
        let mut lines = self.lines.lock();
        if lines.len() >= self.capacity.max(1) {
            lines.pop_front();
        }
        lines.push_back(line.to_owned());
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        let lines = self.lines.lock();
        lines.iter().take(self.capacity).cloned().collect()
    }

    pub(crate) fn last(&self) -> Option<String> {
        self.lines.lock().back().cloned()
    }
}

/// Logs and keeps every line of `output` until it ends.
pub(crate) async fn follow(output: impl AsyncRead + Unpin, kind: ServerKind, tail: Arc<Tail>) {
    let mut reader = BufReader::new(output);
    let mut line = Vec::new();
    while let Ok(true) = next_line(&mut reader, &mut line).await {
        // A progress bar draws itself over and over; its last state counts.
        let text = String::from_utf8_lossy(&line);
        let text = text
            .trim_end()
            .rsplit('\r')
            .next()
            .unwrap_or_default()
            .trim_end();
        if !text.is_empty() {
            tail.keep(text);
            log(kind.name(), text);
        }
    }
}

/// Reads a line, or as much of one as is allowed; `false` at the end.
async fn next_line(
    reader: &mut (impl AsyncBufRead + Unpin),
    line: &mut Vec<u8>,
) -> std::io::Result<bool> {
    line.clear();
    Ok(reader.take(MAX_LINE_BYTES).read_until(b'\n', line).await? > 0)
}

fn log(server: &str, text: &str) {
    match level(text) {
        Level::ERROR => tracing::error!(target: "genset::engine", server, "{text}"),
        Level::WARN => tracing::warn!(target: "genset::engine", server, "{text}"),
        Level::DEBUG => tracing::debug!(target: "genset::engine", server, "{text}"),
        _ => tracing::info!(target: "genset::engine", server, "{text}"),
    }
}

/// The level that is among a line's first words, as these servers write it; they print everything to standard error, so
/// that says nothing.
fn level(line: &str) -> Level {
    for word in line.split_whitespace().take(6) {
        let word = word.trim_matches(|c: char| !c.is_ascii_alphabetic());
        match word {
            "ERROR" | "CRITICAL" | "FATAL" => return Level::ERROR,
            "WARNING" | "WARN" => return Level::WARN,
            "INFO" => return Level::INFO,
            "DEBUG" | "TRACE" => return Level::DEBUG,
            _ => {}
        }
    }
    Level::INFO
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_level_among_its_first_words() {
        let cases = [
            (
                "(APIServer pid=7) WARNING 11-22 01:02:03 [config.py:7] slow",
                Level::WARN,
            ),
            ("[2026-11-22 01:02:03] ERROR: no GPU", Level::ERROR),
            ("INFO:     Application startup complete.", Level::INFO),
            ("llama_model_loader: loaded", Level::INFO),
            ("a b c d e f ERROR", Level::INFO),
        ];
        for (line, expected) in cases {
            assert_eq!(level(line), expected, "{line}");
        }
    }

    #[tokio::test]
    async fn the_last_lines_are_kept_and_progress_bars_are_cut() {
        let tail = Arc::new(Tail::new(2));
        let text = format!("one\ntwo\n\n 10 %\r 20 %\r\n{}", "x".repeat(20_000));
        follow(text.as_bytes(), ServerKind::Vllm, Arc::clone(&tail)).await;
        let lengths: Vec<_> = tail.lines().iter().map(String::len).collect();
        assert_eq!(lengths, [16 << 10, 20_000 - (16 << 10)]);
        let tail = Arc::new(Tail::new(0));
        follow(
            " 10 %\r 20 %\r\n".as_bytes(),
            ServerKind::Vllm,
            Arc::clone(&tail),
        )
        .await;
        assert_eq!(
            (tail.last().as_deref(), tail.lines().len()),
            (Some(" 20 %"), 0)
        );
    }
}
