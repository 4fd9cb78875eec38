//! How the processes of a fleet meet: the discovery backend, the transport of requests, and outages of them.

use std::path::PathBuf;

use tempfile::TempDir;

/// An outage of discovery.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Outage {
    /// Discovery is gone: its server was killed, or its directory was removed.
    Gone,
    /// Discovery exists but does not work: its server hangs, or its directory is unusable.
    Stuck,
}

/// A way to meet.
pub(crate) trait Meeting: Send + Sync + 'static {
    /// The flags of every process.
    fn flags(&self) -> Vec<String>;

    /// Interrupts discovery.
    fn interrupt(&mut self, outage: Outage) -> impl Future<Output = ()> + Send;

    /// Restores discovery.
    fn resume(&mut self, outage: Outage) -> impl Future<Output = ()> + Send;
}

/// A directory and TCP.
pub(crate) struct Directory {
    folder: TempDir,
}

impl Directory {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self { folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("discovery")
    }

    fn aside(&self) -> PathBuf {
        self.folder.path().join("aside")
    }
}

impl Meeting for Directory {
    fn flags(&self) -> Vec<String> {
        vec![
            "--discovery-backend=file".into(),
            format!("--discovery-path={}", self.path().display()),
        ]
    }

    async fn interrupt(&mut self, outage: Outage) {
        match outage {
            // Atomically, even while a process writes into it.
            Outage::Gone => {
                std::fs::rename(self.path(), self.aside()).expect("a directory");
                std::fs::remove_dir_all(self.aside()).expect("a directory");
            }
            Outage::Stuck => {
                std::fs::rename(self.path(), self.aside()).expect("a directory");
                std::fs::write(self.path(), "not a directory").expect("a file");
            }
        }
    }

    async fn resume(&mut self, outage: Outage) {
        match outage {
            // The workers create it again.
            Outage::Gone => {}
            Outage::Stuck => {
                std::fs::remove_file(self.path()).expect("a file");
                std::fs::rename(self.aside(), self.path()).expect("a directory");
            }
        }
    }
}
