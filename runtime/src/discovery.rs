//! Discovery: a small key-value store with leases and watches, which holds one [`InstanceRecord`] for each routable
//! instance.

#[cfg(feature = "etcd")]
mod etcd;
mod file;
#[cfg(test)]
pub(crate) mod gated;
mod memory;
mod records;
mod vital;

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::FutureExt;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::{EngineError, ErrorKind, log_limit::OncePerMinute};

#[cfg(feature = "etcd")]
pub use etcd::{EtcdConfig, EtcdCredentials, EtcdDiscovery, EtcdTls};
#[cfg(feature = "fuzzing")]
pub(crate) use file::lease_entries;
pub use file::{DirectoryAccess, FileDiscovery, FileDiscoveryConfig};
pub use memory::MemoryDiscovery;
pub(crate) use records::Records;
pub use records::{Address, InstanceRecord, MAX_RECORD_BYTES, RecordProblem};
pub use vital::VitalDiscovery;

use crate::names::{EndpointName, WorkerScope};

/// Prefix of every key, with the version of the stored format.
const ROOT: &str = "genset/v1/instances/";

/// Pauses between attempts to open a watch, doubling from the first to the last.
const WATCH_PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// The most changes that are passed on at once.
const MOST_CHANGES: usize = 1024;

/// A key and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Bytes,
}

/// A change of the entries under a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// All entries: the first change of a watch, and the first after any gap. An entry that is not in it is gone.
    Snapshot(Vec<Entry>),
    /// An entry is new or has a new value.
    Put(Entry),
    /// An entry is gone.
    Removed(String),
}

/// A store of leased entries.
#[async_trait]
pub trait Discovery: Send + Sync + 'static {
    /// Acquires a lease. Entries put under it live as long as the lease.
    ///
    /// # Errors
    /// `Unavailable` when the store cannot be reached.
    async fn lease(&self) -> Result<Box<dyn Lease>, EngineError>;

    /// Every entry whose key starts with `prefix`.
    ///
    /// # Errors
    /// `Unavailable` when the store cannot be reached.
    async fn get(&self, prefix: &str) -> Result<Vec<Entry>, EngineError>;

    /// Watches the entries whose keys start with `prefix`. No change is missed or reordered; a snapshot follows each gap.
    ///
    /// # Errors
    /// `Unavailable` when the store cannot be reached.
    async fn watch(&self, prefix: &str) -> Result<Box<dyn Watch>, EngineError>;

    /// The number of watches and leases from here that cannot reach the store now, for metrics. Stays zero if the store cannot be
    /// away.
    fn outages(&self) -> Gauge {
        Gauge::default()
    }
}

/// A watch or a lease that cannot reach the store: it counts until this is dropped.
#[derive(Debug)]
struct Outage(Gauge);

impl Outage {
    fn of(outages: &Gauge) -> Self {
        outages.inc();
        Self(outages.clone())
    }
}

impl Drop for Outage {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// The right to keep entries in the store. Dropping it removes them, immediately if that is possible without waiting.
#[async_trait]
pub trait Lease: Send + Sync + 'static {
    /// Puts an entry, replacing one with the same key.
    ///
    /// # Errors
    /// `Unavailable` when the store cannot be reached or the lease is lost.
    async fn put(&self, entry: Entry) -> Result<(), EngineError>;

    /// Removes an entry. A missing entry is not an error.
    ///
    /// # Errors
    /// `Unavailable` when the store cannot be reached.
    async fn remove(&self, key: &str) -> Result<(), EngineError>;

    /// Waits until the lease is lost, with everything under it.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    async fn lost(&self);
}

/// A watch on a prefix.
#[async_trait]
pub trait Watch: Send + 'static {
    /// The next change. `None` if the store is permanently gone.
    ///
    /// # Cancel safety
    /// If another branch of `select!` completes first, no change is consumed.
    async fn next(&mut self) -> Option<Change>;
}

/// The prefix of all instances.
#[must_use]
pub fn all_instances() -> &'static str {
    ROOT
}

/// The prefix of one endpoint's instances.
#[must_use]
pub fn prefix_of(endpoint: &EndpointName) -> String {
    format!(
        "{ROOT}{}/{}/{}/",
        endpoint.namespace, endpoint.component, endpoint.endpoint
    )
}

/// The prefix of the instances of a scope.
pub(crate) fn prefix_of_scope(scope: &WorkerScope) -> String {
    match scope {
        WorkerScope::Namespace(namespace) => format!("{ROOT}{namespace}/"),
        WorkerScope::Endpoint(endpoint) => prefix_of(endpoint),
    }
}

/// The error of using a lease that is gone.
fn lease_lost() -> EngineError {
    let message = "the lease on discovery is lost; take a new one";
    EngineError::new(ErrorKind::Unavailable, message)
}

/// Passes on the changes under a prefix until the future is dropped, those that came meanwhile together: what is done with them may
/// look at every instance. Opens a watch again until discovery answers.
pub(crate) async fn follow_changes(
    discovery: &dyn Discovery,
    prefix: &str,
    mut pass_on: impl FnMut(Vec<Change>) + Send,
) {
    let (shortest, longest) = WATCH_PAUSES;
    let mut pause = shortest;
    let logged = OncePerMinute::default();
    let mut outage = None;
    loop {
        match discovery.watch(prefix).await {
            Ok(mut watch) => {
                pause = shortest;
                if outage.take().is_some() {
                    tracing::info!("discovery can be watched now");
                }
                while let Some(change) = watch.next().await {
                    let mut changes = vec![change];
                    while changes.len() < MOST_CHANGES
                        && let Some(Some(change)) = watch.next().now_or_never()
                    {
                        changes.push(change);
                    }
                    pass_on(changes);
                }
            }
            Err(error) => {
                // The store counts only the outages of watches that began.
                outage.get_or_insert_with(|| Outage::of(&discovery.outages()));
                if let Some(unlogged) = logged.unlogged("not watched") {
                    tracing::warn!(%error, unlogged, "discovery cannot be watched, and known instances stay in use; further failures are only counted for a minute");
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(longest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[tokio::test]
    async fn changes_that_come_together_are_passed_on_together() {
        let discovery = MemoryDiscovery::new();
        let lease = discovery.lease().await.unwrap();
        let passed = Mutex::new(Vec::new());
        let pass_on = |changes: Vec<Change>| passed.lock().push(changes.len());
        let mut follow = Box::pin(follow_changes(&discovery, "", pass_on));
        assert!(follow.as_mut().now_or_never().is_none());
        for key in ["a", "b", "c"] {
            let (key, value) = (key.into(), Bytes::new());
            lease.put(Entry { key, value }).await.unwrap();
        }
        assert!(follow.as_mut().now_or_never().is_none());
        assert_eq!(*passed.lock(), [1, 3]);
    }
}
