//! Discovery: who is there. A small key-value store with leases and watches; what is stored is one
//! [`InstanceRecord`] for each routable instance.

#[cfg(feature = "etcd")]
mod etcd;
mod file;
mod memory;

use std::fmt;

use async_trait::async_trait;
use bytes::Bytes;
use genset_backend_common::{EngineError, ModelCard};
use serde::{Deserialize, Serialize};

#[cfg(feature = "etcd")]
pub use etcd::{EtcdConfig, EtcdCredentials, EtcdDiscovery, EtcdIdentity, EtcdTls};
pub use file::{DirectoryAccess, FileDiscovery, FileDiscoveryConfig};
pub use memory::MemoryDiscovery;

use crate::names::{EndpointName, InstanceId};

/// Prefix of every key, with the version of what is stored under it.
const ROOT: &str = "genset/v1/instances/";

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
    /// Everything there is: the first change of a watch, and the first after any gap. What is not in it is gone.
    Snapshot(Vec<Entry>),
    /// An entry is new or has a new value.
    Put(Entry),
    /// An entry is gone.
    Removed(String),
}

/// A store of leased entries.
#[async_trait]
pub trait Discovery: Send + Sync + 'static {
    /// Takes a lease. Entries put under it live as long as it does.
    ///
    /// # Errors
    /// `Unavailable` when the store cannot be reached.
    async fn lease(&self) -> Result<Box<dyn Lease>, EngineError>;

    /// Every entry whose key starts with `prefix`.
    ///
    /// # Errors
    /// `Unavailable` when the store cannot be reached.
    async fn get(&self, prefix: &str) -> Result<Vec<Entry>, EngineError>;

    /// Follows the entries whose keys start with `prefix`. No change is missed or reordered; after a gap comes a snapshot.
    ///
    /// # Errors
    /// `Unavailable` when the store cannot be reached.
    async fn watch(&self, prefix: &str) -> Result<Box<dyn Watch>, EngineError>;
}

/// The right to keep entries in the store. Dropping it removes them, at once where that is possible without waiting.
#[async_trait]
pub trait Lease: Send + Sync + 'static {
    /// Puts an entry, replacing one with the same key.
    ///
    /// # Errors
    /// `Unavailable` when the store cannot be reached or the lease is lost.
    async fn put(&self, entry: Entry) -> Result<(), EngineError>;

    /// Removes an entry; one that is not there is no error.
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
    /// The next change. `None` when the store is gone for good.
    ///
    /// # Cancel safety
    /// If another branch wins, no change was taken.
    async fn next(&mut self) -> Option<Change>;
}

/// Where an instance is reached.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Address {
    /// The request plane, by name.
    pub plane: String,
    /// What that plane needs to find it.
    pub location: String,
}

/// A routable instance, as discovery holds it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InstanceRecord {
    /// What it serves.
    pub endpoint: EndpointName,
    /// Which instance it is.
    pub instance: InstanceId,
    /// Where it is reached.
    pub address: Address,
    /// The model it serves, for endpoints that generate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<ModelCard>,
}

impl InstanceRecord {
    /// The entry to put.
    ///
    /// # Errors
    /// `Internal` when the card holds what JSON cannot.
    pub fn to_entry(&self) -> Result<Entry, EngineError> {
        let value = serde_json::to_vec(self).map_err(|error| {
            EngineError::internal("the model card cannot be written as JSON").with_source(error)
        })?;
        Ok(Entry {
            key: self.key(),
            value: value.into(),
        })
    }

    /// The record in an entry; `None`, with a warning, for one that cannot be read.
    #[must_use]
    pub fn from_entry(entry: &Entry) -> Option<Self> {
        match serde_json::from_slice(&entry.value) {
            Ok(record) => Some(record),
            Err(error) => {
                tracing::warn!(key = entry.key, %error, "an entry in discovery cannot be read; it is left out");
                None
            }
        }
    }

    /// The key it is kept under.
    #[must_use]
    pub fn key(&self) -> String {
        format!("{}{}", prefix_of(&self.endpoint), self.instance)
    }
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

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.plane, self.location)
    }
}
