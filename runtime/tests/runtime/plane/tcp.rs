//! The behaviour suite on TCP.

use std::sync::Arc;

use async_trait::async_trait;
use genset_backend_common::MetricsRegistry;
use genset_runtime::discovery::Address;
use genset_runtime::plane::{RequestPlane, TcpConfig, WireConfig, WirePlane, WireTls};

use super::suite::{PlaneKind, plane_suite};

plane_suite!(tcp, OverTcp(|| None));

/// Planes over TCP, each with what this gives it for TLS.
pub(super) struct OverTcp<F: Fn() -> Option<WireTls>>(pub(super) F);

#[async_trait]
impl<F: Fn() -> Option<WireTls> + Send + Sync> PlaneKind for OverTcp<F> {
    async fn plane(&self, config: WireConfig, metrics: &MetricsRegistry) -> Arc<dyn RequestPlane> {
        let tcp = TcpConfig {
            tls: (self.0)(),
            ..TcpConfig::default()
        };
        Arc::new(WirePlane::tcp(tcp, config, metrics).unwrap())
    }

    async fn plane_at(
        &self,
        address: &Address,
        config: WireConfig,
    ) -> Option<Arc<dyn RequestPlane>> {
        let tcp = TcpConfig {
            listen: process(address).parse().unwrap(),
            tls: (self.0)(),
            ..TcpConfig::default()
        };
        let plane = WirePlane::tcp(tcp, config, &MetricsRegistry::default());
        Some(Arc::new(plane.unwrap()))
    }
}

/// The host and port in an address.
pub(super) fn process(address: &Address) -> &str {
    address.location.rsplit_once('/').unwrap().0
}
