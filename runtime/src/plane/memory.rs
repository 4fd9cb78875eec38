//! The request plane inside one process.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use genset_backend_common::{EngineError, ErrorKind, RequestContext, error::At};
use parking_lot::RwLock;

use super::{ErasedHandler, RequestPlane, ResponseStream, Served};
use crate::discovery::Address;
use crate::names::{EndpointName, InstanceId};

/// The plane's name in addresses.
const NAME: &str = "memory";

type Handlers = Arc<RwLock<HashMap<String, Arc<ErasedHandler>>>>;

/// A request plane inside the process: a call is a function call. Clones share state.
#[derive(Debug, Clone, Default)]
pub struct MemoryPlane {
    handlers: Handlers,
}

impl MemoryPlane {
    /// A plane without handlers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn find(&self, address: &Address) -> Option<Arc<ErasedHandler>> {
        if address.plane != NAME {
            return None;
        }
        self.handlers.read().get(&address.location).cloned()
    }
}

#[async_trait]
impl RequestPlane for MemoryPlane {
    async fn serve(
        &self,
        endpoint: &EndpointName,
        instance: InstanceId,
        handler: Arc<ErasedHandler>,
    ) -> Result<Served, EngineError> {
        let location = format!("{endpoint}/{instance}");
        let mut handlers = self.handlers.write();
        if handlers.contains_key(&location) {
            return Err(EngineError::invalid_argument(
                At::other("endpoint"),
                format!("{location} is served already"),
            ));
        }
        handlers.insert(location.clone(), handler);
        let guard = Guard {
            handlers: Arc::clone(&self.handlers),
            location: location.clone(),
        };
        Ok(Served {
            address: Address {
                plane: NAME.into(),
                location,
            },
            guard: Box::new(guard),
        })
    }

    fn local(&self, address: &Address, _endpoint: &EndpointName) -> Option<Arc<ErasedHandler>> {
        self.find(address)
    }

    async fn call(
        &self,
        address: &Address,
        _endpoint: &EndpointName,
        body: Bytes,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Bytes>, EngineError> {
        match self.find(address) {
            Some(handler) => handler.bytes().handle(body, ctx).await,
            None => Err(EngineError::new(
                ErrorKind::CannotConnect,
                format!("nobody serves {address}"),
            )),
        }
    }
}

struct Guard {
    handlers: Handlers,
    location: String,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let handler = self.handlers.write().remove(&self.location);
        // Without the lock: it may own what takes it, such as another endpoint.
        drop(handler);
    }
}
