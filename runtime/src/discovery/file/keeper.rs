//! The thread of a [`FileDiscovery`](super::FileDiscovery): it keeps the leases alive, and scans the directory while
//! there are watchers.
//!
//! A thread rather than a task, so that a busy async runtime does not lose its leases.

use std::ops::Deref;
use std::sync::Arc;
use std::thread;

use genset_backend_common::{EngineError, ErrorKind};
use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;
use tokio::time::Instant;

use super::config::FileDiscoveryConfig;
use super::lease::{Beat, LeaseFile};
use super::scan::{Scanned, Scanner};
use super::store::{Store, StoreError};
use super::view::View;

/// State shared by the thread and its callers.
#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) store: Arc<Store>,
    config: FileDiscoveryConfig,
    scanner: Mutex<Scanner>,
    work: Mutex<Work>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Work {
    leases: Vec<Arc<LeaseFile>>,
    /// Something may have changed: scan now.
    is_poked: bool,
    is_over: bool,
}

/// Ends the thread when the last owner is dropped. Does not wait for it.
#[derive(Debug)]
pub(super) struct KeeperOwner(Arc<Keeper>);

impl Keeper {
    pub(super) fn start(
        store: Store,
        config: FileDiscoveryConfig,
    ) -> Result<Arc<KeeperOwner>, EngineError> {
        let store = Arc::new(store);
        let keeper = Arc::new(Self {
            scanner: Mutex::new(Scanner::new(Arc::clone(&store), config.clone())),
            store,
            config,
            work: Mutex::default(),
            wake: Condvar::new(),
        });
        let running = Arc::clone(&keeper);
        thread::Builder::new()
            .name("genset-discover".to_owned())
            .spawn(move || running.run())
            .map_err(|error| {
                EngineError::new(ErrorKind::Unavailable, "discovery cannot start its thread")
                    .with_source(error)
            })?;
        Ok(Arc::new(KeeperOwner(keeper)))
    }

    /// Beats for a lease until it ends.
    pub(super) fn keep(&self, lease: Arc<LeaseFile>) {
        self.work.lock().leases.push(lease);
        self.poke();
    }

    /// Makes the thread scan for changes now.
    pub(super) fn poke(&self) {
        self.work.lock().is_poked = true;
        self.wake.notify_one();
    }

    pub(super) fn scan(&self) -> Result<Scanned, StoreError> {
        self.scanner.lock().scan()
    }

    pub(super) fn stamp_after(&self, key: &str) -> Result<u64, StoreError> {
        let mut scanner = self.scanner.lock();
        scanner.scan()?;
        Ok(scanner.stamp_after(key))
    }

    pub(super) fn follow(&self) -> Result<watch::Receiver<Arc<View>>, StoreError> {
        let views = self.scanner.lock().follow()?;
        self.poke();
        Ok(views)
    }

    fn run(&self) {
        let mut beat_at = Instant::now();
        let mut scan_at = None;
        while self.wait_until(beat_at, scan_at) {
            let now = Instant::now();
            if now >= beat_at {
                self.beat(|_| true);
                self.tell_of_silence();
                beat_at = now + self.config.heartbeat_interval;
            } else {
                self.beat(LeaseFile::is_ended);
            }
            let pause = self.scanner.lock().keep_following();
            scan_at = pause.map(|pause| Instant::now() + pause);
        }
        self.beat(LeaseFile::is_ended);
    }

    /// Warns if the leases were stale for so long that other processes considered this one dead.
    fn tell_of_silence(&self) {
        let leases = self.work.lock().leases.clone();
        let silent = leases.iter().map(|lease| lease.take_silence()).max();
        if let Some(silent) = silent.filter(|silent| *silent >= self.config.time_to_live) {
            tracing::warn!(
                silent_s = silent.as_secs_f64(),
                "this process did not run, or was kept from its discovery directory, for longer than its leases live: it was not listed meanwhile, and is listed again"
            );
        }
    }

    /// Waits until something is due or the thread is poked. Returns `false` when the thread is no longer needed.
    fn wait_until(&self, beat_at: Instant, scan_at: Option<Instant>) -> bool {
        let mut work = self.work.lock();
        while !work.is_poked && !work.is_over {
            let beat_at = (!work.leases.is_empty()).then_some(beat_at);
            let due = [beat_at, scan_at].into_iter().flatten().min();
            let now = Instant::now();
            match due {
                Some(due) if due <= now => break,
                Some(due) => drop(self.wake.wait_for(&mut work, due - now)),
                None => self.wake.wait(&mut work),
            }
        }
        work.is_poked = false;
        !work.is_over
    }

    /// Beats for the leases that `which` selects, and forgets those that have ended.
    fn beat(&self, which: impl Fn(&LeaseFile) -> bool) {
        let leases = self.work.lock().leases.clone();
        let is_over = |lease: &&Arc<LeaseFile>| which(lease) && lease.beat() == Beat::Over;
        let over: Vec<_> = leases.iter().filter(is_over).collect();
        if !over.is_empty() {
            let mut work = self.work.lock();
            work.leases
                .retain(|lease| !over.iter().any(|over| Arc::ptr_eq(over, lease)));
        }
    }
}

impl Deref for KeeperOwner {
    type Target = Keeper;

    fn deref(&self) -> &Keeper {
        &self.0
    }
}

impl Drop for KeeperOwner {
    fn drop(&mut self) {
        self.0.work.lock().is_over = true;
        self.0.wake.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;
    use std::time::Duration;

    use super::super::FileDiscovery;
    use super::*;
    use crate::discovery::Discovery;

    async fn ends(keeper: Weak<Keeper>) {
        while keeper.strong_count() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn the_thread_ends_with_the_last_clone_lease_and_watch() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let discovery = FileDiscovery::open(path, FileDiscoveryConfig::default()).unwrap();
        let keeper = Arc::downgrade(&discovery.keeper.0);
        let (lease, watch) = (
            discovery.lease().await.unwrap(),
            discovery.watch("").await.unwrap(),
        );
        drop(discovery.clone());
        drop(discovery);
        drop(lease);
        assert!(keeper.strong_count() > 0);
        drop(watch);
        let patience = Duration::from_secs(60);
        tokio::time::timeout(patience, ends(keeper)).await.unwrap();
    }
}
