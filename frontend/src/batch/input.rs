//! [`BatchInput`] reads the lines of files. It keeps each line's offset and reads the line again when it is answered.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// The longest line in bytes, with its line ending.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// The mark with which editors on Windows begin a UTF-8 file. It is not part of the first line.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// What is wrong with an input.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InputError {
    /// A file cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line is invalid, and with it the whole input.
    #[error("{at}: {problem}")]
    Line {
        /// The line, as formatted by [`LineAt`].
        at: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// The position of a line for people: `prompts.jsonl line 3`.
#[derive(Debug, Clone, Copy)]
pub struct LineAt<'a> {
    /// The file.
    pub path: &'a Path,
    /// The line, from 1.
    pub line: usize,
}

impl fmt::Display for LineAt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} line {}", self.path.display(), self.line)
    }
}

impl LineAt<'_> {
    /// The error of this line.
    #[must_use]
    pub fn error(self, problem: impl Into<String>) -> InputError {
        InputError::Line {
            at: self.to_string(),
            problem: problem.into(),
        }
    }
}

/// The non-blank lines of files, each of at most 16 MiB.
#[derive(Debug)]
pub struct BatchInput {
    files: Vec<InputFile>,
    places: Vec<Place>,
    fingerprint: String,
}

#[derive(Debug)]
struct InputFile {
    path: PathBuf,
    reader: BufReader<File>,
}

/// Where a line is.
#[derive(Debug, Clone, Copy)]
struct Place {
    file: usize,
    line: usize,
    offset: u64,
    bytes: usize,
}

impl BatchInput {
    /// Finds the lines of the files, in order. Calls `look` with each non-blank line; `look` may reject the whole input.
    ///
    /// # Errors
    /// If a file cannot be read, a line is too long, or `look` rejects one.
    pub fn open(
        paths: impl IntoIterator<Item = PathBuf>,
        mut look: impl FnMut(LineAt<'_>, &[u8]) -> Result<(), InputError>,
    ) -> Result<Self, InputError> {
        let (mut files, mut places) = (Vec::new(), Vec::new());
        let mut hash = blake3::Hasher::new();
        for path in paths {
            let file = File::open(&path).map_err(|error| unreadable(&path, error))?;
            let mut file = InputFile {
                path,
                reader: BufReader::new(file),
            };
            let (mut offset, mut line) = (0, 1);
            loop {
                let bytes = file.read_line(line, 0)?;
                if bytes.is_empty() {
                    break;
                }
                hash.update(&bytes);
                let marked = bytes.strip_prefix(BYTE_ORDER_MARK);
                let text = marked.filter(|_| line == 1).unwrap_or(&bytes);
                if !text.trim_ascii().is_empty() {
                    let at = LineAt {
                        path: &file.path,
                        line,
                    };
                    look(at, text)?;
                    places.push(Place {
                        file: files.len(),
                        line,
                        offset: offset + (bytes.len() - text.len()) as u64,
                        bytes: text.len(),
                    });
                }
                offset += bytes.len() as u64;
                line += 1;
            }
            files.push(file);
        }
        Ok(Self {
            files,
            places,
            fingerprint: hash.finalize().to_hex().to_string(),
        })
    }

    /// The number of non-blank lines.
    #[must_use]
    pub fn count(&self) -> usize {
        self.places.len()
    }

    /// Identifies this input: a hash of all its bytes.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The bytes of the line with this index, with its line ending; 0 if there is no such line.
    pub(super) fn line_bytes(&self, index: usize) -> usize {
        self.places.get(index).map_or(0, |place| place.bytes)
    }

    /// Reads the line with this index, from 0, among the non-blank lines.
    ///
    /// # Errors
    /// If the file cannot be read any more.
    pub fn read(&mut self, index: usize) -> Result<(LineAt<'_>, Vec<u8>), InputError> {
        let place = self.places.get(index).copied();
        let found = place.and_then(|place| Some((place, self.files.get_mut(place.file)?)));
        let Some((place, file)) = found else {
            return Err(InputError::Line {
                at: format!("line {index} of {}", self.places.len()),
                problem: "there is none".into(),
            });
        };
        let sought = file.reader.seek(SeekFrom::Start(place.offset));
        sought.map_err(|error| unreadable(&file.path, error))?;
        let bytes = file.read_line(place.line, place.bytes)?;
        let at = LineAt {
            path: &file.path,
            line: place.line,
        };
        Ok((at, bytes))
    }
}

#[cfg(test)]
impl BatchInput {
    /// Reads lines from the file that `open` returns from now on.
    pub(super) fn read_from(&mut self, open: impl Fn() -> File) {
        for file in &mut self.files {
            file.reader = BufReader::new(open());
        }
    }
}

impl InputFile {
    /// Reads the next line with its line ending; empty at the end of the file. `expected` is its likely length in bytes.
    fn read_line(&mut self, line: usize, expected: usize) -> Result<Vec<u8>, InputError> {
        let mut bytes = Vec::with_capacity(expected);
        let mut limited = self.reader.by_ref().take(MAX_LINE_BYTES + 1);
        let read = limited.read_until(b'\n', &mut bytes);
        read.map_err(|error| unreadable(&self.path, error))?;
        if bytes.len() as u64 > MAX_LINE_BYTES {
            let path = &self.path;
            let problem = format!("is over the limit of {MAX_LINE_BYTES} bytes");
            return Err(LineAt { path, line }.error(problem));
        }
        Ok(bytes)
    }
}

fn unreadable(path: &Path, source: io::Error) -> InputError {
    InputError::Unreadable {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_first_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("input.jsonl");
        std::fs::write(&path, "\u{feff}{\"a\": 1}\n\u{feff}\n").unwrap();
        let mut seen = Vec::new();
        let look = |_: LineAt<'_>, bytes: &[u8]| {
            seen.push(bytes.to_vec());
            Ok(())
        };
        let mut input = BatchInput::open([path], look).unwrap();
        let expected = ["{\"a\": 1}\n", "\u{feff}\n"].map(|line| line.as_bytes().to_vec());
        let read = [0, 1].map(|index| input.read(index).unwrap().1);
        assert_eq!(seen, expected);
        assert_eq!([0, 1].map(|index| input.line_bytes(index)), [9, 4]);
        assert_eq!(read, expected);
    }
}
