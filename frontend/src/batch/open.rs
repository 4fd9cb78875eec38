//! [`OpenBatch`]: a batch's input, the answers so far, and the files they are written to. Its functions may block on
//! the disk.

use std::collections::HashSet;
use std::io::{self, BufWriter, Write};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Deserialize;

use super::input::{BatchInput, InputError};
use super::notes::{BatchNotes, NotesError};
use super::records::{BatchRecord, BatchStatus, Counts, FileRecord, LineError, Purpose};
use super::request::{BatchLine, OutputLine, unasked_line};
use super::store::BatchStore;
use crate::budget::MemoryShare;
use crate::clock::now;
use crate::error::{ApiError, shown};

/// The most errors of an input that are reported to its owner.
const MAX_ERRORS: usize = 100;

/// A collision-resistant hash of a `custom_id`, kept in place of the name while an input is validated.
type NameHash = [u8; 16];

/// A batch's input and the answers so far.
#[derive(Debug)]
pub(super) struct OpenBatch {
    input: BatchInput,
    notes: BatchNotes,
    counts: Counts,
    /// Whether the writing of its files has begun.
    is_ending: bool,
}

/// Why a batch cannot begin.
#[derive(Debug)]
pub(super) enum Unopened {
    /// Its input is invalid.
    Refused(Vec<LineError>),
    /// The disk fails.
    Disk(String),
}

impl OpenBatch {
    /// Validates the whole input, and reads the answers of earlier runs.
    ///
    /// # Errors
    /// If the input is invalid, or the disk fails.
    pub(super) fn open(store: &BatchStore, record: &BatchRecord) -> Result<Self, Unopened> {
        let input = checked(store, record)?;
        let disk = |error: &dyn std::error::Error| Unopened::Disk(error.to_string());
        let (path, lines) = (store.notes(&record.id), input.count());
        // Each line names its model.
        let notes = BatchNotes::open(path, input.fingerprint(), lines, None);
        let mut notes = notes.map_err(|error| disk(&error))?;
        let mut counts = Counts {
            total: input.count(),
            ..Counts::default()
        };
        let counted = notes.each(|_, line| {
            counts.add(is_answer(line));
            Ok(())
        });
        counted.map_err(|error| disk(&error))?;
        // In memory, too, if the disk takes nothing now.
        store.count(&record.id, counts);
        let begun = store.update(&record.id, |record| {
            if record.status == BatchStatus::Validating {
                record.enter(BatchStatus::InProgress);
            }
        });
        begun.map_err(|error| disk(&error))?;
        Ok(Self {
            input,
            notes,
            counts,
            is_ending: false,
        })
    }

    /// Reads lines from the file that `open` returns from now on.
    #[cfg(test)]
    pub(super) fn read_from(&mut self, open: impl Fn() -> std::fs::File) {
        self.input.read_from(open);
    }

    /// The lines that have no answer yet.
    pub(super) fn unanswered(&self) -> Vec<usize> {
        let all = 0..self.input.count();
        all.filter(|index| !self.notes.has(*index)).collect()
    }

    /// Records an answer; returns the counts so far. `None` if the files are being written or have been: the answer is too
    /// late for them, and must not be counted.
    ///
    /// # Errors
    /// If the disk fails.
    pub(super) fn note(
        &mut self,
        index: usize,
        line: &OutputLine,
    ) -> Result<Option<Counts>, NotesError> {
        if self.is_ending {
            return Ok(None);
        }
        self.notes.add(index, line)?;
        self.counts.add(line.is_answer());
        Ok(Some(self.counts))
    }

    /// Writes the files of answers and of errors; if the batch `is_expired`, also an error for each unanswered request.
    /// Returns the ids of the files that exist. Idempotent.
    ///
    /// # Errors
    /// If the disk fails.
    pub(super) fn write_files(
        &mut self,
        store: &BatchStore,
        record: &BatchRecord,
        is_expired: bool,
    ) -> io::Result<(Option<String>, Option<String>)> {
        self.is_ending = true;
        let (output, errors) = (store.new_content()?, store.new_content()?);
        let mut writers = (BufWriter::new(&output), BufWriter::new(&errors));
        let mut counts = self.counts;
        self.notes.each(|_, line| match is_answer(line) {
            true => writeln!(writers.0, "{line}"),
            false => writeln!(writers.1, "{line}"),
        })?;
        if is_expired {
            for index in 0..self.input.count() {
                if self.notes.has(index) {
                    continue;
                }
                let (_, bytes) = self.input.read(index).map_err(io::Error::other)?;
                let custom_id = BatchLine::parse(&bytes)?.shown_id();
                let id = format!("batch_req_{}_{}", record.stem(), index + 1);
                let problem = "This request was not answered before the batch's time was over.";
                let line = unasked_line(id, custom_id, "batch_expired", problem);
                counts.failed += 1;
                serde_json::to_writer(&mut writers.1, &line)?;
                writers.1.write_all(b"\n")?;
            }
        }
        writers.0.flush()?;
        writers.1.flush()?;
        drop(writers);
        let keep = |content: tempfile::NamedTempFile, what: &str| {
            let bytes = content.as_file().metadata()?.len();
            if bytes == 0 {
                return Ok(None);
            }
            let id = format!("file-{}-{what}", record.stem());
            let (created_at, config) = (now(), store.config());
            let seconds = record.output_seconds.unwrap_or(config.lifetime.as_secs());
            let file = FileRecord {
                id: id.clone(),
                owner: record.owner.clone(),
                bytes,
                created_at,
                expires_at: created_at.saturating_add(seconds),
                filename: format!("{}_{what}.jsonl", record.id),
                purpose: Purpose::BatchOutput,
            };
            store.add_output(file, content)?;
            Ok::<_, io::Error>(Some(id))
        };
        let kept = (keep(output, "output")?, keep(errors, "errors")?);
        store.count(&record.id, counts);
        Ok(kept)
    }
}

impl Counts {
    fn add(&mut self, is_answer: bool) {
        match is_answer {
            true => self.completed += 1,
            false => self.failed += 1,
        }
    }
}

/// The part of an output line that tells whether its request succeeded. The answer itself is not parsed.
#[derive(Deserialize)]
struct Outcome {
    response: Option<OutcomeStatus>,
}

#[derive(Deserialize)]
struct OutcomeStatus {
    status_code: u16,
}

/// Whether the request of an output line succeeded.
fn is_answer(line: &str) -> bool {
    let outcome = serde_json::from_str::<Outcome>(line);
    let response = outcome.ok().and_then(|outcome| outcome.response);
    response.is_some_and(|response| response.status_code == 200)
}

/// Why a line cannot be read.
#[derive(Debug)]
pub(super) enum Unread {
    /// The line is invalid; the reason.
    Line(String),
    /// The disk fails; the reason.
    Disk(String),
    /// There is no memory for the line now; how long to wait before the next attempt.
    Memory(Duration),
}

impl From<InputError> for Unread {
    fn from(error: InputError) -> Self {
        match error {
            InputError::Line { .. } => Self::Line(error.to_string()),
            InputError::Unreadable { .. } => Self::Disk(error.to_string()),
        }
    }
}

impl From<ApiError> for Unread {
    fn from(refused: ApiError) -> Self {
        match refused.retry_after {
            Some(pause) => Self::Memory(pause),
            None => Self::Line(refused.to_string()),
        }
    }
}

/// Reads one line of the input. `memory` is an empty share, which is returned and then holds the line.
///
/// # Errors
/// If the line cannot be read, or there is no memory for it.
pub(super) fn line_of(
    batch: &Mutex<OpenBatch>,
    index: usize,
    mut memory: MemoryShare,
) -> Result<(BatchLine, MemoryShare), Unread> {
    let mut batch = batch.lock();
    let bytes = batch.input.line_bytes(index);
    // Twice: as text and as a request.
    memory.grow(2 * bytes)?;
    let (_, text) = batch.input.read(index)?;
    drop(batch);
    let line = BatchLine::parse(&text);
    let line = line.map_err(|error| Unread::Line(format!("request {}: {error}", index + 1)))?;
    drop(text);
    memory.shrink(bytes);
    Ok((line, memory))
}

/// Opens the input, and checks that each line is a request to the batch's endpoint with a unique `custom_id`.
fn checked(store: &BatchStore, record: &BatchRecord) -> Result<BatchInput, Unopened> {
    // An accepted input stays accepted, whatever the limit is after a restart.
    let max_requests = if record.status == BatchStatus::Validating {
        store.config().max_requests
    } else {
        usize::MAX
    };
    let mut errors = Vec::new();
    let mut names = HashSet::new();
    let mut count = 0_usize;
    let opened = BatchInput::open([store.content(&record.input_file_id)], |at, bytes| {
        count += 1;
        if count > max_requests {
            let problem = format!("a batch of this server has {max_requests} requests at most");
            return Err(at.error(problem));
        }
        let found = line_errors(bytes, &record.endpoint, &mut names);
        errors.extend(found.into_iter().map(|(code, param, message)| LineError {
            code: code.into(),
            message,
            param: Some(param.into()),
            line: Some(at.line),
        }));
        match errors.len() > MAX_ERRORS {
            true => Err(at.error("there are too many errors")),
            false => Ok(()),
        }
    });
    match opened {
        Ok(input) if errors.is_empty() && input.count() > 0 => return Ok(input),
        Ok(_) if errors.is_empty() => {
            errors.push(error_of_whole("empty_file", "The file has no requests."));
        }
        Ok(_) => {}
        // The path is of no use to clients, who know only the id.
        Err(InputError::Line { problem, .. }) if errors.is_empty() => {
            let message = format!("Line {count}: {problem}.");
            errors.push(error_of_whole("invalid_file", &message));
        }
        Err(InputError::Line { .. }) => {}
        Err(ref error @ InputError::Unreadable { ref source, .. }) => {
            if source.kind() != io::ErrorKind::NotFound {
                return Err(Unopened::Disk(error.to_string()));
            }
            tracing::error!(%error, batch = record.id, "the input of a batch is gone");
            errors.push(unreadable_input());
        }
    }
    errors.truncate(MAX_ERRORS);
    Err(Unopened::Refused(errors))
}

/// The error for an input that cannot be read.
pub(super) fn unreadable_input() -> LineError {
    error_of_whole("unreadable", "The file cannot be read.")
}

/// An error of an input as a whole.
fn error_of_whole(code: &str, message: &str) -> LineError {
    LineError {
        code: code.into(),
        message: message.into(),
        param: Some("input_file_id".into()),
        line: None,
    }
}

/// The errors of a line: code, field and sentence.
fn line_errors(
    bytes: &[u8],
    endpoint: &str,
    names: &mut HashSet<NameHash>,
) -> Option<(&'static str, &'static str, String)> {
    let line = match BatchLine::parse(bytes) {
        Ok(line) => line,
        Err(error) => {
            let message = format!("This line is no JSON object: {error}.");
            return Some(("invalid_json_line", "line", message));
        }
    };
    match line.check() {
        Err(bad) => return Some((bad.code, bad.param, format!("{}.", bad.problem))),
        Ok(url) if url != endpoint => {
            let message = format!("The batch is for {endpoint}, this request is for {url}.");
            return Some(("mismatched_url", "url", message));
        }
        Ok(_) => {}
    }
    let name = line.custom_id().unwrap_or_default();
    let message = format!("The custom_id {:?} occurs twice.", shown(&name));
    (!names.insert(hash_of(&name))).then_some(("duplicate_custom_id", "custom_id", message))
}

fn hash_of(name: &str) -> NameHash {
    let mut hash = NameHash::default();
    hash.copy_from_slice(&blake3::hash(name.as_bytes()).as_bytes()[..16]);
    hash
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::batch::store::tests::record;
    use crate::config::BatchConfig;

    #[test]
    fn an_input_is_at_fault_where_it_is_gone_and_the_disk_where_it_cannot_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let store = BatchStore::open(folder.path().to_owned(), BatchConfig::default()).unwrap();
        let record = record("batch_0", "a");
        let gone = OpenBatch::open(&store, &record).unwrap_err();
        assert!(matches!(gone, Unopened::Refused(_)), "{gone:?}");
        // A folder cannot be read as a file.
        std::fs::create_dir(store.content(&record.input_file_id)).unwrap();
        let unreadable = OpenBatch::open(&store, &record).unwrap_err();
        assert!(matches!(unreadable, Unopened::Disk(_)), "{unreadable:?}");
    }

    /// A store with this limit of requests, and a batch of two.
    fn store_with_two(folder: &Path, max_requests: usize) -> (BatchStore, BatchRecord) {
        let config = BatchConfig {
            max_requests,
            ..BatchConfig::default()
        };
        let store = BatchStore::open(folder.to_owned(), config).unwrap();
        let record = record("batch_0", "a");
        let line = |name: &str| json!({"custom_id": name, "url": record.endpoint, "body": {}});
        let input = format!("{}\n{}\n", line("a"), line("b"));
        std::fs::write(store.content(&record.input_file_id), input).unwrap();
        (store, record)
    }

    #[test]
    fn a_batch_that_has_begun_goes_on_under_a_lower_limit_of_requests() {
        let folder = tempfile::tempdir().unwrap();
        let (store, mut record) = store_with_two(folder.path(), 1);
        let new = OpenBatch::open(&store, &record).unwrap_err();
        assert!(matches!(new, Unopened::Refused(_)), "{new:?}");
        record.enter(BatchStatus::InProgress);
        let begun = OpenBatch::open(&store, &record).unwrap();
        assert_eq!(begun.unanswered(), [0, 1]);
    }

    #[test]
    fn answers_are_counted_while_the_disk_takes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("batches/batch_0.json");
        std::fs::create_dir(folder.path().join("batches")).unwrap();
        std::fs::write(&path, serde_json::to_vec(&record("batch_0", "a")).unwrap()).unwrap();
        let (store, record) = store_with_two(folder.path(), 2);
        let mut batch = OpenBatch::open(&store, &record).unwrap();
        let line = unasked_line("1".into(), "a".into(), "unreadable", "It is.");
        batch.note(0, &line).unwrap();
        drop(batch);
        // A file cannot take the place of a folder.
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let refused = OpenBatch::open(&store, &record).unwrap_err();
        assert!(matches!(refused, Unopened::Disk(_)), "{refused:?}");
        let kept = store.batch("batch_0", Some("a")).unwrap();
        assert_eq!(kept.request_counts.failed, 1);
    }

    #[test]
    fn an_answer_that_comes_after_the_files_is_in_no_count() {
        let folder = tempfile::tempdir().unwrap();
        let (store, record) = store_with_two(folder.path(), 2);
        let mut batch = OpenBatch::open(&store, &record).unwrap();
        let line = unasked_line("1".into(), "a".into(), "unreadable", "It is.");
        let counts = batch.note(0, &line).unwrap();
        assert_eq!(counts.map(|counts| counts.failed), Some(1));
        batch.write_files(&store, &record, true).unwrap();
        assert_eq!(batch.note(1, &line).unwrap(), None);
        assert_eq!(batch.unanswered(), [1]);
    }

    #[test]
    fn a_name_that_occurs_twice_is_found() {
        let mut names = HashSet::new();
        let mut code_of = |name: &str| {
            let url = "/v1/completions";
            let line = json!({"custom_id": name, "url": url, "body": {}}).to_string();
            let error = line_errors(line.as_bytes(), url, &mut names);
            error.map(|(code, param, _)| (code, param))
        };
        let twice = Some(("duplicate_custom_id", "custom_id"));
        assert_eq!(code_of("a"), None);
        assert_eq!(code_of("b"), None);
        assert_eq!(code_of("a"), twice);
        let longest = "c".repeat(512);
        assert_eq!(code_of(&longest), None);
        assert_eq!(code_of(&longest), twice);
        let too_long = Some(("invalid_custom_id", "custom_id"));
        assert_eq!(code_of(&"c".repeat(513)), too_long);
    }
}
