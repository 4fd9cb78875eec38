//! [`Kept`]: the records of files and batches. It does no disk I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::files::KeptFiles;
use crate::batch::records::BatchRecord;
use crate::config::BatchConfig;

/// The most ended batches of one owner that are remembered.
pub(super) const MAX_ENDED_BATCHES: usize = 1000;

#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) files: KeptFiles,
    pub(super) batches: BTreeMap<String, Batch>,
}

#[derive(Debug)]
pub(super) struct Batch {
    /// Shared, so that a list of records is converted outside the store's lock.
    pub(super) record: Arc<BatchRecord>,
    /// Ends its run.
    pub(super) cancelled: CancellationToken,
}

impl Kept {
    fn of_owner(&self, owner: Option<&str>) -> impl Iterator<Item = &BatchRecord> {
        let batches = self.batches.values().map(|batch| &*batch.record);
        batches.filter(move |batch| batch.owner.as_deref() == owner)
    }

    /// The number of the owner's unfinished batches.
    pub(super) fn unfinished_of(&self, owner: Option<&str>) -> usize {
        let unfinished = self.of_owner(owner).filter(|batch| !batch.status.is_end());
        unfinished.count()
    }

    /// Removes the oldest of the owner's ended batches, if there are too many; returns their ids.
    pub(super) fn take_beyond(&mut self, owner: Option<&str>) -> Vec<String> {
        let ended = self.of_owner(owner);
        let ended = ended.filter_map(|batch| Some((batch.ended_at()?, batch.id.as_str())));
        let mut ended: Vec<(u64, &str)> = ended.collect();
        ended.sort_unstable();
        ended.truncate(ended.len().saturating_sub(MAX_ENDED_BATCHES));
        let ids: Vec<String> = ended.into_iter().map(|(_, id)| id.to_owned()).collect();
        for id in &ids {
            self.batches.remove(id);
        }
        ids
    }

    /// The unfinished batch that has this file as its input.
    pub(super) fn reader_of(&self, file: &str) -> Option<&BatchRecord> {
        let mut batches = self.batches.values().map(|batch| &*batch.record);
        batches.find(|batch| batch.input_file_id == file && !batch.status.is_end())
    }

    /// Removes what is old; returns the ids of files and batches.
    pub(super) fn take_old(
        &mut self,
        config: &BatchConfig,
        now: u64,
    ) -> (Vec<String>, Vec<String>) {
        let files = self.files.values().filter(|file| file.expires_at <= now);
        let files = files.filter(|file| self.reader_of(&file.id).is_none());
        let files: Vec<String> = files.map(|file| file.id.clone()).collect();
        let is_old = |at: u64| at.saturating_add(config.lifetime.as_secs()) <= now;
        let batches = self.batches.values().map(|batch| &batch.record);
        let batches = batches.filter(|batch| batch.ended_at().is_some_and(is_old));
        let batches: Vec<String> = batches.map(|batch| batch.id.clone()).collect();
        for id in &files {
            self.files.remove(id);
        }
        for id in &batches {
            self.batches.remove(id);
        }
        (files, batches)
    }
}
