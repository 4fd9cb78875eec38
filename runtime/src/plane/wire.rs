//! The request plane between processes: the wire protocol of `docs/wire-protocol.md` over TCP, or over any other transport of
//! bytes.
//!
//! One connection joins two processes and carries all their streams. The caller dials it at the first request and
//! keeps it. When it breaks, its streams end at once with `Disconnected`, and the caller redials it with pauses, so that
//! [`RequestPlane::reachability`] can tell clients to skip the process.
//!
//! The [`VitalRuntime`] accepts, dials and monitors connections, so that a peer hears from this process however busy it
//! is. Frames are read and written on the runtime that created the plane, so a token costs no hop between threads.
//! Handlers run on the runtime that served their endpoint, and responses on the one that reads them.

mod callee;
mod caller;
mod config;
mod control;
mod cost;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod handshake;
mod link;
mod metrics;
#[cfg(feature = "nats")]
mod nats;
mod peers;
mod server;
mod tcp;
mod tls;
mod traffic;
mod transport;

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use genset_backend_common::{EngineError, ErrorKind, MetricsRegistry, RequestContext};
use genset_wire::Memory;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use config::{WireConfig, WireSecret};
#[cfg(feature = "nats")]
pub use nats::{NatsConfig, NatsCredentials, NatsTls};
pub use tcp::TcpConfig;
#[cfg(feature = "cli")]
pub(crate) use tcp::own_address;
pub use tls::{ClientCertificates, WireTls};

use self::control::ControlRight;
use self::handshake::Greeted;
use self::link::Link;
use self::metrics::WireMetrics;
use self::peers::Peers;
use self::server::Server;
use self::transport::{Io, Transport};
use super::{ErasedHandler, Reachability, RequestPlane, ResponseStream, Served};
use crate::component::until_ended;
use crate::discovery::Address;
use crate::names::{EndpointName, InstanceId};
use crate::vital::VitalRuntime;

/// A request plane that speaks the wire protocol. Clones share state.
#[derive(Clone)]
pub struct WirePlane {
    shared: Arc<Shared>,
}

struct Shared {
    common: Common,
    server: Arc<Server>,
    peers: Arc<Peers>,
}

/// State of both halves of a plane. Clones share state.
#[derive(Clone)]
struct Common {
    transport: Arc<dyn Transport>,
    config: Arc<WireConfig>,
    metrics: WireMetrics,
    tasks: TaskTracker,
    shutdown: CancellationToken,
    vital: VitalRuntime,
    /// The runtime that reads and writes frames.
    main: Handle,
    memory: Arc<Memory>,
}

impl Common {
    /// Builds the link of a greeted connection, and this end's control right.
    fn link(&self, io: &Io, greeted: &Greeted) -> (Arc<Link>, ControlRight) {
        let link = Link::new(
            &self.config,
            &self.memory,
            io.peer.clone(),
            greeted.hello.max_frame_bytes,
        );
        let control = ControlRight {
            secret: self.config.control_secret.clone(),
            nonces: greeted.nonces.clone(),
            is_local: self.transport.is_local(),
        };
        (Arc::new(link), control)
    }
}

/// The runtime that creates the plane; outside of one, the runtime of links.
fn main_runtime(vital: &VitalRuntime) -> Handle {
    Handle::try_current().unwrap_or_else(|_| vital.handle().clone())
}

impl WirePlane {
    /// Creates a plane over TCP with its own thread for links. It starts to listen when it first serves an endpoint.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the invalid setting.
    pub fn tcp(
        tcp: TcpConfig,
        config: WireConfig,
        metrics: &MetricsRegistry,
    ) -> Result<Self, EngineError> {
        Self::tcp_on(VitalRuntime::start()?, tcp, config, metrics)
    }

    /// Like [`Self::tcp`], with its links on `vital`.
    ///
    /// # Errors
    /// Same as [`Self::tcp`].
    pub fn tcp_on(
        vital: VitalRuntime,
        tcp: TcpConfig,
        config: WireConfig,
        metrics: &MetricsRegistry,
    ) -> Result<Self, EngineError> {
        let transport = tcp::Tcp::try_new(tcp, &config, main_runtime(&vital))?;
        Self::new(vital, Arc::new(transport), config, metrics)
    }

    /// Creates a plane over NATS: no process needs an inbound port. It connects to NATS when it first serves or calls. Serving
    /// fails with `Unavailable` if no server can be reached.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the invalid setting.
    #[cfg(feature = "nats")]
    pub fn nats(
        nats: NatsConfig,
        config: WireConfig,
        metrics: &MetricsRegistry,
    ) -> Result<Self, EngineError> {
        Self::nats_on(VitalRuntime::start()?, nats, config, metrics)
    }

    /// Like [`Self::nats`], with its links on `vital`.
    ///
    /// # Errors
    /// Same as [`Self::nats`].
    #[cfg(feature = "nats")]
    pub fn nats_on(
        vital: VitalRuntime,
        nats: NatsConfig,
        config: WireConfig,
        metrics: &MetricsRegistry,
    ) -> Result<Self, EngineError> {
        let transport = nats::Nats::try_new(nats, &config)?;
        Self::new(vital, Arc::new(transport), config, metrics)
    }

    fn new(
        vital: VitalRuntime,
        transport: Arc<dyn Transport>,
        config: WireConfig,
        metrics: &MetricsRegistry,
    ) -> Result<Self, EngineError> {
        config.validate()?;
        let metrics = WireMetrics::new(metrics);
        let common = Common {
            transport,
            memory: Memory::of_process(config.max_memory_bytes, metrics.memory()),
            config: Arc::new(config),
            metrics,
            tasks: TaskTracker::new(),
            shutdown: CancellationToken::new(),
            main: main_runtime(&vital),
            vital,
        };
        Ok(Self {
            shared: Arc::new(Shared {
                server: Arc::new(Server::new(common.clone())),
                peers: Arc::new(Peers::new(common.clone())),
                common,
            }),
        })
    }

    /// The process and the instance in an address of this plane.
    fn parse<'a>(&self, address: &'a Address) -> Result<(&'a str, InstanceId), EngineError> {
        let cannot = |problem: String| Err(EngineError::new(ErrorKind::CannotConnect, problem));
        let name = self.shared.common.transport.name();
        if address.plane != name {
            return cannot(format!(
                "{address} is on the request plane {:?} and this process is on {name:?}; start both with the same --request-plane",
                address.plane
            ));
        }
        let parts = address.location.rsplit_once('/');
        let parsed =
            parts.and_then(|(process, id)| Some((process, u64::from_str_radix(id, 16).ok()?)));
        match parsed {
            Some((process, id)) => Ok((process, InstanceId(id))),
            None => cannot(format!(
                "{address} is no address of a process and an instance"
            )),
        }
    }
}

genset_backend_common::debug_as!(|it| WirePlane {
    name: it.shared.common.transport.name(),
    ..
});

#[async_trait]
impl RequestPlane for WirePlane {
    async fn serve(
        &self,
        endpoint: &EndpointName,
        instance: InstanceId,
        handler: Arc<ErasedHandler>,
    ) -> Result<Served, EngineError> {
        let location = self.shared.server.location().await?;
        let guard = self.shared.server.add(endpoint, instance, handler)?;
        Ok(Served {
            address: Address {
                plane: self.shared.common.transport.name().into(),
                location: format!("{location}/{instance}"),
            },
            guard: Box::new(guard),
        })
    }

    fn local(&self, address: &Address, endpoint: &EndpointName) -> Option<Arc<ErasedHandler>> {
        let (process, instance) = self.parse(address).ok()?;
        self.shared.server.local(process, instance, endpoint)
    }

    async fn call(
        &self,
        address: &Address,
        endpoint: &EndpointName,
        body: Bytes,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Bytes>, EngineError> {
        let of_request = |error: EngineError| error.or_request_id(ctx.id());
        let (process, instance) = self.parse(address).map_err(of_request)?;
        let caller = tokio::select! {
            biased;
            caller = self.shared.peers.caller(process) => caller,
            error = ctx.over() => Err(error),
        };
        let caller = caller.map_err(of_request)?;
        caller.call(endpoint, instance, body, ctx).await
    }

    fn prepare(&self, address: &Address, endpoint: &EndpointName) {
        if self.local(address, endpoint).is_some() {
            return;
        }
        if let Ok((process, instance)) = self.parse(address) {
            self.shared.peers.prepare(process, instance);
        }
    }

    fn reachability(&self, address: &Address) -> Reachability {
        match self.parse(address) {
            Ok((process, instance)) => self.shared.peers.reachability(process, instance),
            Err(_) => Reachability::never(),
        }
    }

    fn is_connected(&self) -> bool {
        self.shared.common.transport.is_connected()
    }

    fn leaving(&self, instance: InstanceId) {
        self.shared.server.leaving(instance);
    }

    async fn shutdown(&self) {
        self.shared.server.finish().await;
        self.shared.common.shutdown.cancel();
        until_ended(&self.shared.common.tasks, "request plane").await;
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.common.shutdown.cancel();
    }
}
