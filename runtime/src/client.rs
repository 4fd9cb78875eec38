//! [`Client`]: calls the instances of one endpoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::TryStreamExt;
use genset_backend_common::ports::Generate;
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, Output, OutputStream, RequestContext, RequestField,
    card::DEFAULT_MIGRATION_LIMIT, handles::Load,
};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::component::{Endpoint, Runtime};
use crate::discovery::InstanceRecord;
use crate::ejection::{Ejections, PoolEjections, Trial};
use crate::instances::{Instance, Instances, Tried, Wanted};
use crate::load::{follow_loads, for_each_instance};
use crate::names::InstanceId;
use crate::plane::{self, Payload, ResponseStream};
use crate::selection::{Candidate, SelectionMode, Selector};

/// Calls the instances of one endpoint. Requests are `Req`; responses are streams of `Resp`.
///
/// If a call fails because the instance cannot be reached, the client marks the instance down until discovery announces it
/// again or a few seconds have passed.
pub struct Client<Req, Resp> {
    endpoint: Endpoint,
    instances: Instances,
    _follow: AbortOnDropHandle<()>,
    types: std::marker::PhantomData<fn(Req) -> Resp>,
}

impl<Req: Payload, Resp: Payload> Client<Req, Resp> {
    pub(crate) fn new(
        endpoint: Endpoint,
        instances: Instances,
        follow: AbortOnDropHandle<()>,
    ) -> Self {
        Self {
            endpoint,
            instances,
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
    /// `Unavailable`, naming the endpoint, if no instance appeared within `timeout`; it says so if discovery cannot be reached.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn wait_for_instances(&self, timeout: Duration) -> Result<(), EngineError> {
        let mut instances = self.instances.subscribe();
        let some = instances.wait_for(|map| !map.is_empty());
        match tokio::time::timeout(timeout, some).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => {
                let problem = match self.endpoint.runtime().discovery().outages().get() {
                    0 => "is a worker running?",
                    _ => "discovery cannot be reached",
                };
                let message = format!(
                    "no instance of {} appeared within {} s; {problem}",
                    self.endpoint.name(),
                    timeout.as_secs_f64()
                );
                Err(EngineError::new(ErrorKind::Unavailable, message))
            }
        }
    }

    /// Calls an instance chosen at random, all with equal probability.
    ///
    /// # Errors
    /// Same as [`Self::call`].
    ///
    /// # Cancel safety
    /// Same as [`Self::call`].
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
    /// `NotFound` if the instance is not live; otherwise the same as [`Self::call`].
    ///
    /// # Cancel safety
    /// Same as [`Self::call`].
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

    /// Calls the instance that `selector` chooses.
    ///
    /// # Errors
    /// `Unavailable` if no instance is live; otherwise the error of the call.
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
        let map = self.instances.all();
        let (live, candidates) = self.instances.candidates(&map, tried, wanted);
        let chosen = if live.is_empty() {
            None
        } else {
            choose(&candidates)
        };
        chosen
            .and_then(|index| live.get(index).copied())
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

    /// Waits for an instance that matches `wanted` and is not in `tried`. Returns false if none appeared before `until` or the
    /// request was cancelled.
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
        let called = plane::call::<Req, Resp>(
            &**self.endpoint.runtime().plane(),
            &record.address,
            &record.endpoint,
            request,
            ctx,
        )
        .await;
        match called {
            Ok(items) => {
                instance.took();
                let instance = Arc::clone(instance);
                Ok(Box::pin(items.inspect_err(move |error| {
                    // The request is in flight until its response is dropped.
                    let _in_flight = &in_flight;
                    if error.kind().is_instance_gone() {
                        instance.mark_down();
                    }
                })))
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

/// Whether the instance refused the request because it was full.
fn is_full(error: &EngineError) -> bool {
    error.kind() == ErrorKind::Overloaded && !error.is_own_shortage()
}

/// Whether to try another instance than the `tried` ones after one refused the request or was lost.
fn may_try_another(
    error: &EngineError,
    request: &GenerateRequest,
    ctx: &RequestContext,
    tried: &Tried,
) -> bool {
    if ctx.has_lost_too_many() {
        tracing::warn!(request_id = ctx.id(), %error, "instance after instance is lost with this request; it goes to no other");
        return false;
    }
    let blocks = request.transfer.as_ref();
    let has_blocks = blocks.is_some_and(|blocks| !blocks.is_none());
    let may = if is_about_transfer(error) {
        // Instances may differ. If the blocks are at fault, no instance can read them.
        has_blocks && !tried.has_refused_blocks
    } else {
        // Blocks are given once: another instance would not get them either, perhaps only after a wait for room or for a process
        // that is gone.
        error.may_go_elsewhere() && !(has_blocks && error.kind() == ErrorKind::StreamIncomplete)
    };
    may && !ctx.is_cancelled()
}

/// Whether the instance cannot read the KV blocks that the request names.
fn is_about_transfer(error: &EngineError) -> bool {
    error.kind() == ErrorKind::InvalidArgument && error.at() == Some(&RequestField::Transfer.into())
}

/// How long a request waits for another instance after all known instances were gone or draining. A replacement may be in
/// discovery already and reach this client a moment later.
const SUCCESSOR_TIME: Duration = Duration::from_secs(1);

/// How long a request goes on from one instance to the next where all that are left are marked as gone. Behind a broken network,
/// each takes as long as connecting may.
const MARKED_TIME: Duration = Duration::from_secs(3);

/// A client of token-generating instances with the same `generate` as an engine. If an instance is full, gone, draining or
/// has just lost the adapter, and has yielded no output, the client tries another, unless the instance could not get the
/// request's KV blocks: no other would get them. Blocks that an instance cannot read are offered to one more.
///
/// It skips instances that look full: they refused a request a moment ago, or their published load says so. When all look full,
/// it asks those most likely to have room, until 16 of them have refused the request and the others refused one less than 100 ms
/// ago or say that they are full. In no case does it ask more than 64 that are full, such as where nothing is known of them. When
/// all are gone or draining, it waits a second for another to appear, or [not at all](Self::without_wait). Before, it tries those
/// that it knows to be gone, too, for three seconds. It may also [pass over](Self::with_ejections) instances that fail one request
/// after another, or half of their last 32. It stops trying when the request has lost more instances than its context
/// [allows](RequestContext::with_loss_limit), by default [`DEFAULT_MIGRATION_LIMIT`].
#[derive(Debug)]
pub struct GenerateClient {
    client: Client<GenerateRequest, Output>,
    mode: SelectionMode,
    selector: Box<dyn Selector>,
    successor_time: Duration,
    ejections: Option<Arc<PoolEjections>>,
    _loads: Option<AbortOnDropHandle<()>>,
}

impl GenerateClient {
    /// Creates a client that selects by `mode`.
    #[must_use]
    pub fn new(client: Client<GenerateRequest, Output>, mode: SelectionMode) -> Self {
        Self {
            client,
            mode,
            selector: mode.selector(),
            successor_time: SUCCESSOR_TIME,
            ejections: None,
            _loads: None,
        }
    }

    /// Refuses a request at once if every instance is gone or draining. For callers that wait themselves or can fall back to the
    /// instances of another client.
    #[must_use]
    pub fn without_wait(mut self) -> Self {
        self.successor_time = Duration::ZERO;
        self
    }

    /// Passes over instances that fail one request after another, or half of their last 32, for a while. Those of `pool` are
    /// counted by this name.
    #[must_use]
    pub fn with_ejections(mut self, ejections: &Ejections, pool: &str) -> Self {
        self.ejections = Some(Arc::new(ejections.of(pool)));
        self
    }

    /// Also selects by the load that instances publish at their `load` endpoint, which counts the requests of other clients.
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

    /// Whether the instance `id` is live and has the adapter, if one is named.
    #[must_use]
    pub fn may_take(&self, id: InstanceId, adapter: Option<&str>) -> bool {
        let instance = self.client.instances.get(id);
        instance.is_some_and(|instance| instance.has_adapter(adapter))
    }

    /// Runs a task for each live instance and drops it when the instance goes away. Dropping the returned handle drops them all.
    /// They run on a runtime that no request may delay, so they must neither block nor do a request's work.
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

    /// The number of requests of each live instance, by id: this client's own, and those of others as last published.
    #[must_use]
    pub fn loads(&self) -> Vec<(InstanceId, usize)> {
        let map = self.client.instances.all();
        let live = (self.client.instances).live(&map, &Tried::default(), Wanted::default());
        let candidates = live.into_iter().map(|instance| instance.candidate());
        candidates
            .map(|candidate| (candidate.instance, candidate.load))
            .collect()
    }

    /// Sends a request to the instance `id` and no other.
    ///
    /// # Errors
    /// Same as [`Client::direct`].
    ///
    /// # Cancel safety
    /// Same as [`Client::direct`].
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

/// The holder of a request: one instance, or a sequence of instances.
#[derive(Debug, Clone)]
pub enum Holder {
    /// The instance that took it.
    One(InstanceId),
    /// The id of the current holder, or [`Holder::NOBODY`]. The layer that passes the request on updates it.
    Now(Arc<AtomicU64>),
}

impl Holder {
    /// The value of [`Holder::Now`] while no instance has the request; no instance has this id.
    pub const NOBODY: u64 = 0;

    /// The instance that has the request now; `None` if no instance has it.
    #[must_use]
    pub fn id(&self) -> Option<InstanceId> {
        let id = match self {
            Self::One(id) => id.0,
            Self::Now(id) => id.load(Ordering::Relaxed),
        };
        (id != Self::NOBODY).then_some(InstanceId(id))
    }
}

/// The response to a request, and the instance that sends it.
#[derive(Debug)]
pub struct Routed {
    /// Who has the request.
    pub holder: Holder,
    /// When the request was sent to the first instance that had it.
    pub began: Instant,
    /// The response.
    pub outputs: OutputStream,
}

/// Chooses an instance for one request: returns the index of a candidate, or `None` to reject them all. If the chosen instance
/// refuses, it is called again without that one. It may change the request for the chosen instance, such as the rank.
pub type Choose<'a> = dyn FnMut(&mut GenerateRequest, &[Candidate]) -> Option<usize> + Send + 'a;

impl GenerateClient {
    /// Like [`Generate::generate`], but also returns the holder. Never asks the instances in `left_out`.
    ///
    /// # Errors
    /// That an instance is full, if one is; else the last instance's refusal; `Unavailable` if there was no instance to ask;
    /// `NotFound` at the adapter if there are instances but none of them has it.
    ///
    /// # Cancel safety
    /// Dropping the future, or the stream it returns, cancels the request.
    pub async fn route(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let selector = &*self.selector;
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

    /// Describes a choice made by the mode alone.
    fn decision(&self, candidates: &[Candidate], index: usize) -> serde_json::Value {
        let chosen = candidates.get(index);
        serde_json::json!({
            "mode": self.mode.name(),
            "instance": chosen.map(|chosen| chosen.instance.to_string()),
            "requests": chosen.map(|chosen| chosen.load),
            "candidate_count": candidates.len(),
        })
    }

    /// Like [`Self::route`], but `choose` selects the instance.
    ///
    /// # Errors
    /// Same as [`Self::route`].
    ///
    /// # Cancel safety
    /// Same as [`Self::route`].
    pub async fn route_by(
        &self,
        choose: &mut Choose<'_>,
        mut request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let mut ctx = ctx.with_loss_limit(DEFAULT_MIGRATION_LIMIT);
        let mut tried = Tried {
            instances: left_out.to_vec(),
            ..Tried::default()
        };
        let mut last_error: Option<EngineError> = None;
        let (mut wait_until, mut marked_since) = (None, None);
        let adapter = request.adapter.clone();
        // The rank as the client sent it: `choose` may set a rank of the chosen instance.
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
                    if error.kind().is_instance_gone() && another.await {
                        continue;
                    }
                    return Err(error);
                }
            };
            let looked_full = instance.looks_full();
            let ejections = self.ejections.as_ref();
            let trial = ejections.map(|all| Trial::new(all, &instance, &request));
            let asked = Instant::now();
            let is_marked = instance.is_marked();
            let marked_since = is_marked.then(|| *marked_since.get_or_insert(asked));
            match self
                .client
                .call_instance(&instance, request.clone(), ctx.clone())
                .await
            {
                Ok(items) => {
                    let items = match trial {
                        Some(trial) => trial.watch(items),
                        None => items,
                    };
                    return Ok(Routed {
                        holder: Holder::One(instance.record.instance),
                        began: ctx.began().unwrap_or(asked),
                        outputs: OutputStream::from_raw(items),
                    });
                }
                Err(error) => {
                    if let Some(mut trial) = trial {
                        trial.failed(&error);
                    }
                    if error.kind() == ErrorKind::Disconnected {
                        ctx.note_loss();
                        ctx = ctx.with_began(asked);
                    }
                    if !may_try_another(&error, &request, &ctx, &tried) {
                        return Err(error);
                    }
                    tried.has_refused_blocks |= is_about_transfer(&error);
                    tracing::debug!(request_id = ctx.id(), instance = %instance.record.instance, %error, "trying another instance");
                    tried.instances.push(instance.record.instance);
                    if is_full(&error) {
                        tried.full += 1;
                        tried.refusals += usize::from(looked_full);
                    }
                    // If one instance is only full, neither are all gone nor is the adapter unknown: the request may wait.
                    let is_told = |last: &EngineError| {
                        is_full(&error) || (error.policy().is_migratable && !is_full(last))
                    };
                    if last_error.as_ref().is_none_or(is_told) {
                        last_error = Some(error);
                    }
                    let is_late = marked_since.is_some_and(|it| it.elapsed() >= MARKED_TIME);
                    if let Some(error) = last_error.take_if(|_| is_late) {
                        return Err(error);
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
