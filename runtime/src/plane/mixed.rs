//! [`MixedPlane`]: serves on NATS, and also calls workers over TCP. [`NetworkArgs`](crate::NetworkArgs) builds one if NATS servers
//! are named and no flag sets the request plane: other processes may then serve on TCP.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use genset_backend_common::{EngineError, MetricsRegistry, RequestContext};

use super::{ErasedHandler, Reachability, RequestPlane, ResponseStream, Served};
use crate::discovery::Address;
use crate::names::{EndpointName, InstanceId};

/// Two planes: each call uses the one named in its address.
pub(crate) struct MixedPlane {
    /// The plane this process serves on.
    pub(crate) own: Arc<dyn RequestPlane>,
    pub(crate) other: Arc<dyn RequestPlane>,
    /// The other's name in addresses.
    pub(crate) other_name: &'static str,
    /// Keeps the other plane's metrics registered.
    pub(crate) _other_metrics: MetricsRegistry,
}

impl MixedPlane {
    fn plane_of(&self, address: &Address) -> &dyn RequestPlane {
        match address.plane == self.other_name {
            true => &*self.other,
            false => &*self.own,
        }
    }
}

#[async_trait]
impl RequestPlane for MixedPlane {
    async fn serve(
        &self,
        endpoint: &EndpointName,
        instance: InstanceId,
        handler: Arc<ErasedHandler>,
    ) -> Result<Served, EngineError> {
        self.own.serve(endpoint, instance, handler).await
    }

    fn local(&self, address: &Address, endpoint: &EndpointName) -> Option<Arc<ErasedHandler>> {
        self.plane_of(address).local(address, endpoint)
    }

    async fn call(
        &self,
        address: &Address,
        endpoint: &EndpointName,
        body: Bytes,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Bytes>, EngineError> {
        let plane = self.plane_of(address);
        plane.call(address, endpoint, body, ctx).await
    }

    fn prepare(&self, address: &Address, endpoint: &EndpointName) {
        self.plane_of(address).prepare(address, endpoint);
    }

    fn reachability(&self, address: &Address) -> Reachability {
        self.plane_of(address).reachability(address)
    }

    fn is_connected(&self) -> bool {
        self.own.is_connected()
    }

    fn leaving(&self, instance: InstanceId) {
        self.own.leaving(instance);
    }

    async fn shutdown(&self) {
        tokio::join!(self.own.shutdown(), self.other.shutdown());
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Handler, MemoryPlane};
    use super::*;

    struct Nothing;

    #[async_trait]
    impl Handler<u32, u32> for Nothing {
        async fn handle(
            &self,
            _request: u32,
            _ctx: RequestContext,
        ) -> Result<ResponseStream<u32>, EngineError> {
            Ok(Box::pin(futures_util::stream::empty()))
        }
    }

    #[tokio::test]
    async fn a_call_takes_the_plane_that_its_address_names() {
        let endpoint = EndpointName::try_new("a", "b", "c").unwrap();
        let handler: Arc<dyn Handler<u32, u32>> = Arc::new(Nothing);
        let handler = Arc::new(ErasedHandler::new(handler));
        let other = Arc::new(MemoryPlane::new());
        let served = other.serve(&endpoint, InstanceId(1), handler).await;
        let address = served.as_ref().unwrap().address.clone();
        for (other_name, is_found) in [("memory", true), ("tcp", false)] {
            let mixed = MixedPlane {
                own: Arc::new(MemoryPlane::new()),
                other: other.clone(),
                other_name,
                _other_metrics: MetricsRegistry::default(),
            };
            let found = mixed.local(&address, &endpoint);
            assert_eq!(found.is_some(), is_found, "{other_name}");
        }
    }
}
