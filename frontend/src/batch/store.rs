//! [`BatchStore`] keeps files and batches in a folder. One process uses the folder at a time. Its calls block, so
//! callers run them on threads that may block on the disk.
//!
//! A record is a JSON file, written atomically. A file's content is written before its record, so content with a record
//! is complete. Content that a crash left without one is removed at the next start.

mod files;
mod kept;

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::ops::Bound;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::StatusCode;
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tempfile::NamedTempFile;
use tokio_util::sync::CancellationToken;

use self::files::KeptFiles;
use self::kept::{Batch, Kept};
use super::notes::write_whole;
use super::records::{BatchRecord, BatchStatus, Counts, FileRecord, Purpose};
use crate::clock::now;
use crate::config::BatchConfig;
use crate::error::ApiError;

/// Only the server's user may read records.
const MODE: u32 = 0o600;

/// Files and batches. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct BatchStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    config: BatchConfig,
    /// Held briefly, never during disk I/O.
    kept: Mutex<Kept>,
    /// Serializes the writes of batch records.
    writing: Mutex<()>,
    /// Held as long as the process uses the folder.
    _lock: File,
}

/// A running upload's part of its owner's limits: one file and its bytes. Dropping it releases both.
#[derive(Debug)]
pub(crate) struct UploadRoom {
    shared: Arc<Shared>,
    owner: Option<String>,
    /// `None` once its file is kept.
    bytes: Option<u64>,
}

impl UploadRoom {
    /// Takes room for further bytes.
    ///
    /// # Errors
    /// Like [`BatchStore::room`]; then none is taken.
    pub(crate) fn take(&mut self, bytes: u64) -> Result<(), ApiError> {
        let (owner, config) = (self.owner.as_deref(), &self.shared.config);
        self.shared.kept.lock().files.take(config, owner, bytes)?;
        self.bytes = self.bytes.map(|taken| taken + bytes);
        Ok(())
    }

    /// Releases the part. Later calls do nothing.
    fn end(&mut self, files: &mut KeptFiles) {
        if let Some(bytes) = self.bytes.take() {
            files.end_upload(self.owner.as_deref(), bytes);
        }
    }
}

impl Drop for UploadRoom {
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        self.end(&mut shared.kept.lock().files);
    }
}

impl BatchStore {
    /// Locks the folder and reads its records.
    ///
    /// # Errors
    /// If it cannot be used, or another process uses it.
    pub(crate) fn open(folder: PathBuf, config: BatchConfig) -> io::Result<Self> {
        let named = |error: io::Error| {
            let problem = format!("the folder of batches, {}: {error}", folder.display());
            io::Error::new(error.kind(), problem)
        };
        for part in [folder.clone(), folder.join("files"), folder.join("batches")] {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(part)
                .map_err(named)?;
        }
        let lock = File::create(folder.join("lock")).map_err(named)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let problem = "another server has it; give each server a folder of its own";
                return Err(named(io::Error::other(problem)));
            }
            Err(TryLockError::Error(error)) => {
                let problem = format!("it cannot be locked: {error}");
                return Err(named(io::Error::new(error.kind(), problem)));
            }
        }
        let files: BTreeMap<String, FileRecord> =
            records_in(&folder.join("files"), |record: &FileRecord| {
                record.id.clone()
            })
            .map_err(named)?;
        let batches = records_in(&folder.join("batches"), |record: &BatchRecord| {
            record.id.clone()
        });
        let batches: BTreeMap<String, BatchRecord> = batches.map_err(named)?;
        let batch = |record| Batch {
            record: Arc::new(record),
            cancelled: CancellationToken::new(),
        };
        let kept = Kept {
            files: KeptFiles::of(files.into_values()),
            batches: batches
                .into_iter()
                .map(|(id, record)| (id, batch(record)))
                .collect(),
        };
        let shared = Shared {
            folder: folder.clone(),
            config,
            kept: Mutex::new(kept),
            writing: Mutex::new(()),
            _lock: lock,
        };
        let store = Self {
            shared: Arc::new(shared),
        };
        store.remove_strays().map_err(named)?;
        Ok(store)
    }

    pub(crate) fn config(&self) -> &BatchConfig {
        &self.shared.config
    }

    fn folder_of_files(&self) -> PathBuf {
        self.shared.folder.join("files")
    }

    /// The path of a file's content.
    pub(crate) fn content(&self, id: &str) -> PathBuf {
        self.folder_of_files().join(id)
    }

    fn file_record(&self, id: &str) -> PathBuf {
        self.folder_of_files().join(format!("{id}.json"))
    }

    fn folder_of_batches(&self) -> PathBuf {
        self.shared.folder.join("batches")
    }

    fn batch_record(&self, id: &str) -> PathBuf {
        self.folder_of_batches().join(format!("{id}.json"))
    }

    /// The path of a batch's notes until it ends.
    pub(crate) fn notes(&self, id: &str) -> PathBuf {
        self.folder_of_batches().join(format!("{id}.part"))
    }

    /// Removes files without a record: contents and answers left by a crash or a full disk.
    fn remove_strays(&self) -> io::Result<()> {
        let files = self.folder_of_files();
        // A record that cannot be read is logged, and left with its content or its answers for an operator.
        let has_record =
            |name: &str| name.ends_with(".json") || files.join(format!("{name}.json")).exists();
        remove_others(&files, has_record)?;
        let kept = self.shared.kept.lock();
        let is_unfinished = |id: &str| match kept.batches.get(id) {
            Some(batch) => !batch.record.status.is_end(),
            None => self.batch_record(id).exists(),
        };
        let is_of_batch = |name: &str| {
            name.ends_with(".json") || name.strip_suffix(".part").is_some_and(is_unfinished)
        };
        remove_others(&self.folder_of_batches(), is_of_batch)
    }

    /// Creates an empty temporary file in the folder, for new content.
    ///
    /// # Errors
    /// If there is no room on the disk.
    pub(crate) fn new_content(&self) -> io::Result<NamedTempFile> {
        NamedTempFile::new_in(self.folder_of_files())
    }

    /// Reserves room for a further file of the owner's, of unknown size.
    ///
    /// # Errors
    /// A 400 that names the limit reached and says what to do.
    pub(crate) fn room(&self, owner: Option<&str>) -> Result<UploadRoom, ApiError> {
        let mut kept = self.shared.kept.lock();
        kept.files.begin_upload(self.config(), owner)?;
        Ok(UploadRoom {
            shared: Arc::clone(&self.shared),
            owner: owner.map(str::to_owned),
            bytes: Some(0),
        })
    }

    /// Stores an uploaded file. The file takes over its `room`.
    ///
    /// # Errors
    /// A 507 if it cannot be written.
    pub(crate) fn add_file(
        &self,
        record: FileRecord,
        content: NamedTempFile,
        mut room: UploadRoom,
    ) -> Result<(), ApiError> {
        {
            // Under one lock, so that nobody counts the file twice or not at all.
            let mut kept = self.shared.kept.lock();
            room.end(&mut kept.files);
            kept.files.insert(record.clone());
        }
        let written = self.write_file(&record, content);
        written.map_err(|error| {
            self.shared.kept.lock().files.remove(&record.id);
            // Content left over is removed at the next start at the latest.
            drop(fs::remove_file(self.content(&record.id)));
            not_written(&error)
        })
    }

    fn write_file(&self, record: &FileRecord, content: NamedTempFile) -> io::Result<()> {
        content.as_file().sync_all()?;
        content
            .persist(self.content(&record.id))
            .map_err(|error| error.error)?;
        write_record(&self.file_record(&record.id), record)
    }

    /// Stores an output file, which its batch may write again.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn add_output(&self, record: FileRecord, content: NamedTempFile) -> io::Result<()> {
        self.write_file(&record, content)?;
        self.shared.kept.lock().files.insert(record);
        Ok(())
    }

    /// A file of the owner's.
    pub(crate) fn file(&self, id: &str, owner: Option<&str>) -> Option<FileRecord> {
        let kept = self.shared.kept.lock();
        let record = kept.files.get(id)?;
        let is_there = record.owner.as_deref() == owner && record.expires_at > now();
        is_there.then(|| record.clone())
    }

    /// The owner's files in the order of their ids.
    pub(crate) fn files(&self, owner: Option<&str>) -> Vec<FileRecord> {
        let kept = self.shared.kept.lock();
        let (files, now) = (kept.files.values(), now());
        files
            .filter(|file| file.owner.as_deref() == owner && file.expires_at > now)
            .cloned()
            .collect()
    }

    /// Deletes a file of the owner's. Returns whether it existed.
    ///
    /// # Errors
    /// A 409 while a batch reads it.
    pub(crate) fn delete_file(&self, id: &str, owner: Option<&str>) -> Result<bool, ApiError> {
        let mut kept = self.shared.kept.lock();
        let is_there = kept
            .files
            .get(id)
            .is_some_and(|file| file.owner.as_deref() == owner);
        if !is_there {
            return Ok(false);
        }
        if let Some(batch) = kept.reader_of(id) {
            let message = format!(
                "The batch '{}' still reads the file '{id}'. Cancel it, or wait until it has ended.",
                batch.id
            );
            return Err(ApiError::new(StatusCode::CONFLICT, message));
        }
        kept.files.remove(id);
        drop(kept);
        self.remove_file(id);
        Ok(true)
    }

    /// Removes the record first: content without a record is cleaned up.
    fn remove_file(&self, id: &str) {
        for path in [self.file_record(id), self.content(id)] {
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!(%error, path = %path.display(), "a deleted file cannot be removed from the disk");
            }
        }
    }

    /// Stores a new batch of the owner's.
    ///
    /// # Errors
    /// A 404 if its input does not exist, a 400 if it is not a batch input, a 429 if too many batches are unfinished, a
    /// 507 if it cannot be written.
    pub(crate) fn add_batch(&self, record: BatchRecord) -> Result<(), ApiError> {
        let owner = record.owner.as_deref();
        let input = &record.input_file_id;
        let Some(file) = self.file(input, owner) else {
            return Err(file_not_found(input, "input_file_id"));
        };
        if file.purpose != Purpose::Batch {
            let problem = "it must be of a file with the purpose \"batch\"";
            return Err(ApiError::invalid("input_file_id", problem));
        }
        let _writing = self.shared.writing.lock();
        let unfinished = self.shared.kept.lock().unfinished_of(owner);
        let most = self.config().max_batches;
        if unfinished >= most {
            let message = format!(
                "{most} of your batches have not ended, which is this server's limit. Wait, or cancel one."
            );
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, message));
        }
        write_record(&self.batch_record(&record.id), &record)
            .map_err(|error| not_written(&error))?;
        let id = record.id.clone();
        let batch = Batch {
            record: Arc::new(record),
            cancelled: CancellationToken::new(),
        };
        self.shared.kept.lock().batches.insert(id, batch);
        Ok(())
    }

    /// A batch of the owner's.
    pub(crate) fn batch(&self, id: &str, owner: Option<&str>) -> Option<BatchRecord> {
        let kept = self.shared.kept.lock();
        let batch = kept.batches.get(id)?;
        (batch.record.owner.as_deref() == owner).then(|| BatchRecord::clone(&batch.record))
    }

    /// The owner's latest batches before the id `before`, at most `most`, in order of their ids.
    pub(crate) fn batches(
        &self,
        owner: Option<&str>,
        before: Option<&str>,
        most: usize,
    ) -> Vec<Arc<BatchRecord>> {
        let end = before.map_or(Bound::Unbounded, Bound::Excluded);
        let kept = self.shared.kept.lock();
        let batches = kept.batches.range::<str, _>((Bound::Unbounded, end));
        let batches = batches.map(|(_, batch)| &batch.record).rev();
        let of_owner = batches.filter(|batch| batch.owner.as_deref() == owner);
        let mut last: Vec<Arc<BatchRecord>> = of_owner.take(most).cloned().collect();
        drop(kept);
        last.reverse();
        last
    }

    /// A batch of any owner, and the token that ends its run.
    pub(crate) fn run_of(&self, id: &str) -> Option<(BatchRecord, CancellationToken)> {
        let kept = self.shared.kept.lock();
        let batch = kept.batches.get(id)?;
        Some((BatchRecord::clone(&batch.record), batch.cancelled.clone()))
    }

    /// The unfinished batches.
    pub(crate) fn unfinished(&self) -> Vec<String> {
        let kept = self.shared.kept.lock();
        let batches = kept.batches.values().map(|batch| &batch.record);
        let unfinished = batches.filter(|record| !record.status.is_end());
        unfinished.map(|record| record.id.clone()).collect()
    }

    /// Changes a batch's record, on the disk first. If the batch ends and its owner has too many, removes the oldest.
    ///
    /// # Errors
    /// If it cannot be written; then nothing is changed.
    pub(crate) fn update(&self, id: &str, change: impl FnOnce(&mut BatchRecord)) -> io::Result<()> {
        let _writing = self.shared.writing.lock();
        let Some((mut record, _)) = self.run_of(id) else {
            return Ok(());
        };
        let counts = record.request_counts;
        change(&mut record);
        write_record(&self.batch_record(id), &record)?;
        let ended = record.status.is_end().then(|| record.owner.clone());
        let mut kept = self.shared.kept.lock();
        if let Some(batch) = kept.batches.get_mut(id) {
            // Answers were counted while the disk wrote.
            if record.request_counts == counts {
                record.request_counts = batch.record.request_counts;
            }
            batch.record = Arc::new(record);
        }
        let forgotten = ended.map(|owner| kept.take_beyond(owner.as_deref()));
        drop(kept);
        self.remove_batches(forgotten.unwrap_or_default());
        Ok(())
    }

    fn remove_batches(&self, ids: Vec<String>) {
        for id in ids {
            if let Err(error) = fs::remove_file(self.batch_record(&id)) {
                tracing::warn!(%error, batch = id, "a batch that is no longer kept cannot be removed from the disk");
            }
        }
    }

    /// Updates a batch's counts in memory alone; after a restart they come from its notes.
    pub(crate) fn count(&self, id: &str, counts: Counts) {
        self.update_in_memory(id, |record| record.request_counts = counts);
    }

    fn update_in_memory(&self, id: &str, change: impl FnOnce(&mut BatchRecord)) {
        if let Some(batch) = self.shared.kept.lock().batches.get_mut(id) {
            change(Arc::make_mut(&mut batch.record));
        }
    }

    /// Starts to cancel a batch of the owner's. `None` if it does not exist. If the disk cannot be written, it is cancelled in
    /// memory, and its run writes that later.
    ///
    /// # Errors
    /// A 409 if it has ended.
    pub(crate) fn cancel(
        &self,
        id: &str,
        owner: Option<&str>,
    ) -> Result<Option<BatchRecord>, ApiError> {
        let Some(record) = self.batch(id, owner) else {
            return Ok(None);
        };
        if record.status.is_end() || record.status == BatchStatus::Finalizing {
            let message = format!(
                "The batch '{id}' is {} and cannot be cancelled.",
                record.status.name()
            );
            return Err(ApiError::new(StatusCode::CONFLICT, message));
        }
        // It may have ended in the meantime.
        let enter = |record: &mut BatchRecord| {
            if matches!(
                record.status,
                BatchStatus::Validating | BatchStatus::InProgress
            ) {
                record.enter(BatchStatus::Cancelling);
            }
        };
        // Once: if the disk takes nothing, the run writes it, however often a client asks.
        if record.status != BatchStatus::Cancelling
            && let Err(error) = self.update(id, enter)
        {
            tracing::error!(%error, batch = id, "a cancelled batch cannot be written yet; a restart before then resumes it");
            let _writing = self.shared.writing.lock();
            self.update_in_memory(id, enter);
        }
        let Some((record, cancelled)) = self.run_of(id) else {
            return Ok(None);
        };
        if record.status == BatchStatus::Cancelling {
            cancelled.cancel();
        }
        Ok(Some(record))
    }

    /// Removes expired files that no batch reads, and batches that ended long ago.
    pub(crate) fn sweep(&self) {
        let (files, batches) = self.shared.kept.lock().take_old(self.config(), now());
        for id in files {
            self.remove_file(&id);
        }
        self.remove_batches(batches);
    }
}

/// The 404 for a file that does not exist or belongs to another owner.
pub(crate) fn file_not_found(id: &str, param: &'static str) -> ApiError {
    let message = format!("No such File object: {}", crate::error::shown(id));
    ApiError {
        param: Some(param.into()),
        ..ApiError::new(StatusCode::NOT_FOUND, message)
    }
}

/// The 507 for a disk that cannot be written.
pub(crate) fn not_written(error: &io::Error) -> ApiError {
    tracing::error!(%error, "the folder of batches cannot be written");
    let message = "This server cannot write to its disk. Send the request again later.";
    ApiError::new(StatusCode::INSUFFICIENT_STORAGE, message)
}

fn write_record(path: &Path, record: &impl Serialize) -> io::Result<()> {
    write_whole(path, MODE, |out| Ok(serde_json::to_writer(out, record)?))
}

/// Reads a folder's records by id. One that cannot be read is logged and left.
fn records_in<R: DeserializeOwned>(
    folder: &Path,
    id: impl Fn(&R) -> String,
) -> io::Result<BTreeMap<String, R>> {
    let mut records = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let read = fs::read(&path);
        match read.and_then(|bytes| Ok(serde_json::from_slice::<R>(&bytes)?)) {
            Ok(record) if path.file_stem().is_some_and(|stem| *stem == *id(&record)) => {
                records.insert(id(&record), record);
            }
            Ok(_) => tracing::error!(path = %path.display(), "a record has another's name"),
            Err(error) => {
                tracing::error!(%error, path = %path.display(), "a record cannot be read")
            }
        }
    }
    Ok(records)
}

fn remove_others(folder: &Path, is_kept: impl Fn(&str) -> bool) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let is_ours = name.is_some_and(|name| {
            ["file-", "batch_", ".tmp"]
                .iter()
                .any(|p| name.starts_with(p))
        });
        if is_ours && !name.is_some_and(&is_kept) {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
