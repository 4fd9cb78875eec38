//! The answers of a batch that is not done: a file beside the output, a line for each answer in the order they came.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use genset_backend_common::EngineError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::is_failure;

/// The answers so far.
#[derive(Debug)]
pub(super) struct Notes {
    path: PathBuf,
    file: File,
    /// Where each prompt's answer begins, and its bytes.
    answers: Vec<Option<(u64, usize)>>,
    count: usize,
    /// Where the next answer goes.
    end: u64,
}

/// The first line: whose answers these are.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Head {
    input: String,
    prompts: usize,
}

/// A further line.
#[derive(Debug, Serialize, Deserialize)]
struct Noted<T> {
    prompt: usize,
    line: T,
}

impl Notes {
    /// Opens the notes for `output`: those of an interrupted run on the same input, or new ones.
    ///
    /// # Errors
    /// When the file cannot be used, another process uses it, or it is about another input.
    pub(super) fn open(output: &Path, input: &str, prompts: usize) -> Result<Self, EngineError> {
        let path = output.with_extension("jsonl.part");
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let file = opened.map_err(|error| unwritable(&path, &error))?;
        file.try_lock().map_err(|error| {
            let problem = format!(
                "{}: another process answers this batch: {error}",
                path.display()
            );
            EngineError::invalid_argument("in", problem)
        })?;
        let mut notes = Self {
            path,
            file,
            answers: vec![None; prompts],
            count: 0,
            end: 0,
        };
        let head = Head {
            input: input.to_owned(),
            prompts,
        };
        notes.read(&head)?;
        Ok(notes)
    }

    /// Reads what an earlier run noted. A line that it did not finish is written over.
    fn read(&mut self, head: &Head) -> Result<(), EngineError> {
        let file = self
            .file
            .try_clone()
            .map_err(|error| unwritable(&self.path, &error))?;
        let mut reader = BufReader::new(file);
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = reader.read_until(b'\n', &mut line);
            read.map_err(|error| unwritable(&self.path, &error))?;
            if line.last() != Some(&b'\n') {
                break;
            }
            if self.end == 0 {
                if serde_json::from_slice::<Head>(&line).ok().as_ref() != Some(head) {
                    let problem = format!(
                        "{} has the answers to other prompts; remove it to begin anew",
                        self.path.display()
                    );
                    return Err(EngineError::invalid_argument("in", problem));
                }
            } else if let Ok(noted) = serde_json::from_slice::<Noted<Map<String, Value>>>(&line) {
                self.remember(noted.prompt, line.len());
            }
            self.end += line.len() as u64;
        }
        let end = self.end;
        self.file
            .set_len(end)
            .map_err(|error| unwritable(&self.path, &error))?;
        if end == 0 {
            self.end = self.append(head)? as u64;
        }
        Ok(())
    }

    fn remember(&mut self, prompt: usize, bytes: usize) {
        if let Some(place) = self.answers.get_mut(prompt) {
            self.count += usize::from(place.is_none());
            *place = Some((self.end, bytes));
        }
    }

    /// Writes a line at the end; returns its bytes.
    fn append(&mut self, line: &impl Serialize) -> Result<usize, EngineError> {
        let mut bytes = serde_json::to_vec(line)
            .map_err(|error| EngineError::internal(format!("an answer is no JSON: {error}")))?;
        bytes.push(b'\n');
        let sought = self.file.seek(SeekFrom::Start(self.end));
        let written = sought.and_then(|_| self.file.write_all(&bytes));
        written.map_err(|error| unwritable(&self.path, &error))?;
        Ok(bytes.len())
    }

    /// How many prompts are answered.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Whether the prompt of this number is answered.
    pub(super) fn has(&self, prompt: usize) -> bool {
        self.answers.get(prompt).is_some_and(Option::is_some)
    }

    /// Notes the answer to a prompt.
    ///
    /// # Errors
    /// When it cannot be written; a disk that is full keeps what was noted before.
    pub(super) fn add(
        &mut self,
        prompt: usize,
        line: &Map<String, Value>,
    ) -> Result<(), EngineError> {
        let bytes = self.append(&Noted { prompt, line })?;
        self.remember(prompt, bytes);
        self.end += bytes as u64;
        Ok(())
    }

    /// Writes all answers to `output` in the order of their prompts, whole or not at all, and removes the notes. Returns how
    /// many of them are errors.
    ///
    /// # Errors
    /// When the output cannot be written; then the notes stay.
    pub(super) fn finish(mut self, output: &Path) -> Result<usize, EngineError> {
        let bad = |error: std::io::Error| unwritable(output, &error);
        let folder = output.parent().filter(|folder| *folder != Path::new(""));
        let new = tempfile::Builder::new()
            // As any file of the user's: the mask of the process takes its part away.
            .permissions(std::fs::Permissions::from_mode(0o666))
            .tempfile_in(folder.unwrap_or(Path::new(".")))
            .map_err(bad)?;
        let mut writer = BufWriter::new(new);
        let mut failed = 0;
        for (offset, bytes) in self.answers.iter().flatten() {
            let mut noted = vec![0; *bytes];
            let sought = self.file.seek(SeekFrom::Start(*offset));
            sought
                .and_then(|_| self.file.read_exact(&mut noted))
                .map_err(bad)?;
            let noted: Noted<Map<String, Value>> =
                serde_json::from_slice(&noted).map_err(|error| bad(error.into()))?;
            failed += usize::from(is_failure(&noted.line));
            serde_json::to_writer(&mut writer, &noted.line).map_err(|error| bad(error.into()))?;
            writer.write_all(b"\n").map_err(bad)?;
        }
        let new = writer
            .into_inner()
            .map_err(|error| bad(error.into_error()))?;
        new.as_file().sync_all().map_err(bad)?;
        new.persist(output).map_err(|error| bad(error.error))?;
        std::fs::remove_file(&self.path).map_err(|error| unwritable(&self.path, &error))?;
        Ok(failed)
    }
}

fn unwritable(path: &Path, error: &std::io::Error) -> EngineError {
    let problem = format!("{} cannot be written: {error}", path.display());
    EngineError::invalid_argument("in", problem)
}
