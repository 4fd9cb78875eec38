//! [`Trace`]: recorded requests, in Mooncake's published format.

use std::time::Duration;

use genset_backend_common::EngineError;
use serde::Deserialize;

use crate::load::{Load, Piece, Session, Turn};

/// The number of tokens for one hash id.
const BLOCK_TOKENS: u32 = 512;

/// One request: a line of the file.
///
/// # Source
/// R. Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", 2024, and its published traces.
#[derive(Debug, Clone, Deserialize)]
struct Line {
    /// Arrival time in milliseconds.
    timestamp: u64,
    /// Tokens of the prompt, at least 1.
    input_length: u32,
    /// Tokens of the answer.
    output_length: u32,
    /// The blocks of the prompt, 512 tokens each.
    hash_ids: Vec<u64>,
}

/// Recorded requests.
#[derive(Debug, Clone)]
pub struct Trace {
    lines: Vec<Line>,
}

impl Load {
    /// Parses a trace: JSON lines with `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and
    /// `hash_ids`, each for 512 tokens of the prompt. Takes at most `limit` requests; times count from the first.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the line.
    pub fn read_trace(text: &str, limit: u64) -> Result<Self, EngineError> {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let mut lines = Vec::new();
        let written = text.lines().enumerate();
        for (number, line) in written.filter(|(_, line)| !line.trim().is_empty()) {
            let bad = |problem: String| {
                let problem = format!("line {}: {problem}", number + 1);
                EngineError::invalid_argument("--trace", problem)
            };
            let line: Line = serde_json::from_str(line).map_err(|error| bad(error.to_string()))?;
            let most = u64::from(BLOCK_TOKENS) * u64::try_from(line.hash_ids.len()).unwrap_or(0);
            if line.input_length == 0 || u64::from(line.input_length) > most {
                let ids = line.hash_ids.len();
                return Err(bad(format!(
                    "input_length is {}, but {ids} hash_ids stand for 1 to {most} tokens",
                    line.input_length
                )));
            }
            lines.push(line);
        }
        if lines.is_empty() {
            return Err(EngineError::invalid_argument("--trace", "holds no request"));
        }
        lines.sort_by_key(|line| line.timestamp);
        lines.truncate(limit);
        Ok(Self::Trace(Trace { lines }))
    }
}

impl Trace {
    pub(crate) fn requests(&self) -> u64 {
        u64::try_from(self.lines.len()).unwrap_or(u64::MAX)
    }

    pub(crate) fn sessions(&self) -> impl Iterator<Item = Session> + '_ {
        let first = self.lines.first().map_or(0, |line| line.timestamp);
        self.lines.iter().map(move |line| line.session(first))
    }
}

impl Line {
    fn session(&self, first: u64) -> Session {
        let mut left = self.input_length;
        let mut pieces = Vec::new();
        for id in &self.hash_ids {
            let tokens = left.min(BLOCK_TOKENS);
            left -= tokens;
            pieces.push(Piece { id: *id, tokens });
        }
        Session {
            at: Duration::from_millis(self.timestamp - first),
            turns: vec![Turn {
                after: Duration::ZERO,
                pieces,
                max_tokens: self.output_length.max(1),
            }],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_in_the_order_of_its_times() {
        let text = "{\"timestamp\": 90, \"input_length\": 600, \"output_length\": 7, \"hash_ids\": [4, 5]}\n\n\
                    {\"timestamp\": 50, \"input_length\": 1, \"output_length\": 0, \"hash_ids\": [4]}\n";
        let trace = Load::read_trace(text, 10).unwrap();
        let sessions: Vec<Session> = trace.sessions(0).collect();
        assert_eq!(sessions[0].at, Duration::ZERO);
        assert_eq!(sessions[0].turns[0].max_tokens, 1);
        assert_eq!(sessions[1].at, Duration::from_millis(40));
        let pieces = [Piece { id: 4, tokens: 512 }, Piece { id: 5, tokens: 88 }];
        assert_eq!(sessions[1].turns[0].pieces, pieces);
        assert_eq!(Load::read_trace(text, 1).unwrap().sessions(0).count(), 1);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let good = r#"{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}"#;
        for (line, expected) in [
            ("{}", "line 2: missing field"),
            (
                r#"{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}"#,
                "line 2: input_length is 513",
            ),
            (
                r#"{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}"#,
                "line 2: invalid value",
            ),
        ] {
            let error = Load::read_trace(&format!("{good}\n{line}"), 9).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
        }
        assert!(Load::read_trace("\n", 9).is_err());
    }
}
