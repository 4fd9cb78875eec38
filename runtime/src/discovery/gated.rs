//! [`GatedDiscovery`]: a store inside the process whose puts wait until a test opens it.

use std::sync::Arc;

use async_trait::async_trait;
use genset_backend_common::EngineError;
use tokio::sync::Semaphore;

use super::{Discovery, Entry, Lease, MemoryDiscovery, Watch};

/// The store. Clones share state.
#[derive(Clone)]
pub(crate) struct GatedDiscovery {
    inner: MemoryDiscovery,
    /// Open once the semaphore is closed.
    gate: Arc<Semaphore>,
}

impl GatedDiscovery {
    /// An empty store that is not open.
    pub(crate) fn new() -> Self {
        Self {
            inner: MemoryDiscovery::new(),
            gate: Arc::new(Semaphore::new(0)),
        }
    }

    /// Lets every put pass from now on.
    pub(crate) fn open(&self) {
        self.gate.close();
    }
}

#[async_trait]
impl Discovery for GatedDiscovery {
    async fn lease(&self) -> Result<Box<dyn Lease>, EngineError> {
        Ok(Box::new(GatedLease {
            inner: self.inner.lease().await?,
            gate: Arc::clone(&self.gate),
        }))
    }

    async fn get(&self, prefix: &str) -> Result<Vec<Entry>, EngineError> {
        self.inner.get(prefix).await
    }

    async fn watch(&self, prefix: &str) -> Result<Box<dyn Watch>, EngineError> {
        self.inner.watch(prefix).await
    }
}

struct GatedLease {
    inner: Box<dyn Lease>,
    gate: Arc<Semaphore>,
}

#[async_trait]
impl Lease for GatedLease {
    async fn put(&self, entry: Entry) -> Result<(), EngineError> {
        // It has no permits, so this returns when it is closed.
        drop(self.gate.acquire().await);
        self.inner.put(entry).await
    }

    async fn remove(&self, key: &str) -> Result<(), EngineError> {
        self.inner.remove(key).await
    }

    async fn lost(&self) {
        self.inner.lost().await;
    }
}
