//! [`BatchNotes`] keeps the answers of an unfinished batch in a file: one line per answer, in order of arrival.

use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use thiserror::Error;

/// Why notes cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NotesError {
    /// The file cannot be read or written.
    #[error("{} cannot be written: {source}", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process uses them.
    #[error("{}: another process answers this batch", path.display())]
    Taken {
        /// The file.
        path: PathBuf,
    },
    /// The file system has no locks, or refuses this one.
    #[error("{} cannot be locked: {source}", path.display())]
    Unlockable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// They belong to another input.
    #[error("{} has the answers to another input; remove it to begin anew", path.display())]
    OfAnother {
        /// The file.
        path: PathBuf,
    },
    /// They belong to another model.
    #[error("{} has the answers of the model {model}; remove it to begin anew", path.display())]
    OfAnotherModel {
        /// The file.
        path: PathBuf,
        /// The model.
        model: String,
    },
}

/// The answers so far.
#[derive(Debug)]
pub struct BatchNotes {
    path: PathBuf,
    file: File,
    /// The offset and length in bytes of each line's answer.
    answers: Vec<Option<(u64, usize)>>,
    count: usize,
    /// The offset of the next answer.
    end: u64,
}

/// The first line, which says whose answers these are.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    input: String,
    prompts: usize,
    /// The model that answers lines without a model name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    model: Option<String>,
}

impl Head {
    /// Refuses the notes at `path`, which begin with `line`, if they belong to another input or model.
    fn check(&self, line: &[u8], path: &Path) -> Result<(), NotesError> {
        let path = path.to_owned();
        let found = serde_json::from_slice::<Self>(line).ok();
        let same = found.filter(|head| head.input == self.input && head.prompts == self.prompts);
        let Some(same) = same else {
            return Err(NotesError::OfAnother { path });
        };
        match same.model.zip(self.model.as_ref()) {
            Some((model, ours)) if model != *ours => {
                Err(NotesError::OfAnotherModel { path, model })
            }
            // Notes of an earlier version name no model.
            Some(_) | None => Ok(()),
        }
    }
}

/// Any later line.
#[derive(Debug, Serialize, Deserialize)]
struct Noted<T> {
    prompt: usize,
    line: T,
    /// Whether another run asks again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_for_later: bool,
}

impl BatchNotes {
    /// Opens the notes at `path`: those of an interrupted run on the same input of `lines` lines, or new ones. `model`
    /// answers the lines that name none, if there are any.
    ///
    /// # Errors
    /// If the file cannot be used, another process uses it, or it belongs to another input or model.
    pub fn open(
        path: PathBuf,
        input: &str,
        lines: usize,
        model: Option<&str>,
    ) -> Result<Self, NotesError> {
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let file = match opened {
            Ok(file) => file,
            Err(source) => return Err(NotesError::Unwritable { path, source }),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(NotesError::Taken { path }),
            Err(TryLockError::Error(source)) => {
                return Err(NotesError::Unlockable { path, source });
            }
        }
        let mut notes = Self {
            path,
            file,
            answers: vec![None; lines],
            count: 0,
            end: 0,
        };
        let head = Head {
            input: input.to_owned(),
            prompts: lines,
            model: model.map(str::to_owned),
        };
        match notes.read(&head) {
            Ok(checked) => checked.map(|()| notes),
            Err(source) => Err(notes.unwritable(source)),
        }
    }

    fn unwritable(&self, source: io::Error) -> NotesError {
        NotesError::Unwritable {
            path: self.path.clone(),
            source,
        }
    }

    /// Reads the notes of an earlier run, if they are those that `head` describes. An incomplete last line is overwritten.
    fn read(&mut self, head: &Head) -> io::Result<Result<(), NotesError>> {
        let mut reader = BufReader::new(self.file.try_clone()?);
        let mut line = Vec::new();
        loop {
            line.clear();
            reader.read_until(b'\n', &mut line)?;
            if line.last() != Some(&b'\n') {
                break;
            }
            if self.end == 0 {
                if let Err(other) = head.check(&line, &self.path) {
                    return Ok(Err(other));
                }
            } else if let Ok(noted) = serde_json::from_slice::<Noted<IgnoredAny>>(&line)
                && !noted.is_for_later
            {
                self.remember(noted.prompt, line.len());
            }
            self.end += line.len() as u64;
        }
        self.file.set_len(self.end)?;
        if self.end == 0 {
            self.end = self.append(head)? as u64;
        }
        Ok(Ok(()))
    }

    fn remember(&mut self, index: usize, bytes: usize) {
        if let Some(place) = self.answers.get_mut(index) {
            self.count += usize::from(place.is_none());
            *place = Some((self.end, bytes));
        }
    }

    /// Appends a line and returns its length in bytes.
    fn append(&mut self, line: &impl Serialize) -> io::Result<usize> {
        let mut bytes = serde_json::to_vec(line)?;
        bytes.push(b'\n');
        self.file.seek(SeekFrom::Start(self.end))?;
        self.file.write_all(&bytes)?;
        Ok(bytes.len())
    }

    /// The number of answered lines.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether the line with this index, from 0, is answered.
    #[must_use]
    pub fn has(&self, index: usize) -> bool {
        self.answers.get(index).is_some_and(Option::is_some)
    }

    /// Notes the answer to a line.
    ///
    /// # Errors
    /// If it cannot be written. What was noted before is kept if the disk is full.
    pub fn add(&mut self, index: usize, line: &impl Serialize) -> Result<(), NotesError> {
        self.note(&Noted {
            prompt: index,
            line,
            is_for_later: false,
        })
    }

    /// Notes why a line has no answer yet. A later [`Self::open`] finds the line unanswered.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub fn add_for_later(&mut self, index: usize, line: &impl Serialize) -> Result<(), NotesError> {
        self.note(&Noted {
            prompt: index,
            line,
            is_for_later: true,
        })
    }

    fn note(&mut self, noted: &Noted<impl Serialize>) -> Result<(), NotesError> {
        let appended = self.append(noted);
        let bytes = appended.map_err(|error| self.unwritable(error))?;
        self.remember(noted.prompt, bytes);
        self.end += bytes as u64;
        Ok(())
    }

    /// Calls `show` with the answers, as JSON, in the order of their lines.
    ///
    /// # Errors
    /// If they cannot be read, or the error that `show` returns.
    pub fn each(&mut self, mut show: impl FnMut(usize, &str) -> io::Result<()>) -> io::Result<()> {
        for (index, answer) in self.answers.iter().enumerate() {
            let Some((offset, bytes)) = *answer else {
                continue;
            };
            let mut line = vec![0; bytes];
            self.file.seek(SeekFrom::Start(offset))?;
            self.file.read_exact(&mut line)?;
            let noted: Noted<&RawValue> = serde_json::from_slice(&line)?;
            show(index, noted.line.get())?;
        }
        Ok(())
    }

    /// Removes the notes, once the answers are elsewhere.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn remove(self) -> Result<(), NotesError> {
        std::fs::remove_file(&self.path).map_err(|error| self.unwritable(error))
    }
}

/// Writes a file atomically: `write` fills a temporary file next to it, which then replaces it. `mode` is its
/// permissions, less the process's umask.
///
/// # Errors
/// If it cannot be written, or the error that `write` returns; the file is unchanged then.
pub fn write_whole<T>(
    path: &Path,
    mode: u32,
    write: impl FnOnce(&mut BufWriter<&mut File>) -> io::Result<T>,
) -> io::Result<T> {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    let mut new = tempfile::Builder::new()
        .permissions(Permissions::from_mode(mode))
        .tempfile_in(folder.unwrap_or(Path::new(".")))?;
    let mut writer = BufWriter::new(new.as_file_mut());
    let written = write(&mut writer)?;
    writer.flush()?;
    drop(writer);
    new.as_file().sync_all()?;
    new.persist(path).map_err(|error| error.error)?;
    Ok(written)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn line(text: &str) -> Value {
        json!({"text": text})
    }

    fn lines(notes: &mut BatchNotes) -> Vec<Value> {
        let mut lines = Vec::new();
        let shown = notes.each(|index, line| {
            let line: Value = serde_json::from_str(line)?;
            lines.push(json!([index, line["text"]]));
            Ok(())
        });
        shown.unwrap();
        lines
    }

    #[test]
    fn what_is_for_later_is_a_line_now_and_unanswered_when_opened_again() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("notes");
        let mut notes = BatchNotes::open(path.clone(), "input", 3, None).unwrap();
        notes.add_for_later(0, &line("away")).unwrap();
        notes.add(1, &line("answer")).unwrap();
        assert_eq!(
            lines(&mut notes),
            [json!([0, "away"]), json!([1, "answer"])]
        );
        drop(notes);

        let mut notes = BatchNotes::open(path, "input", 3, None).unwrap();
        assert_eq!(notes.count(), 1);
        assert_eq!(
            [0, 1, 2].map(|index| notes.has(index)),
            [false, true, false]
        );
        notes.add(0, &line("back")).unwrap();
        assert_eq!(
            lines(&mut notes),
            [json!([0, "back"]), json!([1, "answer"])]
        );
    }

    #[test]
    fn answers_of_another_model_are_not_gone_on_with() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("notes");
        let open = |model| BatchNotes::open(path.clone(), "input", 3, model);
        open(Some("one")).unwrap().add(1, &line("answer")).unwrap();
        let refused = open(Some("another")).unwrap_err().to_string();
        assert!(
            refused.ends_with("has the answers of the model one; remove it to begin anew"),
            "{refused}"
        );
        assert_eq!(open(Some("one")).unwrap().count(), 1);
        // Notes as they were before they named a model.
        std::fs::write(&path, "{\"input\":\"input\",\"prompts\":3}\n").unwrap();
        open(Some("one")).unwrap();
    }
}
