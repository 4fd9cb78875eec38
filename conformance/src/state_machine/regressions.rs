//! The file of sequences that have failed: one text per line, comments from `#` at the start of a line.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use super::operation::{ParseSequenceError, Sequence};

/// The head of a new file.
const HEAD: &str = "\
# Sequences of operations that an engine failed once. They are tried first on each run; keep this file under version
# control. One sequence a line.
";

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum RegressionsError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("line {line}: {source}")]
    Parse {
        line: usize,
        source: ParseSequenceError,
    },
}

/// Reads all sequences of the file; empty if the file does not exist.
pub(super) fn read(path: &Path) -> Result<Vec<Sequence>, RegressionsError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty() && !line.trim().starts_with('#'))
        .map(|(place, line)| {
            line.parse().map_err(|source| RegressionsError::Parse {
                line: place + 1,
                source,
            })
        })
        .collect()
}

/// Appends a sequence, with the failure as a comment.
pub(super) fn append(path: &Path, sequence: &Sequence, why: &str) -> io::Result<()> {
    let is_new = !path.exists();
    let mut file = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)?;
    let head = if is_new { HEAD } else { "" };
    let why = why.replace('\n', " ");
    file.write_all(format!("{head}# {why}\n{sequence}\n").as_bytes())
}
