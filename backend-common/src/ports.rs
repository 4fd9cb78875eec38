//! The ports: what the Worker needs from whatever carries requests to it. `genset-runtime` implements them; a test
//! implements them in a few lines.

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

/// Anything that answers a request with tokens: a Worker, a client of many instances, a router. They stack.
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

/// Anything that answers administrative requests.
#[async_trait]
pub trait Control: Send + Sync + 'static {
    /// Performs one administrative request.
    ///
    /// # Errors
    /// `Unsupported` when the engine lacks the ability, else what the engine returns.
    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError>;
}

/// What a Worker offers to the world.
#[derive(Clone)]
pub struct Offer {
    /// The instance's id, below 2^53.
    pub worker_id: u64,
    /// What it serves.
    pub card: ModelCard,
    /// The files the card names.
    pub artifacts: Vec<Artifact>,
    /// Answers requests.
    pub generate: Arc<dyn Generate>,
    /// Answers administrative requests.
    pub control: Arc<dyn Control>,
    /// The changes of the engine's prefix cache.
    pub kv_events: KvEventPublisher,
    /// How KV blocks get to and from other workers; for the registrar to connect.
    pub kv_transfers: KvTransfers,
    /// How busy the engine is.
    pub load: LoadPublisher,
    /// How many requests were let to it, and wait for that.
    pub admitted: watch::Receiver<Admitted>,
    /// What its last requests were like.
    pub recent: RecentRequests,
    /// The adapters that the engine has at the moment, by name.
    pub adapters: watch::Receiver<Vec<Adapter>>,
}

impl std::fmt::Debug for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offer")
            .field("worker_id", &self.worker_id)
            .field("card", &self.card)
            .finish_non_exhaustive()
    }
}

/// Carries requests to Workers: the door to request plane and discovery.
#[async_trait]
pub trait Registrar: Send + Sync + 'static {
    /// Makes the offer reachable by its id, but lists it nowhere yet.
    ///
    /// # Errors
    /// `Unavailable` when the request plane cannot be served on.
    async fn serve(&self, offer: Offer) -> Result<Box<dyn Registration>, EngineError>;
}

/// An offer that is reachable; listed or not. Dropping it takes it down.
#[async_trait]
pub trait Registration: Send + Sync + 'static {
    /// Sends a request to this instance on the path clients use.
    ///
    /// # Errors
    /// As any client's.
    async fn probe(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError>;

    /// Lists the instance in discovery, so that clients route to it. Listing a listed one refreshes it.
    ///
    /// # Errors
    /// `Unavailable` when discovery cannot be reached.
    async fn list(&self) -> Result<(), EngineError>;

    /// Takes the instance off the list. It stays reachable for the requests under way.
    ///
    /// # Errors
    /// `Unavailable` when discovery cannot be reached.
    async fn unlist(&self) -> Result<(), EngineError>;

    /// Waits until discovery has lost the instance although it was listed.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    async fn lost(&self);

    /// Ends the service: nothing reaches the instance any more.
    async fn close(&self);
}
