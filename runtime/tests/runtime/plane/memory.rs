//! The behaviour suite on the plane inside one process.

use std::sync::Arc;

use async_trait::async_trait;
use genset_backend_common::MetricsRegistry;
use genset_runtime::discovery::Address;
use genset_runtime::plane::{MemoryPlane, RequestPlane, WireConfig};

use super::suite::{PlaneKind, plane_suite};

plane_suite!(memory, InMemory(MemoryPlane::new()), one_process);

/// Both ends are the same plane, since there is only one process.
struct InMemory(MemoryPlane);

#[async_trait]
impl PlaneKind for InMemory {
    async fn plane(
        &self,
        _config: WireConfig,
        _metrics: &MetricsRegistry,
    ) -> Arc<dyn RequestPlane> {
        Arc::new(self.0.clone())
    }

    async fn plane_at(
        &self,
        _address: &Address,
        _config: WireConfig,
    ) -> Option<Arc<dyn RequestPlane>> {
        None
    }
}
