//! [`Client`]: calls the instances of one endpoint.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::Stream;
use genset_backend_common::ports::Generate;
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, Output, OutputStream, RequestContext, RequestField,
    card::DEFAULT_MIGRATION_LIMIT, handles::Load,
};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::component::{Endpoint, Runtime};
use crate::discovery::InstanceRecord;
use crate::instances::{InFlightGuard, Instance, Instances, Tried, Wanted};
use crate::load::{follow_loads, for_each_instance};
use crate::names::InstanceId;
use crate::plane::{self, Payload, RequestPlane, ResponseStream};
use crate::selection::{Candidate, SelectionMode, Selector};

/// Calls the instances of one endpoint, whose requests are `Req` and whose responses stream `Resp`.
///
/// A call that fails because its instance cannot be reached marks the instance down here until discovery announces it
/// anew or a few seconds have passed.
pub struct Client<Req, Resp> {
    endpoint: Endpoint,
    instances: Instances,
    plane: Arc<dyn RequestPlane>,
    _follow: AbortOnDropHandle<()>,
    types: std::marker::PhantomData<fn(Req) -> Resp>,
}

impl<Req: Payload, Resp: Payload> Client<Req, Resp> {
    pub(crate) fn new(
        endpoint: Endpoint,
        instances: Instances,
        plane: Arc<dyn RequestPlane>,
        follow: AbortOnDropHandle<()>,
    ) -> Self {
        Self {
            endpoint,
            instances,
            plane,
            _follow: follow,
            types: std::marker::PhantomData,
        }
    }

    /// The live instances, ordered by id.
    #[must_use]
    pub fn instances(&self) -> Vec<InstanceRecord> {
        self.instances
            .all()
            .values()
            .map(|instance| instance.record.clone())
            .collect()
    }

    /// Waits until at least one instance is live.
    ///
    /// # Errors
    /// `Unavailable`, naming the endpoint, when none came within `timeout`.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn wait_for_instances(&self, timeout: Duration) -> Result<(), EngineError> {
        let mut instances = self.instances.subscribe();
        let some = instances.wait_for(|map| !map.is_empty());
        match tokio::time::timeout(timeout, some).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => {
                let message = format!(
                    "no instance of {} appeared within {} s; is a worker running?",
                    self.endpoint.name(),
                    timeout.as_secs_f64()
                );
                Err(EngineError::new(ErrorKind::Unavailable, message))
            }
        }
    }

    /// Calls any instance, with equal chance.
    ///
    /// # Errors
    /// As [`Self::call`].
    ///
    /// # Cancel safety
    /// As [`Self::call`].
    pub async fn random(
        &self,
        request: Req,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Resp>, EngineError> {
        self.call(&crate::selection::Random, request, ctx).await
    }

    /// Calls the instance `id`.
    ///
    /// # Errors
    /// `NotFound` when it is not live, else as [`Self::call`].
    ///
    /// # Cancel safety
    /// As [`Self::call`].
    pub async fn direct(
        &self,
        id: InstanceId,
        request: Req,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Resp>, EngineError> {
        let instance = self.instances.get(id).ok_or_else(|| {
            EngineError::not_found(format!(
                "{} has no live instance {id}",
                self.endpoint.name()
            ))
        })?;
        self.call_instance(&instance, request, ctx).await
    }

    /// Calls the instance `selector` chooses.
    ///
    /// # Errors
    /// `Unavailable` when no instance is live, else what the call fails with.
    ///
    /// # Cancel safety
    /// Dropping the future or the stream cancels the request.
    pub async fn call(
        &self,
        selector: &dyn Selector,
        request: Req,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Resp>, EngineError> {
        let any = Wanted::default();
        let instance = self.choose(&Tried::default(), any, |candidates| {
            selector.select(candidates)
        })?;
        self.call_instance(&instance, request, ctx).await
    }

    fn choose(
        &self,
        tried: &Tried,
        wanted: Wanted<'_>,
        choose: impl FnOnce(&[Candidate]) -> Option<usize>,
    ) -> Result<Arc<Instance>, EngineError> {
        let (live, candidates) = self.instances.candidates(tried, wanted);
        let chosen = if live.is_empty() {
            None
        } else {
            choose(&candidates)
        };
        chosen
            .and_then(|index| live.get(index))
            .cloned()
            .ok_or_else(|| self.none_available(wanted.adapter))
    }

    fn none_available(&self, adapter: Option<&str>) -> EngineError {
        let name = self.endpoint.name();
        if let Some(adapter) = adapter
            && self.instances.lack_adapter(adapter)
        {
            let message = format!("no instance of {name} has the adapter {adapter:?}");
            return EngineError::not_found(message).with_at(RequestField::Adapter);
        }
        let message = format!("no instance of {name} is available; try again later");
        EngineError::new(ErrorKind::Unavailable, message).with_retry_after(Duration::from_secs(1))
    }

    /// Waits until there is an instance as it is wanted that is none of `tried`; false when none came in time, or the request was
    /// cancelled.
    async fn other_than(
        &self,
        tried: &[InstanceId],
        wanted: Wanted<'_>,
        until: Instant,
        ctx: &RequestContext,
    ) -> bool {
        let mut instances = self.instances.subscribe();
        let another = instances.wait_for(|map| {
            let is_wanted = wanted.among(map);
            map.iter()
                .any(|(id, instance)| !tried.contains(id) && is_wanted(instance))
        });
        tokio::select! {
            biased;
            () = ctx.cancelled() => false,
            another = tokio::time::timeout_at(until, another) => matches!(another, Ok(Ok(_))),
        }
    }

    async fn call_instance(
        &self,
        instance: &Arc<Instance>,
        request: Req,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Resp>, EngineError> {
        let in_flight = instance.enter();
        let record = &instance.record;
        let called = plane::call(
            &*self.plane,
            &record.address,
            &record.endpoint,
            request,
            ctx,
        )
        .await;
        match called {
            Ok(items) => {
                instance.took();
                Ok(Box::pin(Counted {
                    items,
                    instance: Arc::clone(instance),
                    _in_flight: in_flight,
                }))
            }
            Err(error) => {
                if error.kind().is_instance_gone() {
                    instance.mark_down();
                } else if is_full(&error) {
                    instance.refused();
                }
                Err(error)
            }
        }
    }
}

impl<Req, Resp> std::fmt::Debug for Client<Req, Resp> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("endpoint", &self.endpoint.name())
            .finish_non_exhaustive()
    }
}

/// Whether it is the instance that had no place for the request.
fn is_full(error: &EngineError) -> bool {
    error.kind() == ErrorKind::Overloaded && !error.is_own_shortage()
}

/// Whether a request that an instance refused, or was lost with, is tried on another one.
fn may_try_another(error: &EngineError, ctx: &RequestContext) -> bool {
    if ctx.has_lost_too_many() {
        tracing::warn!(request_id = ctx.id(), %error, "instance after instance is lost with this request; it goes to no other");
        return false;
    }
    error.may_go_elsewhere() && !ctx.is_cancelled()
}

/// A response that counts as in flight until it is dropped, and marks its instance down when that turns out to be gone.
struct Counted<Resp> {
    items: ResponseStream<Resp>,
    instance: Arc<Instance>,
    _in_flight: InFlightGuard,
}

impl<Resp> Stream for Counted<Resp> {
    type Item = Result<Resp, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let item = self.items.as_mut().poll_next(cx);
        if let Poll::Ready(Some(Err(error))) = &item
            && error.kind().is_instance_gone()
        {
            self.instance.mark_down();
        }
        item
    }
}

/// How long a request waits for another instance when all that it knew of were gone or going: what takes their place may be
/// listed already, and is known here a moment later.
const SUCCESSOR_TIME: Duration = Duration::from_secs(1);

/// A client of token-generating instances that answers the same `generate` as an engine. A request that was refused by an
/// instance that is full, gone or going, or has just lost the adapter, and has yielded nothing, is tried on the others. Those that
/// look full are left out: they refused a request a moment ago, or say so where their load is followed. When all look full, those that
/// most likely have a place by now are asked, until 16 of them have refused it. When all were gone or going, it waits a second for
/// another to appear, or [not at all](Self::without_wait). One with which more instances were lost than its context
/// [allows](RequestContext::with_loss_limit), [`DEFAULT_MIGRATION_LIMIT`] where that says nothing, is tried on no other.
#[derive(Debug)]
pub struct GenerateClient {
    client: Client<GenerateRequest, Output>,
    mode: SelectionMode,
    selector: BoxSelector,
    successor_time: Duration,
    _loads: Option<AbortOnDropHandle<()>>,
}

struct BoxSelector(Box<dyn Selector>);

impl std::fmt::Debug for BoxSelector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Selector")
    }
}

impl GenerateClient {
    /// A client that selects by `mode`.
    #[must_use]
    pub fn new(client: Client<GenerateRequest, Output>, mode: SelectionMode) -> Self {
        Self {
            client,
            mode,
            selector: BoxSelector(mode.selector()),
            successor_time: SUCCESSOR_TIME,
            _loads: None,
        }
    }

    /// A request for which every instance is gone or going is refused at once: for callers that wait themselves, or have another
    /// client whose instances take it.
    #[must_use]
    pub fn without_wait(mut self) -> Self {
        self.successor_time = Duration::ZERO;
        self
    }

    /// Selects by what the instances publish at their `load` endpoint too: what other clients ask of them counts then.
    #[must_use]
    pub(crate) fn following_load(mut self, runtime: &Runtime, load: Client<(), Load>) -> Self {
        let instances = self.client.instances.clone();
        let follow = follow_loads(runtime.clone(), instances, Arc::new(load));
        self._loads = Some(runtime.spawn(follow));
        self
    }

    /// The live instances, ordered by id.
    #[must_use]
    pub fn instances(&self) -> Vec<InstanceRecord> {
        self.client.instances()
    }

    /// Whether the instance `id` is live and may be asked under the adapter, where one is named.
    #[must_use]
    pub fn may_take(&self, id: InstanceId, adapter: Option<&str>) -> bool {
        let instance = self.client.instances.get(id);
        instance.is_some_and(|instance| instance.has_adapter(adapter))
    }

    /// Keeps a task for every live instance, and drops it when the instance goes; all of them with what is returned. They run
    /// where no request can keep them waiting, so they must neither block nor do a request's work.
    pub fn for_each_instance<F>(
        &self,
        runtime: &Runtime,
        task: impl Fn(&InstanceRecord) -> F + Send + 'static,
    ) -> AbortOnDropHandle<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let instances = self.client.instances.clone();
        runtime.spawn(for_each_instance(runtime.clone(), instances, task))
    }

    /// The requests of each live instance, by id: those of this client, and those of others by what it told last.
    #[must_use]
    pub fn loads(&self) -> Vec<(InstanceId, usize)> {
        let map = self.client.instances.all();
        let live = (self.client.instances).live(&map, &[], Wanted::default());
        let candidates = live.into_iter().map(|instance| instance.candidate());
        candidates
            .map(|candidate| (candidate.instance, candidate.load))
            .collect()
    }

    /// Sends a request to the instance `id` and no other.
    ///
    /// # Errors
    /// As [`Client::direct`].
    ///
    /// # Cancel safety
    /// As [`Client::direct`].
    pub async fn direct(
        &self,
        id: InstanceId,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        Ok(OutputStream::from_raw(
            self.client.direct(id, request, ctx).await?,
        ))
    }
}

/// Who has a request: one instance, or one after another.
#[derive(Debug, Clone)]
pub enum Holder {
    /// The instance that took it.
    One(InstanceId),
    /// The id of the instance that has it at the moment, or [`Holder::NOBODY`], kept up to date by whoever hands it on.
    Now(Arc<AtomicU64>),
}

impl Holder {
    /// What [`Holder::Now`] holds while no instance has the request; no instance has this id.
    pub const NOBODY: u64 = 0;

    /// The instance that has the request at the moment; `None` while no instance has it.
    #[must_use]
    pub fn id(&self) -> Option<InstanceId> {
        let id = match self {
            Self::One(id) => id.0,
            Self::Now(id) => id.load(Ordering::Relaxed),
        };
        (id != Self::NOBODY).then_some(InstanceId(id))
    }
}

/// A request's answer, and who gives it.
#[derive(Debug)]
pub struct Routed {
    /// Who has the request.
    pub holder: Holder,
    /// Its answer.
    pub outputs: OutputStream,
}

/// Chooses an instance for one request: the index of the chosen candidate, `None` when none will do. Called again, without
/// the chosen one, when that refused; it may change what the chosen one is asked for, such as the rank.
pub type Choose<'a> = dyn FnMut(&mut GenerateRequest, &[Candidate]) -> Option<usize> + Send + 'a;

impl GenerateClient {
    /// As [`Generate::generate`], and says who answers. Instances in `left_out` are not asked.
    ///
    /// # Errors
    /// What the last instance refused the request with; `Unavailable` when there was none to ask, and `NotFound` at the adapter
    /// when there are instances and none of them has it.
    ///
    /// # Cancel safety
    /// Dropping the future, or the stream it returns, cancels the request.
    pub async fn route(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let selector = &*self.selector.0;
        let explanation = ctx.explanation().cloned();
        let mut choose = |_: &mut GenerateRequest, candidates: &[Candidate]| {
            let index = selector.select(candidates)?;
            if let Some(explanation) = &explanation {
                explanation.add(self.decision(candidates, index));
            }
            Some(index)
        };
        self.route_by(&mut choose, request, ctx, left_out).await
    }

    /// What is said of a choice by the mode alone.
    fn decision(&self, candidates: &[Candidate], index: usize) -> serde_json::Value {
        let chosen = candidates.get(index);
        serde_json::json!({
            "mode": self.mode.name(),
            "instance": chosen.map(|chosen| chosen.instance.to_string()),
            "requests": chosen.map(|chosen| chosen.load),
            "candidate_count": candidates.len(),
        })
    }

    /// As [`Self::route`], to the instances that `choose` chooses.
    ///
    /// # Errors
    /// As [`Self::route`].
    ///
    /// # Cancel safety
    /// As [`Self::route`].
    pub async fn route_by(
        &self,
        choose: &mut Choose<'_>,
        mut request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let ctx = ctx.with_loss_limit(DEFAULT_MIGRATION_LIMIT);
        let mut tried = Tried {
            instances: left_out.to_vec(),
            refusals: 0,
        };
        let mut last_error: Option<EngineError> = None;
        let mut wait_until = None;
        let adapter = request.adapter.clone();
        // As the client named it: who chooses may name one of the chosen instance.
        let wanted = Wanted {
            adapter: adapter.as_deref(),
            rank: request.data_parallel_rank,
        };
        loop {
            let chosen = (self.client).choose(&tried, wanted, |candidates| {
                choose(&mut request, candidates)
            });
            let instance = match chosen {
                Ok(instance) => instance,
                Err(none_left) => {
                    let error = last_error.take().unwrap_or(none_left);
                    let until =
                        *wait_until.get_or_insert_with(|| Instant::now() + self.successor_time);
                    let another = (self.client).other_than(&tried.instances, wanted, until, &ctx);
                    // Those that are left out as full are no successors.
                    if error.kind().is_instance_gone() && !tried.are_enough() && another.await {
                        continue;
                    }
                    return Err(error);
                }
            };
            let looked_full = instance.looks_full();
            match self
                .client
                .call_instance(&instance, request.clone(), ctx.clone())
                .await
            {
                Ok(items) => {
                    return Ok(Routed {
                        holder: Holder::One(instance.record.instance),
                        outputs: OutputStream::from_raw(items),
                    });
                }
                Err(error) => {
                    if error.kind() == ErrorKind::Disconnected {
                        ctx.note_loss();
                    }
                    if !may_try_another(&error, &ctx) {
                        return Err(error);
                    }
                    tracing::debug!(request_id = ctx.id(), instance = %instance.record.instance, %error, "trying another instance");
                    tried.instances.push(instance.record.instance);
                    if looked_full && is_full(&error) {
                        tried.refusals += 1;
                    }
                    // That one lost the adapter does not make it unknown where another is only full.
                    if error.policy().is_migratable || last_error.is_none() {
                        last_error = Some(error);
                    }
                }
            }
        }
    }
}

#[async_trait]
impl Generate for GenerateClient {
    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let routed = self.route(request, ctx, &[]).await?;
        Ok(routed.outputs)
    }
}
