//! [`Fleet`]: the workers, which run production code, and the actions on them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use genset_backend_common::kv::KvEventPublisher;
use genset_backend_common::output::OutputStream;
use genset_backend_common::worker::{
    CanaryConfig, RequestLimits, State, Worker, WorkerConfig, WorkerHandle,
};
use genset_backend_common::{
    DrainContext, EngineConfig, EngineControls, EngineError, GenerateRequest, LLMEngine,
    MetricsRegistry, RequestContext, Role, StartContext, async_trait,
};
use genset_engine_mocker::MockerEngine;
use genset_runtime::discovery::{Discovery, MemoryDiscovery};
use genset_runtime::plane::{MemoryPlane, RequestPlane};
use genset_runtime::{
    EndpointName, InstanceId, LiveModel, ModelDirectory, Runtime, RuntimeRegistrar,
};
use parking_lot::Mutex;

/// The model that every worker serves.
pub(crate) const MODEL: &str = "mocker";

/// Longer than any start takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3600);

/// The distance between the instance ids of one worker's starts.
const STARTS: u64 = 1 << 32;

/// An engine, with internal state that a simulation observes and no client sees.
#[derive(Debug)]
pub(crate) struct Observed {
    engine: MockerEngine,
    kv_events: Mutex<Option<KvEventPublisher>>,
    role: Role,
    moved: Arc<AtomicU64>,
}

impl Observed {
    /// KV blocks that sequences hold.
    pub(crate) fn kv_used_blocks(&self) -> u64 {
        self.engine.stats().kv_used_blocks
    }

    /// Its prefix cache, once it has started.
    pub(crate) fn kv_events(&self) -> Option<KvEventPublisher> {
        self.kv_events.lock().clone()
    }
}

/// The engine that the worker runs. Clones share it.
#[derive(Debug, Clone)]
struct Shared(Arc<Observed>);

#[async_trait]
impl LLMEngine for Shared {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        *self.0.kv_events.lock() = Some(ctx.kv_events.clone());
        self.0.engine.start(ctx).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        // A request that migrates begins again with a prefill if prefill is disaggregated; it is counted where it is
        // answered. A request that goes on after its prefill without the blocks has one token, and has not migrated.
        let is_without_blocks = request.transfer.as_ref().is_some_and(|it| it.is_none());
        let has_moved = request.resumed_tokens > u32::from(is_without_blocks);
        if has_moved && self.0.role != Role::Prefill {
            self.0.moved.fetch_add(1, Ordering::Relaxed);
        }
        self.0.engine.generate(request, ctx).await
    }

    async fn abort(&self, ctx: &RequestContext) {
        self.0.engine.abort(ctx).await;
    }

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        self.0.engine.drain(ctx).await
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.0.engine.cleanup().await
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        self.0.engine.controls()
    }
}

/// A slot for a worker, which holds one after another.
#[derive(Debug)]
struct Seat {
    starts: u64,
    observed: Arc<Observed>,
    handle: Arc<WorkerHandle>,
    /// Whether it was asked to stop. Asking again would cut its requests short.
    was_told: bool,
}

impl Seat {
    /// Asks it to stop, unless it was asked already or is stopping.
    fn stop(&mut self) {
        let stops = matches!(
            self.handle.state(),
            State::Draining { .. } | State::CleaningUp { .. } | State::Stopped(_)
        );
        if !stops && !self.was_told {
            self.handle.stop();
        }
        self.was_told = true;
    }
}

/// What processes share: discovery and request plane.
type Common = (Arc<dyn Discovery>, Arc<dyn RequestPlane>);

/// The workers.
pub(crate) struct Fleet {
    runtime: Runtime,
    common: Common,
    /// The number of workers, from the first, that only prefill; the others only decode. 0 if each does both.
    prefill_workers: usize,
    /// The template of every engine.
    engine: MockerEngine,
    seats: Mutex<BTreeMap<usize, Seat>>,
    moved: Arc<AtomicU64>,
}

impl Fleet {
    /// Starts workers and waits until all of them serve.
    pub(crate) async fn start(
        engine: &MockerEngine,
        workers: usize,
        prefill_workers: usize,
    ) -> Result<Self, EngineError> {
        let (discovery, plane): Common = (
            Arc::new(MemoryDiscovery::new()),
            Arc::new(MemoryPlane::new()),
        );
        let fleet = Self {
            runtime: Runtime::new(Arc::clone(&discovery), Arc::clone(&plane)),
            common: (discovery, plane),
            prefill_workers,
            engine: engine.fresh(),
            seats: Mutex::default(),
            moved: Arc::default(),
        };
        for worker in 0..workers {
            fleet.start_worker(worker, 0)?;
        }
        let ready = {
            let seats = fleet.seats.lock();
            let waits = seats.values().map(|seat| seat.handle.status());
            waits.collect::<Vec<_>>()
        };
        let ready = ready.into_iter().map(|mut status| async move {
            let is_listed = status.wait_for(|status| status.model.is_some()).await;
            is_listed.map(drop)
        });
        for ready in join_all(ready).await {
            ready.map_err(|error| {
                EngineError::internal("a worker of the simulation ended as it started")
                    .with_source(error)
            })?;
        }
        Ok(fleet)
    }

    /// A runtime for another process, which shares only discovery and request plane with the workers' runtime.
    pub(crate) fn runtime_beside(&self) -> Runtime {
        let (discovery, plane) = &self.common;
        Runtime::new(Arc::clone(discovery), Arc::clone(plane))
    }

    /// The model, once `workers` workers are listed.
    pub(crate) async fn model(
        &self,
        directory: &ModelDirectory,
        workers: usize,
    ) -> Result<LiveModel, EngineError> {
        let mut models = directory.subscribe();
        let all = models.wait_for(|models| {
            let model = models.get(MODEL);
            model.is_some_and(|model| model.instances().len() >= workers)
        });
        let found = tokio::time::timeout(PATIENCE, all).await;
        let models = found.ok().and_then(Result::ok);
        let model = models.and_then(|models| models.get(MODEL).cloned());
        model
            .ok_or_else(|| EngineError::internal("the workers of the simulation were never listed"))
    }

    /// `starts`: how often it has started before.
    fn start_worker(&self, worker: usize, starts: u64) -> Result<(), EngineError> {
        let role = self.role_of(worker);
        let name = EndpointName::try_new("simulation", &role.to_string(), "generate")
            .map_err(|error| EngineError::internal("a name is none").with_source(error))?;
        let observed = Arc::new(Observed {
            engine: self.engine.fresh(),
            kv_events: Mutex::new(None),
            role,
            moved: Arc::clone(&self.moved),
        });
        let id = 1 + u64::try_from(worker).unwrap_or(0) + starts * STARTS;
        let registrar = RuntimeRegistrar::new(self.runtime.clone(), name);
        let handle = Worker::new(
            id,
            Arc::new(Shared(Arc::clone(&observed))),
            worker_config(role),
            Arc::new(registrar),
            MetricsRegistry::default(),
        )
        .spawn();
        let seat = Seat {
            starts,
            observed,
            handle: Arc::new(handle),
            was_told: false,
        };
        self.seats.lock().insert(worker, seat);
        Ok(())
    }

    fn role_of(&self, worker: usize) -> Role {
        match self.prefill_workers {
            0 => Role::Aggregated,
            prefill if worker < prefill => Role::Prefill,
            _ => Role::Decode,
        }
    }

    /// Makes a worker's engine fail.
    pub(crate) fn crash(&self, worker: usize) {
        if let Some(seat) = self.seats.lock().get(&worker) {
            seat.observed.engine.crash("the fault script says so");
        }
    }

    /// Asks a worker to stop.
    pub(crate) fn stop_worker(&self, worker: usize) {
        if let Some(seat) = self.seats.lock().get_mut(&worker) {
            seat.handle.stop();
            seat.was_told = true;
        }
    }

    /// Restarts a worker. A worker that still serves is stopped first, and remains a target of faults until it has ended.
    pub(crate) async fn start_again(&self, worker: usize) {
        let (handle, starts) = {
            let mut seats = self.seats.lock();
            let Some(seat) = seats.get_mut(&worker) else {
                return;
            };
            seat.stop();
            (Arc::clone(&seat.handle), seat.starts)
        };
        handle.join().await;
        // Two restarts may have been requested in the meantime.
        let is_next = (self.seats.lock())
            .get(&worker)
            .is_some_and(|seat| seat.starts == starts);
        if is_next {
            // Its name was valid when it started first.
            drop(self.start_worker(worker, starts + 1));
        }
    }

    /// The engine of an instance, if it exists.
    pub(crate) fn observed(&self, instance: InstanceId) -> Option<Arc<Observed>> {
        let worker = usize::try_from((instance.0.checked_sub(1)?) % STARTS).ok()?;
        let seats = self.seats.lock();
        seats.get(&worker).map(|seat| Arc::clone(&seat.observed))
    }

    /// The number of requests that reached an engine with tokens from another.
    pub(crate) fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// Stops every worker.
    pub(crate) async fn stop(&self) {
        let seats = std::mem::take(&mut *self.seats.lock());
        let stopped = seats.into_values().map(|mut seat| async move {
            seat.stop();
            seat.handle.join().await;
        });
        join_all(stopped).await;
        self.runtime.shutdown().await;
    }
}

/// As in production, without the limits that would end requests that wait long in a fleet that is too small, and without
/// probes, because these engines cannot fail by themselves.
fn worker_config(role: Role) -> WorkerConfig {
    WorkerConfig {
        role,
        migration_limit: 3,
        limits: RequestLimits {
            max_waiting: 1 << 20,
            request_timeout: None,
            idle_timeout: None,
            ..RequestLimits::default()
        },
        canary: CanaryConfig {
            interval: None,
            ..CanaryConfig::default()
        },
        ..WorkerConfig::default()
    }
}
