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

    /// Reserves bytes of a further file of the owner's.
    ///
    /// # Errors
    /// A 400 that names the limit reached and says what to do; then none is reserved.
    pub(super) fn take(
        &mut self,
        config: &BatchConfig,
        owner: Option<&str>,
        bytes: u64,
    ) -> Result<(), ApiError> {
        let used = self.used(owner);
        let (count, total) = (used.files, used.bytes.saturating_add(bytes));
        let refused = |problem: String| {
            let message = format!(
                "{problem}, which is this server's limit. Delete files that you need no more."
            );
            Err(ApiError::new(StatusCode::BAD_REQUEST, message))
        };
        if count >= config.max_files {
            return refused(format!("You keep {count} files"));
        }
        if total > config.max_total_bytes {
            return refused(format!(
                "Your files would have {total} of {} bytes",
                config.max_total_bytes
            ));
        }
        used.bytes = total;
        Ok(())
    }

    /// Returns reserved bytes.
    pub(super) fn give_back(&mut self, owner: Option<&str>, bytes: u64) {
        let used = self.used(owner);
        used.bytes = used.bytes.saturating_sub(bytes);
    }

    fn used(&mut self, owner: Option<&str>) -> &mut Used {
        self.used.entry(owner.map(str::to_owned)).or_default()
    }
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
            max_files: 2,
            max_total_bytes: 100,
            ..BatchConfig::default()
        };
        let mut files = KeptFiles::of([file("1", 30)]);
        let takes =
            |files: &mut KeptFiles, owner, bytes| files.take(&config, Some(owner), bytes).is_ok();
        assert!(takes(&mut files, "a", 60));
        assert!(!takes(&mut files, "a", 11), "30 are kept, 60 under way");
        assert!(takes(&mut files, "b", 100), "another's");
        files.give_back(Some("a"), 60);
        assert!(takes(&mut files, "a", 70));
        files.give_back(Some("a"), 70);
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
