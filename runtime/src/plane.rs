//! The request plane: carries a request to an instance and returns its response stream. Endpoints carry any serde type;
//! inside one process nothing is serialized.

mod memory;
#[cfg(all(feature = "cli", feature = "nats"))]
mod mixed;
pub(crate) mod wire;

use std::any::Any;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use futures_core::Stream;
use futures_util::StreamExt;
use genset_backend_common::{EngineError, RequestContext, error::At};
use genset_wire::{PayloadError, decode_payload, encode_payload, encode_short_payload};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use memory::MemoryPlane;
#[cfg(all(feature = "cli", feature = "nats"))]
pub(crate) use mixed::MixedPlane;
pub use wire::{ClientCertificates, TcpConfig, WireConfig, WirePlane, WireSecret, WireTls};
#[cfg(feature = "nats")]
pub use wire::{NatsConfig, NatsCredentials, NatsTls};

use crate::discovery::Address;
use crate::names::{EndpointName, InstanceId};

/// The largest serialized request, in bytes, that is encoded and decoded on an async thread. Larger ones would block that
/// thread for too long; they go to the blocking pool.
const SHORT_BYTES: usize = 64 << 10;

/// The response to one request. Dropping it cancels the request.
pub type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, EngineError>> + Send>>;

/// A type an endpoint can carry: any serde type, or opaque bytes, such as [`Encoded`].
pub trait Payload: Sized + Send + 'static {
    /// Serializes the value as MessagePack.
    ///
    /// # Errors
    /// [`PayloadError::Encode`], for values that MessagePack cannot hold.
    fn to_payload(&self) -> Result<Bytes, PayloadError>;

    /// Like [`Self::to_payload`], but returns `None` if the payload exceeds `most` bytes, since that takes long.
    ///
    /// # Errors
    /// Same as [`Self::to_payload`].
    fn to_short_payload(&self, _most: usize) -> Result<Option<Bytes>, PayloadError> {
        self.to_payload().map(Some)
    }

    /// Deserializes the value in `payload`.
    ///
    /// # Errors
    /// [`PayloadError`] if it is not MessagePack of this type.
    fn from_payload(payload: Bytes) -> Result<Self, PayloadError>;
}

impl<T: Serialize + DeserializeOwned + Send + 'static> Payload for T {
    fn to_payload(&self) -> Result<Bytes, PayloadError> {
        Ok(encode_payload(self)?.into())
    }

    fn to_short_payload(&self, most: usize) -> Result<Option<Bytes>, PayloadError> {
        Ok(encode_short_payload(self, most)?.map(Bytes::from))
    }

    fn from_payload(payload: Bytes) -> Result<Self, PayloadError> {
        decode_payload(&payload)
    }
}

/// Bytes that are sent as they are: MessagePack that is written and read elsewhere, such as by handlers in another language, or
/// data that is none, such as KV blocks.
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

/// Serves one endpoint.
#[async_trait]
pub trait Handler<Req, Resp>: Send + Sync + 'static {
    /// Starts one request.
    ///
    /// # Errors
    /// A typed refusal, before any item.
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
    /// `Unavailable` if the plane cannot serve; `InvalidArgument` if the instance already serves the endpoint.
    async fn serve(
        &self,
        endpoint: &EndpointName,
        instance: InstanceId,
        handler: Arc<ErasedHandler>,
    ) -> Result<Served, EngineError>;

    /// The handler of `endpoint` at `address`, if it is in this process: then nothing is serialized.
    fn local(&self, address: &Address, endpoint: &EndpointName) -> Option<Arc<ErasedHandler>>;

    /// Sends a serialized request to `address`.
    ///
    /// # Errors
    /// `CannotConnect` if the address is unreachable; the reason of the end if the request is cancelled or its deadline passes before
    /// that is known; otherwise the handler's refusal.
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

    /// Hints that the instance at `address` is announced and requests to `endpoint` there are likely, so that the plane can connect
    /// in advance, and forgets that the instance said that it leaves. Never waits, and fails silently: the request that needs the
    /// connection reports the problem.
    fn prepare(&self, _address: &Address, _endpoint: &EndpointName) {}

    /// What says at any time whether the instance at `address` is reachable. Clients keep it as long as the instance is listed, and
    /// ask it for each request.
    fn reachability(&self, _address: &Address) -> Reachability {
        Reachability::always()
    }

    /// Whether the instance at `address` is reachable now, for those who ask once.
    fn is_reachable(&self, address: &Address) -> bool {
        self.reachability(address).is_reachable()
    }

    /// Whether the server through which processes call each other, such as NATS, is connected as far as is known. While it is not,
    /// no process can call this one. Always `true` for a plane that needs no server.
    fn is_connected(&self) -> bool {
        true
    }

    /// Tells the connected processes that an instance takes no new requests: they stop sending it any at once, without
    /// waiting for discovery. Its streams continue. Never waits.
    fn leaving(&self, _instance: InstanceId) {}

    /// Stops the plane: writes responses to their end, within a time limit, then closes connections.
    ///
    /// # Cancel safety
    /// Connections end even if the future is dropped, but writes in progress may be cut off.
    async fn shutdown(&self) {}
}

/// A reachable handler. Dropping it ends the service; requests in progress continue.
pub struct Served {
    /// The address for clients.
    pub address: Address,
    /// Ends the service when dropped.
    pub guard: Box<dyn Any + Send + Sync>,
}

genset_backend_common::debug_as!(|it| Served {
    address: it.address,
    ..
});

/// Says at any time whether one instance is reachable. Each request asks this of every instance, so the answer is one load of an
/// atomic, unless there is a reason to look closer.
pub struct Reachability {
    /// Whether `look` may find the instance unreachable.
    doubt: Arc<AtomicBool>,
    look: Box<dyn Fn() -> bool + Send + Sync>,
}

impl Reachability {
    /// Asks `look` whether the instance is reachable, whenever there is a `doubt`.
    ///
    /// # Examples
    /// ```
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicBool, Ordering};
    ///
    /// use genset_runtime::plane::Reachability;
    ///
    /// let doubt = Arc::new(AtomicBool::new(false));
    /// let reachability = Reachability::new(Arc::clone(&doubt), || false);
    /// assert!(reachability.is_reachable());
    /// doubt.store(true, Ordering::Relaxed);
    /// assert!(!reachability.is_reachable());
    /// ```
    #[must_use]
    pub fn new(doubt: Arc<AtomicBool>, look: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self {
            doubt,
            look: Box::new(look),
        }
    }

    /// The instance is always reachable.
    pub(crate) fn always() -> Self {
        Self::new(Arc::default(), || true)
    }

    /// The instance is never reachable: the plane cannot read its address.
    pub(crate) fn never() -> Self {
        Self::new(Arc::new(AtomicBool::new(true)), || false)
    }

    /// Whether the instance is reachable as far as is known. `false` while no connection to its process can be made, and for a
    /// while after the instance announced that it leaves.
    #[must_use]
    pub fn is_reachable(&self) -> bool {
        !self.doubt.load(Ordering::Relaxed) || (self.look)()
    }
}

genset_backend_common::debug_as!(|it| Reachability {
    doubt: it.doubt,
    ..
});

/// Sends a typed request to `address`: directly if the handler is in this process and has these types, otherwise
/// serialized.
///
/// # Errors
/// Same as [`RequestPlane::call`]; `InvalidArgument` if the request cannot be serialized.
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

/// Like [`call`], but over the plane even if the handler is in this process: the path of other processes.
///
/// # Errors
/// Same as [`call`].
///
/// # Cancel safety
/// Same as [`call`].
pub async fn call_over<Req: Payload, Resp: Payload>(
    plane: &dyn RequestPlane,
    address: &Address,
    endpoint: &EndpointName,
    request: Req,
    ctx: RequestContext,
) -> Result<ResponseStream<Resp>, EngineError> {
    let body = written(request).await?.map_err(|error| {
        EngineError::invalid_argument(At::other("request"), "cannot be serialized")
            .with_source(error)
    })?;
    let items = plane.call(address, endpoint, body, ctx).await?;
    Ok(Box::pin(items.map(|item| {
        Resp::from_payload(item?).map_err(|error| {
            let message = format!(
                "a response item has another type than this client expects: {}",
                error.detail()
            );
            EngineError::internal(message).with_source(error)
        })
    })))
}

/// Serializes a request, on the blocking pool if it is large.
async fn written<T: Payload>(request: T) -> Result<Result<Bytes, PayloadError>, EngineError> {
    let short = request.to_short_payload(SHORT_BYTES).transpose();
    match short {
        Some(written) => Ok(written),
        None => apart(move || request.to_payload()).await,
    }
}

/// Deserializes a request, on the blocking pool if it is large.
async fn read<T: Payload>(body: Bytes) -> Result<Result<T, PayloadError>, EngineError> {
    match body.len() <= SHORT_BYTES {
        true => Ok(T::from_payload(body)),
        false => apart(move || T::from_payload(body)).await,
    }
}

/// Runs `work` on the blocking pool.
async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, EngineError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| {
        EngineError::internal("writing or reading the request failed").with_source(error)
    })
}

/// A handler whose types are known only where it was created.
pub struct ErasedHandler {
    typed: Box<dyn Any + Send + Sync>,
    bytes: Arc<dyn Handler<Bytes, Bytes>>,
}

impl ErasedHandler {
    /// Erases the types of `handler`.
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

    /// The handler, if it has these types.
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

genset_backend_common::debug_as!(|_| ErasedHandler { .. });

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
        let request = read::<Req>(body).await?.map_err(|error| {
            let problem = format!("does not fit this endpoint: {}", error.detail());
            EngineError::invalid_argument(At::other("request"), problem).with_source(error)
        })?;
        let items = self.handler.handle(request, ctx).await?;
        Ok(Box::pin(items.map(|item| {
            item?.to_payload().map_err(|error| {
                EngineError::internal("a response item cannot be serialized").with_source(error)
            })
        })))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    /// Bytes; once serialized or deserialized, the id of the thread that did so.
    #[derive(Debug)]
    struct Traced(Bytes);

    fn this_thread() -> Bytes {
        format!("{:?}", std::thread::current().id()).into()
    }

    impl Payload for Traced {
        fn to_payload(&self) -> Result<Bytes, PayloadError> {
            Ok(this_thread())
        }

        fn to_short_payload(&self, most: usize) -> Result<Option<Bytes>, PayloadError> {
            let is_short = self.0.len() <= most;
            is_short.then(|| self.to_payload()).transpose()
        }

        fn from_payload(_payload: Bytes) -> Result<Self, PayloadError> {
            Ok(Self(this_thread()))
        }
    }

    /// Sends the request back.
    struct Echo;

    #[async_trait]
    impl Handler<Traced, Encoded> for Echo {
        async fn handle(
            &self,
            request: Traced,
            _ctx: RequestContext,
        ) -> Result<ResponseStream<Encoded>, EngineError> {
            Ok(Box::pin(stream::iter([Ok(Encoded(request.0))])))
        }
    }

    #[tokio::test]
    async fn long_requests_are_written_and_read_off_the_async_threads() {
        let handler = ErasedHandler::new::<Traced, Encoded>(Arc::new(Echo));
        for (bytes, is_here) in [(SHORT_BYTES, true), (SHORT_BYTES + 1, false)] {
            let body = Bytes::from(vec![0; bytes]);
            let writer = written(Traced(body.clone())).await.unwrap().unwrap();
            assert_eq!(writer == this_thread(), is_here);
            let ctx = RequestContext::new("");
            let mut items = handler.bytes().handle(body, ctx).await.unwrap();
            let reader = items.next().await.unwrap().unwrap();
            assert_eq!(reader == this_thread(), is_here);
        }
    }

    #[test]
    fn a_payload_is_short_up_to_its_limit() {
        let value = "a".repeat(1000);
        let whole = value.to_payload().unwrap();
        let short = |most| value.to_short_payload(most).unwrap();
        assert_eq!(short(whole.len()), Some(whole.clone()));
        assert_eq!(short(whole.len() - 1), None);
    }
}
