//! Discovery in a directory that several processes share. Needs no server; for one machine or a shared file system.
//!
//! Each lease is one file, which holds all its entries. Its holder replaces it by an atomic rename. It beats by changing the
//! file's modification time, which needs no disk space. A reader scans the directory a few times per second and considers
//! a lease alive as long as it sees the file change. It measures that by its own monotonic clock and counts only
//! the time in which it was scanning, so neither a clock jump nor a suspended process ends a lease.
//!
//! - `store`: the directory itself: names, listing, atomic writes.
//! - `format`: the bytes of a lease file.
//! - `liveness`: whether a lease is alive, as a pure function of the observations.
//! - `scan`: scans the directory and keeps the `view`, which watchers follow.
//! - `lease`: a lease on its holder's side.
//! - `keeper`: the thread that beats and scans.

mod config;
mod format;
mod keeper;
mod lease;
mod liveness;
mod scan;
mod store;
mod view;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use genset_backend_common::EngineError;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use tokio::time::Instant;

pub use config::{DirectoryAccess, FileDiscoveryConfig};

use self::keeper::{Keeper, KeeperOwner};
use self::lease::{FileLease, LeaseFile};
use self::store::Store;
use self::view::FileWatch;
use super::{Discovery, Entry, Lease, Watch};

/// A store in a directory. Clones share state; other processes reach the same store through the same directory.
///
/// A dedicated thread keeps the leases alive and scans for changes. It ends when the last clone, lease and watch is
/// dropped. Async threads do no file I/O, except that dropping a lease unlinks its file.
///
/// While the directory is missing, unreadable, full or not mounted, watchers keep their entries and leases stay alive. Both
/// recover when it is back; the leases recreate a removed directory. A lease is lost only if its
/// file was removed from a directory that is otherwise intact.
///
/// # Examples
/// ```
/// use genset_runtime::discovery::{Change, Discovery, Entry, FileDiscovery, FileDiscoveryConfig};
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("discovery");
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let worker = FileDiscovery::open(path.clone(), FileDiscoveryConfig::default())?;
/// let lease = worker.lease().await?;
/// lease.put(Entry { key: "a/1".into(), value: "x".into() }).await?;
///
/// // Usually in another process.
/// let client = FileDiscovery::open(path, FileDiscoveryConfig::default())?;
/// let mut watch = client.watch("a/").await?;
/// let known = vec![Entry { key: "a/1".into(), value: "x".into() }];
/// assert_eq!(watch.next().await, Some(Change::Snapshot(known)));
/// drop(lease);
/// assert_eq!(watch.next().await, Some(Change::Removed("a/1".into())));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct FileDiscovery {
    config: FileDiscoveryConfig,
    keeper: Arc<KeeperOwner>,
}

impl FileDiscovery {
    /// Opens the store in the directory `path`, and creates it (mode 0700) if it does not exist.
    ///
    /// Blocks for as long as the file system takes to answer.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field, if the config is out of range, if the directory is not private as
    /// [`FileDiscoveryConfig::access`] requires, or if it holds the store of another version. `Unavailable`, naming the path, if it
    /// cannot be created or read.
    pub fn open(path: PathBuf, config: FileDiscoveryConfig) -> Result<Self, EngineError> {
        config.validate()?;
        let store = Store::open(path, &config)?;
        let keeper = Keeper::start(store, config.clone())?;
        Ok(Self { config, keeper })
    }
}

#[async_trait]
impl Discovery for FileDiscovery {
    async fn lease(&self) -> Result<Box<dyn Lease>, EngineError> {
        let keeper = Arc::clone(&self.keeper);
        blocking(move || {
            let file = Arc::new(LeaseFile::create(Arc::clone(&keeper.store))?);
            keeper.keep(Arc::clone(&file));
            Ok(Box::new(FileLease::new(file, keeper)) as Box<dyn Lease>)
        })
        .await
    }

    /// If a lease file's time is far from this machine's clock, waits for its next beat, at most two heartbeat intervals and a
    /// scan interval.
    async fn get(&self, prefix: &str) -> Result<Vec<Entry>, EngineError> {
        let patience = self.config.heartbeat_interval * 2 + self.config.scan_interval;
        let deadline = Instant::now() + patience;
        loop {
            let keeper = Arc::clone(&self.keeper);
            let scanned = blocking(move || Ok(keeper.scan()?)).await?;
            match scanned.look_again_in {
                Some(pause) if Instant::now() < deadline => tokio::time::sleep(pause).await,
                _ => return Ok(scanned.view.under(prefix)),
            }
        }
    }

    async fn watch(&self, prefix: &str) -> Result<Box<dyn Watch>, EngineError> {
        let keeper = Arc::clone(&self.keeper);
        let prefix = prefix.to_owned();
        blocking(move || {
            let views = keeper.follow()?;
            Ok(Box::new(FileWatch::new(prefix, views, keeper)) as Box<dyn Watch>)
        })
        .await
    }

    fn outages(&self) -> Gauge {
        self.keeper.store.outages().clone()
    }
}

/// Runs file operations off the async threads. They complete even if the future is dropped.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, EngineError> + Send + 'static,
) -> Result<T, EngineError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| {
        Err(EngineError::internal("a file operation of discovery ended early").with_source(error))
    })
}

/// Pause before the second look for a missing file; only then is it considered gone. Longer than `rm -r` of the directory takes
/// from a lease to the store's marker, so that such a removal counts as an outage.
const CONFIRM_INTERVAL: Duration = Duration::from_millis(20);

/// The entries of a lease file, for the fuzz targets.
#[cfg(feature = "fuzzing")]
pub(crate) fn lease_entries(file: &bytes::Bytes) -> Option<Vec<Entry>> {
    let (_, entries) = format::decode(file).ok()?;
    let entry = |(key, held): (String, format::Held)| Entry {
        key,
        value: held.value,
    };
    Some(entries.into_iter().map(entry).collect())
}
