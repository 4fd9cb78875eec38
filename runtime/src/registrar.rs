//! The Worker's ports on this runtime: an [`Offer`] becomes instances of a component's endpoints. `generate` is listed with
//! the card, and beside it are `artifacts`, `control`, `kv_events` and `load`.

mod listing;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{Stream, StreamExt, future, stream};
use genset_backend_common::kv::{KvEvent, KvEventPublisher, KvSnapshot};
use genset_backend_common::ports::{Control, Generate, Offer, Registrar, Registration};
use genset_backend_common::{
    EngineError, GenerateRequest, Output, OutputStream, RequestContext,
    card::Artifact,
    controls::{ControlReply, ControlRequest},
    handles::{Admitted, Load, LoadPublisher},
    recent::RecentRequests,
    transfer::{KvAddress, KvTransfers},
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument;

use self::listing::Listing;
use crate::component::{Runtime, Serving};
use crate::controls::perform;
use crate::discovery::{InstanceRecord, Lease};
use crate::kv_blocks::{KvBlocksClient, KvBlocksHandler};
use crate::names::{EndpointName, InstanceId};
use crate::plane::{self, Handler, Payload, ResponseStream};
use crate::telemetry;

/// Bytes of an artifact per item.
const ARTIFACT_CHUNK_BYTES: usize = 256 << 10;

/// The minimum time between two published loads: an engine may publish one with every step.
const LOAD_INTERVAL: Duration = Duration::from_millis(50);

/// The same after new requests: a frontend that does not learn of another's requests would choose the same worker.
const RISE_INTERVAL: Duration = Duration::from_millis(5);

/// The names of the endpoints beside `generate`.
pub mod endpoints {
    /// Files a frontend needs, by hash: [`ArtifactRequest`](super::ArtifactRequest) to chunks of bytes.
    pub const ARTIFACTS: &str = "artifacts";
    /// Administrative requests.
    pub const CONTROL: &str = "control";
    /// KV blocks held for a decode worker: [`KvBlocksRequest`](super::super::KvBlocksRequest) to pieces of bytes. Only prefill
    /// workers serve it, and it is not listed: transfer parameters hold its address.
    pub const KV_BLOCKS: &str = "kv_blocks";
    /// A [`KvItem`](super::KvItem) snapshot, then changes.
    pub const KV_EVENTS: &str = "kv_events";
    /// Like [`KV_EVENTS`], for one data-parallel rank: its number to a [`KvItem`](super::KvItem) snapshot, then changes. Only
    /// workers whose engines publish events per rank have it.
    pub const KV_RANK_EVENTS: &str = "kv_rank_events";
    /// The load, on changes: at the earliest 50 ms after the last one, or 5 ms after it if new requests arrived.
    pub const LOAD: &str = "load";
    /// [`LOAD`] under its Dynamo name.
    pub const LOAD_METRICS: &str = "load_metrics";
}

/// Requests an artifact from a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactRequest {
    /// BLAKE3 hash of the content, as in the card.
    pub blake3: String,
}

/// The stream of the `kv_events` endpoint: one snapshot, then changes. For a cache with very many blocks, the first changes are
/// the [rest](KvSnapshot::in_parts) of the snapshot. The stream ends if changes were missed; call again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvItem {
    /// All reusable blocks.
    Snapshot(KvSnapshot),
    /// One change after it.
    Change(KvEvent),
}

/// Registers Workers under one endpoint name.
#[derive(Debug, Clone)]
pub struct RuntimeRegistrar {
    runtime: Runtime,
    generate: EndpointName,
}

impl RuntimeRegistrar {
    /// Registers under `generate`, with the other endpoints in the same component.
    #[must_use]
    pub fn new(runtime: Runtime, generate: EndpointName) -> Self {
        Self { runtime, generate }
    }

    /// Serves another endpoint of the component.
    async fn serve_beside<Req: Payload, Resp: Payload>(
        &self,
        id: InstanceId,
        endpoint: &str,
        handler: Arc<dyn Handler<Req, Resp>>,
    ) -> Result<Serving, EngineError> {
        let name = self.generate.sibling(endpoint)?;
        self.runtime.endpoint(name).serve_as(id, handler).await
    }

    /// Gives an engine access to others' KV blocks, and others to its own if it holds any.
    async fn serve_kv_blocks(
        &self,
        id: InstanceId,
        transfers: &KvTransfers,
    ) -> Result<Option<Serving>, EngineError> {
        let carrier = Arc::new(KvBlocksClient::new(&self.runtime));
        let Some(source) = transfers.source() else {
            transfers.connect(carrier, None);
            return Ok(None);
        };
        let handler = Arc::new(KvBlocksHandler(source));
        let serving = self.serve_beside(id, endpoints::KV_BLOCKS, handler).await?;
        let record = serving.record(None);
        let address = KvAddress {
            plane: record.address.plane,
            location: record.address.location,
            endpoint: record.endpoint.to_string(),
        };
        transfers.connect(carrier, Some(address));
        Ok(Some(serving))
    }
}

#[async_trait]
impl Registrar for RuntimeRegistrar {
    async fn serve(&self, offer: Offer) -> Result<Box<dyn Registration>, EngineError> {
        let id = InstanceId(offer.worker_id);
        let closed = CancellationToken::new();
        let kv_events = Arc::new(KvEventHandler {
            publisher: offer.kv_events.clone(),
            closed: closed.clone(),
        });
        let load = Arc::new(LoadHandler {
            engine: offer.load,
            admitted: offer.admitted,
            kv_events: offer.kv_events,
            recent: offer.recent,
            closed: closed.clone(),
        });
        let artifacts = Arc::new(ArtifactHandler(offer.artifacts));
        let control = Arc::new(ControlHandler(offer.control));
        let generate = Arc::new(GenerateHandler(offer.generate));
        let endpoint = self.runtime.endpoint(self.generate.clone());
        let serving = endpoint.serve_as(id, generate).await?;
        let mut beside = vec![
            self.serve_beside(id, endpoints::ARTIFACTS, artifacts)
                .await?,
            self.serve_beside(id, endpoints::CONTROL, control).await?,
            self.serve_beside::<(), KvItem>(id, endpoints::KV_EVENTS, kv_events.clone())
                .await?,
            self.serve_beside(id, endpoints::LOAD, load.clone()).await?,
            self.serve_beside(id, endpoints::LOAD_METRICS, load).await?,
        ];
        if offer.card.capabilities.kv_ranks && offer.card.data_parallel_size > 1 {
            let name = endpoints::KV_RANK_EVENTS;
            let ranks = self.serve_beside::<u32, KvItem>(id, name, kv_events);
            beside.push(ranks.await?);
        }
        let kv_blocks = self.serve_kv_blocks(id, &offer.kv_transfers).await?;
        let listing = Arc::new(Listing {
            record: serving.record(None),
            card: offer.card,
            adapters: offer.adapters,
            lease: tokio::sync::Mutex::default(),
            is_old: Notify::new(),
        });
        let served = Mutex::new(Some(Arc::new(ServedOffer {
            generate: serving,
            beside,
            _kv_blocks: kv_blocks,
            _until: closed.drop_guard(),
        })));
        let follow = self.runtime.spawn(Arc::clone(&listing).follow_adapters());
        Ok(Box::new(RuntimeRegistration {
            runtime: self.runtime.clone(),
            served,
            listing,
            _follow: follow,
        }))
    }
}

struct ServedOffer {
    generate: Serving,
    beside: Vec<Serving>,
    /// Served if the engine holds blocks for others.
    _kv_blocks: Option<Serving>,
    /// Ends the endless streams. The last field, so that callers that retry find no service.
    _until: DropGuard,
}

impl ServedOffer {
    /// The records for discovery, given that of `generate`. It comes last: a client that finds the card also finds its artifacts.
    fn records(&self, generate: InstanceRecord) -> Vec<InstanceRecord> {
        let beside = self.beside.iter().map(|serving| serving.record(None));
        beside.chain([generate]).collect()
    }
}

struct RuntimeRegistration {
    runtime: Runtime,
    served: Mutex<Option<Arc<ServedOffer>>>,
    listing: Arc<Listing>,
    _follow: AbortOnDropHandle<()>,
}

impl RuntimeRegistration {
    fn served(&self) -> Result<Arc<ServedOffer>, EngineError> {
        self.served
            .lock()
            .clone()
            .ok_or_else(|| EngineError::engine_shutdown("the service has ended"))
    }
}

#[async_trait]
impl Registration for RuntimeRegistration {
    async fn probe(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let record = self.served()?.generate.record(None);
        let own = &**self.runtime.plane();
        let items = if own.is_connected() {
            // Even within this process, call over the plane as others do: listed means routable.
            plane::call_over(own, &record.address, &record.endpoint, request, ctx).await?
        } else {
            // Nobody can call this process now. The engine is not at fault, and a restart would lose it for nothing.
            plane::call(own, &record.address, &record.endpoint, request, ctx).await?
        };
        Ok(OutputStream::from_raw(items))
    }

    async fn list(&self) -> Result<(), EngineError> {
        let record = self.listing.record();
        let served = self.served()?;
        let records = served.records(record.clone());
        let lease: Arc<dyn Lease> = Arc::from(self.runtime.discovery().lease().await?);
        for record in records {
            lease.put(record.to_entry()?).await?;
        }
        *self.listing.lease.lock().await = Some(lease);
        // While `generate` is listed, another endpoint that is unlisted is not the instance's last one.
        served.generate.remember();
        if self.listing.record() != record {
            self.listing.is_old.notify_one();
        }
        Ok(())
    }

    async fn unlist(&self) -> Result<(), EngineError> {
        let served = self.served()?;
        // Before the discovery call, which may be slow. Another endpoint may be listed under the same id, and stays.
        if served.generate.forget() {
            let instance = served.generate.instance();
            self.runtime.plane().leaving(instance);
        }
        // The card goes first: no client may find a model whose artifacts are gone.
        let records = served.records(self.listing.record());
        self.listing.unlist(&records).await
    }

    async fn lost(&self) {
        let lease = self.listing.lease.lock().await.clone();
        match lease {
            Some(lease) => lease.lost().await,
            None => std::future::pending().await,
        }
    }

    async fn close(&self) {
        drop(self.listing.lease.lock().await.take());
        drop(self.served.lock().take());
    }
}

struct GenerateHandler(Arc<dyn Generate>);

#[async_trait]
impl Handler<GenerateRequest, Output> for GenerateHandler {
    async fn handle(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Output>, EngineError> {
        let span = telemetry::worker_span(&ctx);
        let ctx = telemetry::continue_trace(&span, ctx);
        let answer = self.0.generate(request, ctx).instrument(span.clone()).await;
        match answer {
            Ok(outputs) => Ok(telemetry::traced(Box::pin(outputs), span)),
            Err(error) => {
                telemetry::record_error(&span, &error);
                Err(error)
            }
        }
    }
}

struct ArtifactHandler(Vec<Artifact>);

#[async_trait]
impl Handler<ArtifactRequest, Bytes> for ArtifactHandler {
    async fn handle(
        &self,
        request: ArtifactRequest,
        _ctx: RequestContext,
    ) -> Result<ResponseStream<Bytes>, EngineError> {
        let artifact = self
            .0
            .iter()
            .find(|artifact| artifact.reference.blake3 == request.blake3);
        let content = artifact
            .map(|artifact| Bytes::from_owner(Arc::clone(&artifact.content)))
            .ok_or_else(|| EngineError::not_found("this worker has no artifact of that hash"))?;
        let starts = (0..content.len()).step_by(ARTIFACT_CHUNK_BYTES);
        Ok(Box::pin(stream::iter(starts).map(move |start| {
            let end = content.len().min(start + ARTIFACT_CHUNK_BYTES);
            Ok(content.slice(start..end))
        })))
    }
}

struct ControlHandler(Arc<dyn Control>);

#[async_trait]
impl Handler<ControlRequest, ControlReply> for ControlHandler {
    async fn handle(
        &self,
        request: ControlRequest,
        _ctx: RequestContext,
    ) -> Result<ResponseStream<ControlReply>, EngineError> {
        let reply = perform(&*self.0, request).await?;
        Ok(Box::pin(stream::iter([Ok(reply)])))
    }
}

/// Makes a stream endless: it ends only when its caller cancels or the service ends.
fn endless<T: 'static>(
    items: impl Stream<Item = Result<T, EngineError>> + Send + 'static,
    ctx: &RequestContext,
    closed: &CancellationToken,
) -> ResponseStream<T> {
    let cancelled = Box::pin(ctx.cancelled_owned());
    let over = Box::pin(closed.clone().cancelled_owned());
    Box::pin(items.take_until(future::select(cancelled, over)))
}

struct KvEventHandler {
    publisher: KvEventPublisher,
    closed: CancellationToken,
}

#[async_trait]
impl Handler<(), KvItem> for KvEventHandler {
    async fn handle(
        &self,
        (): (),
        ctx: RequestContext,
    ) -> Result<ResponseStream<KvItem>, EngineError> {
        let items = kv_items(&self.publisher).await?;
        Ok(endless(items, &ctx, &self.closed))
    }
}

#[async_trait]
impl Handler<u32, KvItem> for KvEventHandler {
    async fn handle(
        &self,
        rank: u32,
        ctx: RequestContext,
    ) -> Result<ResponseStream<KvItem>, EngineError> {
        let publisher = self.publisher.known_rank(rank).ok_or_else(|| {
            EngineError::not_found(format!("the engine publishes nothing of rank {rank}"))
        })?;
        let items = kv_items(&publisher).await?;
        Ok(endless(items, &ctx, &self.closed))
    }
}

/// Maximum number of blocks per item: at 31 bytes each they fit twice into a default frame.
const MAX_ITEM_BLOCKS: usize = 256 << 10;

async fn kv_items(publisher: &KvEventPublisher) -> Result<ResponseStream<KvItem>, EngineError> {
    let mut subscription = publisher.subscribe();
    let snapshot = std::mem::take(&mut subscription.snapshot);
    let (snapshot, rest) = if snapshot.blocks.len() <= MAX_ITEM_BLOCKS {
        (snapshot, Vec::new())
    } else {
        let parts = tokio::task::spawn_blocking(move || snapshot.in_parts(MAX_ITEM_BLOCKS));
        parts.await.map_err(|error| {
            EngineError::internal("the snapshot of the KV cache could not be made")
                .with_source(error)
        })?
    };
    let rest = rest.into_iter().map(|event| Ok(KvItem::Change(event)));
    let now = stream::iter([Ok(KvItem::Snapshot(snapshot))]).chain(stream::iter(rest));
    let changes = stream::unfold(subscription, |mut subscription| async move {
        let event = subscription.next().await.ok()?;
        Some((Ok(KvItem::Change(event)), subscription))
    });
    Ok(Box::pin(now.chain(changes)))
}

struct LoadHandler {
    engine: LoadPublisher,
    admitted: watch::Receiver<Admitted>,
    kv_events: KvEventPublisher,
    recent: RecentRequests,
    closed: CancellationToken,
}

#[async_trait]
impl Handler<(), Load> for LoadHandler {
    async fn handle(
        &self,
        (): (),
        ctx: RequestContext,
    ) -> Result<ResponseStream<Load>, EngineError> {
        let mut loads = Loads {
            engine: self.engine.subscribe(),
            admitted: self.admitted.clone(),
            kv_events: self.kv_events.clone(),
        };
        let recent = self.recent.clone();
        let first = loads.now();
        let changes = stream::unfold((loads, first), |(mut loads, told)| async move {
            tokio::time::sleep(RISE_INTERVAL).await;
            let has_more = loads.that(|load| load.requests() > told.requests());
            let _ = timeout(LOAD_INTERVAL - RISE_INTERVAL, has_more).await;
            // A change of the event count alone is not published; the next load includes it.
            let kv_events = told.kv_events;
            let is_news = |load: &Load| Load { kv_events, ..*load } != told;
            let load = loads.that(is_news).await?;
            Some((Ok(load), (loads, load)))
        });
        let loads = stream::iter([Ok(first)]).chain(changes);
        let loads = loads.map(move |load| load.map(|load| recent.describe(load)));
        Ok(endless(loads, &ctx, &self.closed))
    }
}

/// A worker's load as it changes.
struct Loads {
    engine: watch::Receiver<Load>,
    admitted: watch::Receiver<Admitted>,
    kv_events: KvEventPublisher,
}

impl Loads {
    fn now(&mut self) -> Load {
        let admitted = *self.admitted.borrow_and_update();
        Load {
            kv_events: self.kv_events.published(),
            ..self.engine.borrow_and_update().at_worker(admitted)
        }
    }

    /// Waits for a load that satisfies `is_so`; `None` if the worker has gone.
    async fn that(&mut self, is_so: impl Fn(&Load) -> bool) -> Option<Load> {
        loop {
            let load = self.now();
            if is_so(&load) {
                return Some(load);
            }
            tokio::select! {
                changed = self.engine.changed() => changed.ok()?,
                changed = self.admitted.changed() => changed.ok()?,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn requests_that_came_are_told_sooner_than_the_rest() {
        let (admit, admitted) = watch::channel(Admitted::default());
        let handler = LoadHandler {
            engine: LoadPublisher::default(),
            admitted,
            kv_events: KvEventPublisher::new(),
            recent: RecentRequests::default(),
            closed: CancellationToken::new(),
        };
        let mut loads = handler.handle((), RequestContext::new("r")).await.unwrap();
        let begun = Instant::now();
        let mut told = async || {
            let load = loads.next().await.unwrap().unwrap();
            (load.running_requests, begun.elapsed())
        };
        assert_eq!(told().await, (0, Duration::ZERO));
        let requests = |running_requests| {
            admit.send_replace(Admitted {
                running_requests,
                ..Admitted::default()
            });
        };
        requests(2);
        assert_eq!(told().await, (2, RISE_INTERVAL));
        // A finished request is not urgent.
        requests(1);
        assert_eq!(told().await, (1, RISE_INTERVAL + LOAD_INTERVAL));
    }
}
