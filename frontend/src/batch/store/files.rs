//! [`KeptFiles`]: the records of files, and each owner's use of its limits. It does no disk I/O.

use std::collections::BTreeMap;

use http::StatusCode;

use crate::batch::records::FileRecord;
use crate::config::BatchConfig;
use crate::error::ApiError;

/// The records of files by their ids.
#[derive(Debug, Default)]
pub(super) struct KeptFiles {
    records: BTreeMap<String, FileRecord>,
    used: BTreeMap<Option<String>, Used>,
}

/// An owner's use of its limits.
#[derive(Debug, Default)]
struct Used {
    /// Includes running uploads.
    files: usize,
    /// Includes running uploads.
    bytes: u64,
}

impl KeptFiles {
    /// These files, and no upload.
    pub(super) fn of(records: impl IntoIterator<Item = FileRecord>) -> Self {
        let mut files = Self::default();
        for record in records {
            files.insert(record);
        }
        files
    }

    pub(super) fn get(&self, id: &str) -> Option<&FileRecord> {
        self.records.get(id)
    }

    /// All of them, in the order of their ids.
    pub(super) fn values(&self) -> impl Iterator<Item = &FileRecord> {
        self.records.values()
    }

    /// Adds a file, replacing one with the same id.
    pub(super) fn insert(&mut self, record: FileRecord) {
        let used = self.used(record.owner.as_deref());
        used.files += 1;
        used.bytes = used.bytes.saturating_add(record.bytes);
        if let Some(old) = self.records.insert(record.id.clone(), record) {
            self.forget(&old);
        }
    }

    pub(super) fn remove(&mut self, id: &str) {
        if let Some(old) = self.records.remove(id) {
            self.forget(&old);
        }
    }

    fn forget(&mut self, old: &FileRecord) {
        let used = self.used(old.owner.as_deref());
        used.files = used.files.saturating_sub(1);
        used.bytes = used.bytes.saturating_sub(old.bytes);
    }

    /// Counts a new upload of the owner's.
    ///
    /// # Errors
    /// A 400 that names the limit reached and says what to do; then the upload is not counted.
    pub(super) fn begin_upload(
        &mut self,
        config: &BatchConfig,
        owner: Option<&str>,
    ) -> Result<(), ApiError> {
        let used = self.used(owner);
        let count = used.files;
        if count >= config.max_files {
            let problem = format!("You keep {count} files, running uploads included");
            return Err(at_limit(&problem));
        }
        used.files += 1;
        Ok(())
    }

    /// Reserves `bytes` more for an upload of the owner's.
    ///
    /// # Errors
    /// Like [`Self::begin_upload`]; then no bytes are reserved.
    pub(super) fn take(
        &mut self,
        config: &BatchConfig,
        owner: Option<&str>,
        bytes: u64,
    ) -> Result<(), ApiError> {
        let used = self.used(owner);
        let (total, most) = (used.bytes.saturating_add(bytes), config.max_total_bytes);
        if total > most {
            let problem = format!("Your files would have {total} of {most} bytes");
            return Err(at_limit(&problem));
        }
        used.bytes = total;
        Ok(())
    }

    /// Releases an upload of the owner's: its place among the files, and its bytes.
    pub(super) fn end_upload(&mut self, owner: Option<&str>, bytes: u64) {
        let used = self.used(owner);
        used.files = used.files.saturating_sub(1);
        used.bytes = used.bytes.saturating_sub(bytes);
    }

    fn used(&mut self, owner: Option<&str>) -> &mut Used {
        self.used.entry(owner.map(str::to_owned)).or_default()
    }
}

fn at_limit(problem: &str) -> ApiError {
    let message =
        format!("{problem}, which is this server's limit. Delete files that you no longer need.");
    ApiError::new(StatusCode::BAD_REQUEST, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::records::Purpose;

    fn file(id: &str, bytes: u64) -> FileRecord {
        FileRecord {
            id: id.into(),
            owner: Some("a".into()),
            bytes,
            created_at: 0,
            expires_at: 1,
            filename: "in.jsonl".into(),
            purpose: Purpose::Batch,
        }
    }

    #[test]
    fn every_owner_has_used_what_its_files_and_uploads_have() {
        let config = BatchConfig {
            max_files: 3,
            max_total_bytes: 100,
            ..BatchConfig::default()
        };
        let mut files = KeptFiles::of([file("1", 30)]);
        let begins =
            |files: &mut KeptFiles, owner| files.begin_upload(&config, Some(owner)).is_ok();
        let takes =
            |files: &mut KeptFiles, owner, bytes| files.take(&config, Some(owner), bytes).is_ok();
        assert!(begins(&mut files, "a") && takes(&mut files, "a", 60));
        assert!(!takes(&mut files, "a", 11), "30 are kept, 60 under way");
        assert!(begins(&mut files, "b") && takes(&mut files, "b", 100));
        assert!(begins(&mut files, "a"));
        assert!(!begins(&mut files, "a"), "1 is kept, 2 are under way");
        files.end_upload(Some("a"), 60);
        assert!(begins(&mut files, "a") && takes(&mut files, "a", 70));
        files.end_upload(Some("a"), 70);
        files.end_upload(Some("a"), 0);
        // Output files are replaced regardless of the limit.
        files.insert(file("1", 40));
        files.insert(file("2", 90));
        assert!(!takes(&mut files, "a", 0));
        files.remove("2");
        files.remove("2");
        assert!(!takes(&mut files, "a", 61));
        assert!(takes(&mut files, "a", 60));
        assert_eq!(files.values().count(), 1);
    }
}
