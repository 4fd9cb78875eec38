//! The behaviour suite on discovery in a directory.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use genset_runtime::discovery::{Discovery, Entry, FileDiscovery, FileDiscoveryConfig};
use tempfile::TempDir;

use super::child::offering;
use super::suite::{Backend, Victim, discovery_suite};

discovery_suite!(behaviour, FileBackend::new());

/// A directory, and connections with their own threads, like those of other processes.
pub(crate) struct FileBackend(TempDir);

impl FileBackend {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().join("store")
    }

    fn away(&self) -> PathBuf {
        self.0.path().join("away")
    }

    pub(crate) fn open(&self) -> FileDiscovery {
        FileDiscovery::open(self.path(), FileDiscoveryConfig::default()).unwrap()
    }

    /// The name of the store for a child.
    pub(crate) fn name(&self) -> String {
        format!("file:{}", self.path().display())
    }

    /// The files of all leases.
    pub(crate) fn lease_files(&self) -> Vec<PathBuf> {
        let items = fs::read_dir(self.path()).unwrap();
        let paths = items.map(|item| item.unwrap().path());
        paths
            .filter(|path| path.extension() == Some("lease".as_ref()))
            .collect()
    }
}

#[async_trait]
impl Backend for FileBackend {
    async fn connect(&self) -> Arc<dyn Discovery> {
        Arc::new(self.open())
    }

    async fn victim(&self, entries: Vec<Entry>) -> Box<dyn Victim> {
        Box::new(offering(&self.name(), entries).await)
    }

    /// Moves the directory away and puts something unreadable in its place.
    async fn begin_outage(&self) {
        fs::rename(self.path(), self.away()).unwrap();
        fs::write(self.path(), "not a directory").unwrap();
    }

    async fn end_outage(&self) {
        fs::remove_file(self.path()).unwrap();
        fs::rename(self.away(), self.path()).unwrap();
    }

    async fn take_leases_away(&self) {
        for file in self.lease_files() {
            fs::remove_file(file).unwrap();
        }
    }

    fn dead_lease_stays(&self) -> Duration {
        Duration::from_secs(3)
    }
}
