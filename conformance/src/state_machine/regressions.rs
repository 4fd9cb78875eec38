//! The file of sequences that have failed: one text per line, comments from `#` at the start of a line.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use genset_backend_common::text_file::read_text;

use super::operation::Sequence;

/// The head of a new file.
const HEAD: &str = "\
# Sequences of operations that an engine failed once. They are tried first on each run; keep this file under version
# control. One sequence a line.
";

/// The largest file, in bytes: tens of thousands of sequences.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Reads all sequences of the file; empty if the file does not exist. The error is why the file cannot be used.
pub(super) fn read(path: &Path) -> Result<Vec<Sequence>, String> {
    let text = match read_text(path, MAX_FILE_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.to_string()),
    };
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty() && !line.trim().starts_with('#'))
        .map(|(place, line)| {
            let sequence = line.parse::<Sequence>();
            sequence.map_err(|error| format!("line {}: {error}", place + 1))
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
