//! The ports: what the Worker needs from the transport of requests. `genset-runtime` implements them; a test needs only a few
//! lines to do so.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::card::{Artifact, ModelCard};
use crate::context::RequestContext;
use crate::controls::{Adapter, ControlReply, ControlRequest};
use crate::error::EngineError;
use crate::handles::{Admitted, LoadPublisher};
use crate::kv::KvEventPublisher;
use crate::output::OutputStream;
use crate::recent::RecentRequests;
use crate::request::GenerateRequest;
use crate::transfer::KvTransfers;

/// Anything that answers a request with tokens: a Worker, a client of many instances, a router. Implementations stack.
#[async_trait]
pub trait Generate: Send + Sync + 'static {
    /// Starts one request.
    ///
    /// # Errors
    /// A typed refusal before any token.
    ///
    /// # Cancel safety
    /// Dropping the future, or the stream it returns, cancels the request.
    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError>;
}

/// Anything that serves administrative requests.
#[async_trait]
pub trait Control: Send + Sync + 'static {
    /// Performs one administrative request.
    ///
    /// # Errors
    /// `Unsupported` when the engine lacks the operation, else the engine's error.
    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError>;
}

/// What a Worker offers to clients.
#[derive(Clone)]
pub struct Offer {
    /// The instance's id, below 2^53.
    pub worker_id: u64,
    /// The model it serves.
    pub card: ModelCard,
    /// The files that the card names.
    pub artifacts: Vec<Artifact>,
    /// Serves requests.
    pub generate: Arc<dyn Generate>,
    /// Serves administrative requests.
    pub control: Arc<dyn Control>,
    /// The changes of the engine's prefix cache.
    pub kv_events: KvEventPublisher,
    /// Transfers KV blocks to and from other workers; the registrar connects it.
    pub kv_transfers: KvTransfers,
    /// The engine's load.
    pub load: LoadPublisher,
    /// The number of requests admitted to the engine or waiting for admission.
    pub admitted: watch::Receiver<Admitted>,
    /// Statistics of its recent requests.
    pub recent: RecentRequests,
    /// The adapters currently loaded, by name.
    pub adapters: watch::Receiver<Vec<Adapter>>,
}

crate::debug_as!(|it| Offer {
    worker_id: it.worker_id,
    card: it.card,
    ..
});

/// Connects Workers to the request plane and to discovery.
#[async_trait]
pub trait Registrar: Send + Sync + 'static {
    /// Makes the offer reachable by its id, without listing it.
    ///
    /// # Errors
    /// `Unavailable` when the request plane cannot serve it.
    async fn serve(&self, offer: Offer) -> Result<Box<dyn Registration>, EngineError>;
}

/// A reachable offer, listed or not. Dropping it ends the service.
#[async_trait]
pub trait Registration: Send + Sync + 'static {
    /// Sends a request to this instance on the path clients use.
    ///
    /// # Errors
    /// The same errors as for any client.
    async fn probe(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError>;

    /// Lists the instance in discovery, so that clients route to it. Listing it again refreshes the entry.
    ///
    /// # Errors
    /// `Unavailable` when discovery cannot be reached.
    async fn list(&self) -> Result<(), EngineError>;

    /// Unlists the instance. It stays reachable for running requests.
    ///
    /// # Errors
    /// `Unavailable` when discovery cannot be reached.
    async fn unlist(&self) -> Result<(), EngineError>;

    /// Waits until discovery has lost a listed instance.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    async fn lost(&self);

    /// Ends the service: the instance is no longer reachable.
    async fn close(&self);
}
