//! The request plane: carries a request to an instance and its response stream back. Endpoints carry any serde type;
//! inside one process nothing is serialized.

mod memory;
#[cfg(all(feature = "cli", feature = "nats"))]
mod mixed;
pub(crate) mod wire;

use std::any::Any;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures_core::Stream;
use futures_util::StreamExt;
use genset_backend_common::{EngineError, RequestContext, error::At};
use genset_wire::{PayloadError, decode_payload, encode_payload};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use memory::MemoryPlane;
#[cfg(all(feature = "cli", feature = "nats"))]
pub(crate) use mixed::MixedPlane;
pub use wire::{
    ClientCertificates, TcpConfig, WireConfig, WireIdentity, WirePlane, WireSecret, WireTls,
};
#[cfg(feature = "nats")]
pub use wire::{NatsConfig, NatsCredentials, NatsIdentity, NatsTls};

use crate::discovery::Address;
use crate::names::{EndpointName, InstanceId};

/// The response to one request. Dropping it cancels the request.
pub type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, EngineError>> + Send>>;

/// A type an endpoint can carry: any serde type, or bytes that nobody looks into, such as [`Encoded`].
pub trait Payload: Sized + Send + 'static {
    /// The value as MessagePack.
    ///
    /// # Errors
    /// [`PayloadError::Encode`], for values that MessagePack cannot hold.
    fn to_payload(&self) -> Result<Bytes, PayloadError>;

    /// The value in `payload`.
    ///
    /// # Errors
    /// [`PayloadError`] when that is not MessagePack of this type.
    fn from_payload(payload: Bytes) -> Result<Self, PayloadError>;
}

impl<T: Serialize + DeserializeOwned + Send + 'static> Payload for T {
    fn to_payload(&self) -> Result<Bytes, PayloadError> {
        Ok(encode_payload(self)?.into())
    }

    fn from_payload(payload: Bytes) -> Result<Self, PayloadError> {
        decode_payload(&payload)
    }
}

/// MessagePack as it travels, for whoever reads and writes it elsewhere, such as handlers in another language. It is not looked
/// into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded(pub Bytes);

impl Payload for Encoded {
    fn to_payload(&self) -> Result<Bytes, PayloadError> {
        Ok(self.0.clone())
    }

    fn from_payload(payload: Bytes) -> Result<Self, PayloadError> {
        Ok(Self(payload))
    }
}

/// Bytes that travel as they are and are no MessagePack: so many that a copy of them counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Raw(pub(crate) Bytes);

impl Payload for Raw {
    fn to_payload(&self) -> Result<Bytes, PayloadError> {
        Ok(self.0.clone())
    }

    fn from_payload(payload: Bytes) -> Result<Self, PayloadError> {
        Ok(Self(payload))
    }
}

/// Serves one endpoint.
#[async_trait]
pub trait Handler<Req, Resp>: Send + Sync + 'static {
    /// Starts one request.
    ///
    /// # Errors
    /// A typed refusal before any item.
    async fn handle(
        &self,
        request: Req,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Resp>, EngineError>;
}

/// Carries requests to instances.
#[async_trait]
pub trait RequestPlane: Send + Sync + 'static {
    /// Makes `handler` reachable until the returned guard is dropped.
    ///
    /// # Errors
    /// `Unavailable` when the plane cannot be served on; `InvalidArgument` when the instance serves the endpoint already.
    async fn serve(
        &self,
        endpoint: &EndpointName,
        instance: InstanceId,
        handler: Arc<ErasedHandler>,
    ) -> Result<Served, EngineError>;

    /// The handler of `endpoint` at `address`, when it lives in this process: then nothing is serialized.
    fn local(&self, address: &Address, endpoint: &EndpointName) -> Option<Arc<ErasedHandler>>;

    /// Sends a serialized request to `address`.
    ///
    /// # Errors
    /// `CannotConnect` when nobody is there, else what the handler refuses with.
    ///
    /// # Cancel safety
    /// Dropping the future or the stream cancels the request.
    async fn call(
        &self,
        address: &Address,
        endpoint: &EndpointName,
        body: Bytes,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Bytes>, EngineError>;

    /// Says that requests to `endpoint` at `address` are likely: a connection made now is not waited for later. Never waits,
    /// and fails silently: the request that needs the connection says what is wrong.
    fn prepare(&self, _address: &Address, _endpoint: &EndpointName) {}

    /// Whether the instance at `address` is not known to be gone or to leave: `false` from the moment a connection to its process
    /// broke until that was reached again, and for a while after the instance said that it leaves.
    fn is_reachable(&self, _address: &Address) -> bool {
        true
    }

    /// Tells the processes connected with this one that an instance takes no new requests: they send it none from now on, and
    /// need not wait for discovery to say so. Its streams go on. Never waits.
    fn leaving(&self, _instance: InstanceId) {}

    /// Ends what the plane runs: responses are written to their end, within a limit, then connections close.
    ///
    /// # Cancel safety
    /// Connections end also when the future is dropped, with less care for what was being written.
    async fn shutdown(&self) {}
}

/// A handler that is reachable. Dropping it ends that; requests under way go on.
pub struct Served {
    /// Where clients find it.
    pub address: Address,
    /// Ends the service when dropped.
    pub guard: Box<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for Served {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Served")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// Sends a typed request to `address`: directly when the handler lives in this process and has these types, serialized
/// otherwise.
///
/// # Errors
/// As [`RequestPlane::call`]; `InvalidArgument` when the request cannot be serialized.
///
/// # Cancel safety
/// Dropping the future or the stream cancels the request.
pub async fn call<Req: Payload, Resp: Payload>(
    plane: &dyn RequestPlane,
    address: &Address,
    endpoint: &EndpointName,
    request: Req,
    ctx: RequestContext,
) -> Result<ResponseStream<Resp>, EngineError> {
    if let Some(handler) = plane.local(address, endpoint)
        && let Some(typed) = handler.typed::<Req, Resp>()
    {
        return typed.handle(request, ctx).await;
    }
    call_over(plane, address, endpoint, request, ctx).await
}

/// As [`call`], over the plane also when the handler lives in this process: the path other processes use.
///
/// # Errors
/// As [`call`].
///
/// # Cancel safety
/// As [`call`].
pub async fn call_over<Req: Payload, Resp: Payload>(
    plane: &dyn RequestPlane,
    address: &Address,
    endpoint: &EndpointName,
    request: Req,
    ctx: RequestContext,
) -> Result<ResponseStream<Resp>, EngineError> {
    let body = request.to_payload().map_err(|error| {
        EngineError::invalid_argument(At::other("request"), "cannot be serialized")
            .with_source(error)
    })?;
    let items = plane.call(address, endpoint, body, ctx).await?;
    Ok(Box::pin(items.map(|item| {
        Resp::from_payload(item?).map_err(|error| {
            EngineError::internal("a response item has another type than this client expects")
                .with_source(error)
        })
    })))
}

/// A handler whose types are known only where it was made.
pub struct ErasedHandler {
    typed: Box<dyn Any + Send + Sync>,
    bytes: Arc<dyn Handler<Bytes, Bytes>>,
}

impl ErasedHandler {
    /// Hides the types of `handler`.
    #[must_use]
    pub fn new<Req: Payload, Resp: Payload>(handler: Arc<dyn Handler<Req, Resp>>) -> Self {
        let bytes = Serialized {
            handler: Arc::clone(&handler),
            types: PhantomData,
        };
        Self {
            typed: Box::new(handler),
            bytes: Arc::new(bytes),
        }
    }

    /// The handler, if its types are these.
    #[must_use]
    pub fn typed<Req: Payload, Resp: Payload>(&self) -> Option<&Arc<dyn Handler<Req, Resp>>> {
        self.typed.downcast_ref()
    }

    /// The handler for serialized requests.
    #[must_use]
    pub fn bytes(&self) -> &Arc<dyn Handler<Bytes, Bytes>> {
        &self.bytes
    }
}

impl std::fmt::Debug for ErasedHandler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ErasedHandler").finish_non_exhaustive()
    }
}

struct Serialized<Req, Resp> {
    handler: Arc<dyn Handler<Req, Resp>>,
    types: PhantomData<fn(Req) -> Resp>,
}

#[async_trait]
impl<Req: Payload, Resp: Payload> Handler<Bytes, Bytes> for Serialized<Req, Resp> {
    async fn handle(
        &self,
        body: Bytes,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Bytes>, EngineError> {
        let request = Req::from_payload(body).map_err(|error| {
            EngineError::invalid_argument(At::other("request"), "is not what this endpoint takes")
                .with_source(error)
        })?;
        let items = self.handler.handle(request, ctx).await?;
        Ok(Box::pin(items.map(|item| {
            item?.to_payload().map_err(|error| {
                EngineError::internal("a response item cannot be serialized").with_source(error)
            })
        })))
    }
}
