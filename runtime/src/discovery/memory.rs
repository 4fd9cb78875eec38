//! Discovery inside one process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use genset_backend_common::{EngineError, ErrorKind};
use parking_lot::Mutex;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use super::{Change, Discovery, Entry, Lease, Watch};

/// Changes a watcher may lag behind before it gets a snapshot instead.
const BACKLOG_CHANGES: usize = 1024;

/// A store inside the process. Clones share state.
///
/// # Examples
/// ```
/// use genset_runtime::discovery::{Change, Discovery, Entry, MemoryDiscovery};
///
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let discovery = MemoryDiscovery::new();
/// let mut watch = discovery.watch("a/").await?;
/// assert_eq!(watch.next().await, Some(Change::Snapshot(vec![])));
/// let lease = discovery.lease().await?;
/// lease.put(Entry { key: "a/1".into(), value: "x".into() }).await?;
/// drop(lease);
/// assert!(matches!(watch.next().await, Some(Change::Put(_))));
/// assert_eq!(watch.next().await, Some(Change::Removed("a/1".into())));
/// # Ok::<(), genset_backend_common::EngineError>(())
/// # }).unwrap();
/// ```
#[derive(Debug, Clone)]
pub struct MemoryDiscovery {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    next_lease: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    entries: BTreeMap<String, (Bytes, u64)>,
    leases: BTreeMap<u64, CancellationToken>,
    changes: broadcast::Sender<Change>,
}

impl MemoryDiscovery {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        let (changes, _) = broadcast::channel(BACKLOG_CHANGES);
        let state = State {
            entries: BTreeMap::new(),
            leases: BTreeMap::new(),
            changes,
        };
        Self {
            shared: Arc::new(Shared {
                next_lease: AtomicU64::new(1),
                state: Mutex::new(state),
            }),
        }
    }

    /// Ends every lease, like an outage longer than the time to live: for simulations and tests.
    pub fn expire_leases(&self) {
        let mut state = self.shared.state.lock();
        let leases: Vec<u64> = state.leases.keys().copied().collect();
        for lease in leases {
            state.end_lease(lease);
        }
    }
}

impl Default for MemoryDiscovery {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    fn end_lease(&mut self, lease: u64) {
        let Some(lost) = self.leases.remove(&lease) else {
            return;
        };
        let keys: Vec<String> = self
            .entries
            .iter()
            .filter(|(_, (_, owner))| *owner == lease)
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            self.remove(key);
        }
        lost.cancel();
    }

    fn remove(&mut self, key: String) {
        if self.entries.remove(&key).is_some() {
            // There may be no watcher.
            let _ = self.changes.send(Change::Removed(key));
        }
    }

    fn snapshot(&self, prefix: &str) -> Vec<Entry> {
        let from_prefix = self.entries.range(prefix.to_owned()..);
        from_prefix
            .take_while(|(key, _)| key.starts_with(prefix))
            .map(|(key, (value, _))| Entry {
                key: key.clone(),
                value: value.clone(),
            })
            .collect()
    }
}

#[async_trait]
impl Discovery for MemoryDiscovery {
    async fn lease(&self) -> Result<Box<dyn Lease>, EngineError> {
        let id = self.shared.next_lease.fetch_add(1, Ordering::Relaxed);
        let lost = CancellationToken::new();
        self.shared.state.lock().leases.insert(id, lost.clone());
        Ok(Box::new(MemoryLease {
            id,
            lost,
            shared: Arc::clone(&self.shared),
        }))
    }

    async fn get(&self, prefix: &str) -> Result<Vec<Entry>, EngineError> {
        Ok(self.shared.state.lock().snapshot(prefix))
    }

    async fn watch(&self, prefix: &str) -> Result<Box<dyn Watch>, EngineError> {
        let changes = self.shared.state.lock().changes.subscribe();
        let shared = Arc::clone(&self.shared);
        Ok(Box::new(MemoryWatch {
            prefix: prefix.to_owned(),
            shared,
            changes,
            needs_snapshot: true,
        }))
    }
}

#[derive(Debug)]
struct MemoryLease {
    id: u64,
    lost: CancellationToken,
    shared: Arc<Shared>,
}

#[async_trait]
impl Lease for MemoryLease {
    async fn put(&self, entry: Entry) -> Result<(), EngineError> {
        let mut state = self.shared.state.lock();
        if !state.leases.contains_key(&self.id) {
            return Err(EngineError::new(
                ErrorKind::Unavailable,
                "the lease on discovery is lost; take a new one",
            ));
        }
        state
            .entries
            .insert(entry.key.clone(), (entry.value.clone(), self.id));
        let _ = state.changes.send(Change::Put(entry));
        Ok(())
    }

    async fn remove(&self, key: &str) -> Result<(), EngineError> {
        let mut state = self.shared.state.lock();
        if state
            .entries
            .get(key)
            .is_some_and(|(_, owner)| *owner == self.id)
        {
            state.remove(key.to_owned());
        }
        Ok(())
    }

    async fn lost(&self) {
        self.lost.cancelled().await;
    }
}

impl Drop for MemoryLease {
    fn drop(&mut self) {
        self.shared.state.lock().end_lease(self.id);
    }
}

#[derive(Debug)]
struct MemoryWatch {
    prefix: String,
    shared: Arc<Shared>,
    changes: broadcast::Receiver<Change>,
    needs_snapshot: bool,
}

impl MemoryWatch {
    /// All current entries; later changes arrive at a new receiver.
    fn snapshot(&mut self) -> Change {
        let state = self.shared.state.lock();
        self.changes = state.changes.subscribe();
        self.needs_snapshot = false;
        Change::Snapshot(state.snapshot(&self.prefix))
    }
}

#[async_trait]
impl Watch for MemoryWatch {
    async fn next(&mut self) -> Option<Change> {
        loop {
            if self.needs_snapshot {
                return Some(self.snapshot());
            }
            match self.changes.recv().await {
                Ok(Change::Put(entry)) if entry.key.starts_with(&self.prefix) => {
                    return Some(Change::Put(entry));
                }
                Ok(Change::Removed(key)) if key.starts_with(&self.prefix) => {
                    return Some(Change::Removed(key));
                }
                Ok(_) => {}
                Err(broadcast::error::RecvError::Lagged(_)) => self.needs_snapshot = true,
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str, value: &'static str) -> Entry {
        Entry {
            key: key.into(),
            value: Bytes::from_static(value.as_bytes()),
        }
    }

    #[tokio::test]
    async fn a_watch_that_lags_gets_a_snapshot() {
        let discovery = MemoryDiscovery::new();
        let lease = discovery.lease().await.unwrap();
        let mut watch = discovery.watch("").await.unwrap();
        watch.next().await.unwrap();
        for round in 0..2 * BACKLOG_CHANGES {
            lease
                .put(entry(&format!("k{}", round % 7), "v"))
                .await
                .unwrap();
        }
        let Some(Change::Snapshot(entries)) = watch.next().await else {
            panic!("a gap needs a snapshot")
        };
        assert_eq!(entries.len(), 7);
    }
}
