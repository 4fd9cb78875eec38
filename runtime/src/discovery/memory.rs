//! Discovery inside one process.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use genset_backend_common::EngineError;
use parking_lot::Mutex;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use super::{Change, Discovery, Entry, Lease, Watch, lease_lost};

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
#[derive(Debug, Clone, Default)]
pub struct MemoryDiscovery {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    entries: BTreeMap<String, (Bytes, u64)>,
    leases: BTreeMap<u64, CancellationToken>,
    next_lease: u64,
    changes: broadcast::Sender<Change>,
}

impl MemoryDiscovery {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends every lease, like an outage longer than the time to live: for simulations and tests.
    pub fn expire_leases(&self) {
        let mut state = self.state.lock();
        let leases: Vec<u64> = state.leases.keys().copied().collect();
        for lease in leases {
            state.end_lease(lease);
        }
    }
}

impl Default for State {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
            leases: BTreeMap::new(),
            next_lease: 0,
            changes: broadcast::Sender::new(BACKLOG_CHANGES),
        }
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
        let lost = CancellationToken::new();
        let mut state = self.state.lock();
        let id = state.next_lease;
        state.next_lease += 1;
        state.leases.insert(id, lost.clone());
        Ok(Box::new(MemoryLease {
            id,
            lost,
            state: Arc::clone(&self.state),
        }))
    }

    async fn get(&self, prefix: &str) -> Result<Vec<Entry>, EngineError> {
        Ok(self.state.lock().snapshot(prefix))
    }

    async fn watch(&self, prefix: &str) -> Result<Box<dyn Watch>, EngineError> {
        Ok(Box::new(MemoryWatch {
            prefix: prefix.to_owned(),
            state: Arc::clone(&self.state),
            changes: None,
        }))
    }
}

#[derive(Debug)]
struct MemoryLease {
    id: u64,
    lost: CancellationToken,
    state: Arc<Mutex<State>>,
}

#[async_trait]
impl Lease for MemoryLease {
    async fn put(&self, entry: Entry) -> Result<(), EngineError> {
        let mut state = self.state.lock();
        if !state.leases.contains_key(&self.id) {
            return Err(lease_lost());
        }
        state
            .entries
            .insert(entry.key.clone(), (entry.value.clone(), self.id));
        let _ = state.changes.send(Change::Put(entry));
        Ok(())
    }

    async fn remove(&self, key: &str) -> Result<(), EngineError> {
        let mut state = self.state.lock();
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
        self.state.lock().end_lease(self.id);
    }
}

#[derive(Debug)]
struct MemoryWatch {
    prefix: String,
    state: Arc<Mutex<State>>,
    /// `None` at the start and after a gap: the next change is a snapshot.
    changes: Option<broadcast::Receiver<Change>>,
}

#[async_trait]
impl Watch for MemoryWatch {
    async fn next(&mut self) -> Option<Change> {
        loop {
            let Some(changes) = &mut self.changes else {
                let state = self.state.lock();
                self.changes = Some(state.changes.subscribe());
                return Some(Change::Snapshot(state.snapshot(&self.prefix)));
            };
            match changes.recv().await {
                Ok(Change::Put(entry)) if entry.key.starts_with(&self.prefix) => {
                    return Some(Change::Put(entry));
                }
                Ok(Change::Removed(key)) if key.starts_with(&self.prefix) => {
                    return Some(Change::Removed(key));
                }
                Ok(_) => {}
                Err(broadcast::error::RecvError::Lagged(_)) => self.changes = None,
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
