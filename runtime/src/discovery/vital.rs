//! [`VitalDiscovery`]: wraps another discovery and runs each operation on the [`VitalRuntime`]. Connections and
//! keep-alives that an operation starts live there, so that a busy process keeps its leases.

use std::sync::Arc;

use async_trait::async_trait;
use genset_backend_common::EngineError;
use genset_backend_common::prometheus::metrics::gauge::Gauge;

use super::{Discovery, Entry, Lease, Watch};
use crate::vital::VitalRuntime;

/// Discovery on the runtime of links and health. Clones share state.
#[derive(Clone)]
pub struct VitalDiscovery {
    inner: Arc<dyn Discovery>,
    vital: VitalRuntime,
}

impl VitalDiscovery {
    /// Runs the operations of `inner` on `vital`.
    #[must_use]
    pub fn new(inner: Arc<dyn Discovery>, vital: VitalRuntime) -> Self {
        Self { inner, vital }
    }
}

genset_backend_common::debug_as!(|_| VitalDiscovery { .. });

#[async_trait]
impl Discovery for VitalDiscovery {
    async fn lease(&self) -> Result<Box<dyn Lease>, EngineError> {
        let inner = Arc::clone(&self.inner);
        let lease = self.vital.run(async move { inner.lease().await }).await?;
        Ok(Box::new(VitalLease {
            inner: Arc::from(lease),
            vital: self.vital.clone(),
        }))
    }

    async fn get(&self, prefix: &str) -> Result<Vec<Entry>, EngineError> {
        let (inner, prefix) = (Arc::clone(&self.inner), prefix.to_owned());
        self.vital
            .run(async move { inner.get(&prefix).await })
            .await
    }

    async fn watch(&self, prefix: &str) -> Result<Box<dyn Watch>, EngineError> {
        let (inner, prefix) = (Arc::clone(&self.inner), prefix.to_owned());
        self.vital
            .run(async move { inner.watch(&prefix).await })
            .await
    }

    fn outages(&self) -> Gauge {
        self.inner.outages()
    }
}

struct VitalLease {
    inner: Arc<dyn Lease>,
    vital: VitalRuntime,
}

#[async_trait]
impl Lease for VitalLease {
    async fn put(&self, entry: Entry) -> Result<(), EngineError> {
        let inner = Arc::clone(&self.inner);
        self.vital.run(async move { inner.put(entry).await }).await
    }

    async fn remove(&self, key: &str) -> Result<(), EngineError> {
        let (inner, key) = (Arc::clone(&self.inner), key.to_owned());
        self.vital
            .run(async move { inner.remove(&key).await })
            .await
    }

    async fn lost(&self) {
        self.inner.lost().await;
    }
}
