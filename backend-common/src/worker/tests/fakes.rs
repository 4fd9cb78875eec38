//! A fake engine and a fake port that follow the plan of a [`World`] and record their calls.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::Stream;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::transcript::{Transcript, read};
use crate::config::EngineConfig;
use crate::context::RequestContext;
use crate::controls::EngineControls;
use crate::engine::{DrainContext, LLMEngine, StartContext};
use crate::error::EngineError;
use crate::handles::MetricsRegistry;
use crate::output::{self, Finish, Output, OutputStream};
use crate::ports::{Offer, Registrar, Registration};
use crate::request::GenerateRequest;
use crate::worker::{CanaryConfig, Outcome, Report, State, Worker, WorkerConfig, WorkerHandle};

pub(super) const WORKER_ID: u64 = 42;
pub(super) const MODEL: &str = "fake";
pub(super) const VOCAB_SIZE: u32 = 100;
pub(super) const CONTEXT_LENGTH: u32 = 100;

/// A call the Worker makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Call {
    Start,
    Serve,
    Probe,
    Generate,
    List,
    Unlist,
    Drain,
    Close,
    Cleanup,
    /// Not in [`World::calls`]: hints come at any time.
    Abort,
    /// Not in [`World::calls`]: it is a wait. One that is planned to fail returns at once, as if the lease were lost.
    Lost,
}

/// The behaviour of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Act {
    Succeed,
    Error,
    Panic,
    Hang,
    /// Succeeds after a delay.
    Late(Duration),
}

impl Act {
    async fn perform(self, call: Call) -> Result<(), EngineError> {
        match self {
            Self::Succeed => Ok(()),
            Self::Error => Err(EngineError::internal(format!("{call:?} fails as planned"))),
            Self::Panic => panic!("{call:?} panics as planned"),
            Self::Hang => std::future::pending().await,
            Self::Late(time) => {
                tokio::time::sleep(time).await;
                Ok(())
            }
        }
    }
}

type Answering =
    Arc<dyn Fn(GenerateRequest, RequestContext) -> Result<OutputStream, EngineError> + Send + Sync>;

/// Everything outside the Worker: the plan, and the record of calls.
pub(super) struct World {
    pub(super) metrics: MetricsRegistry,
    pub(super) controls: OnceLock<Box<dyn EngineControls>>,
    config: Mutex<EngineConfig>,
    plan: Mutex<HashMap<Call, VecDeque<Act>>>,
    answering: Mutex<Answering>,
    calls: watch::Sender<Vec<Call>>,
    /// The contexts that the engine received in `generate` and in `abort`.
    seen: Mutex<Vec<RequestContext>>,
    aborted: Mutex<Vec<RequestContext>>,
    start: Mutex<Option<StartContext>>,
    offer: Mutex<Option<Offer>>,
    lease: Notify,
    is_starting: AtomicBool,
    cleanup_met_start: AtomicBool,
}

impl World {
    /// Returns a world in which everything succeeds.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            metrics: MetricsRegistry::default(),
            controls: OnceLock::new(),
            config: Mutex::new(
                EngineConfig::new(MODEL, CONTEXT_LENGTH).with_vocab_size(VOCAB_SIZE),
            ),
            plan: Mutex::default(),
            answering: Mutex::new(Arc::new(|request, ctx| Ok(counting(request, ctx)))),
            calls: watch::Sender::default(),
            seen: Mutex::default(),
            aborted: Mutex::default(),
            start: Mutex::default(),
            offer: Mutex::default(),
            lease: Notify::new(),
            is_starting: AtomicBool::new(false),
            cleanup_met_start: AtomicBool::new(false),
        })
    }

    /// Sets what `start` returns.
    pub(super) fn declare(&self, config: EngineConfig) {
        *self.config.lock() = config;
    }

    /// Plans the next calls of one kind; later ones succeed.
    pub(super) fn plan(&self, call: Call, acts: impl IntoIterator<Item = Act>) {
        self.plan.lock().entry(call).or_default().extend(acts);
    }

    /// Sets how requests are answered from now on.
    pub(super) fn answer_with(
        &self,
        answering: impl Fn(GenerateRequest, RequestContext) -> Result<OutputStream, EngineError>
        + Send
        + Sync
        + 'static,
    ) {
        *self.answering.lock() = Arc::new(answering);
    }

    /// Makes discovery lose the instance.
    pub(super) fn lose_lease(&self) {
        self.lease.notify_one();
    }

    /// Reports the engine dead, if it was started.
    pub(super) fn kill_engine(&self) {
        if let Some(start) = &*self.start.lock() {
            start.health.report_dead("killed by the test");
        }
    }

    /// Reports a computed step.
    pub(super) fn compute_step(&self) {
        let start = self.start.lock();
        let health = &start.as_ref().expect("the engine was started").health;
        health.report_step();
    }

    /// Reports the engine down or up.
    pub(super) fn set_down(&self, is_down: bool) {
        let start = self.start.lock();
        let health = &start.as_ref().expect("the engine was started").health;
        if is_down {
            health.report_down("down by the test");
        } else {
            health.report_up();
        }
    }

    /// Sends a request on the path that clients use.
    pub(super) async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.offer().generate.generate(request, ctx).await
    }

    /// Sends a [`request`].
    pub(super) async fn send(&self, id: &str) -> Result<OutputStream, EngineError> {
        self.generate(request(), RequestContext::new(id)).await
    }

    /// Sends a [`request`] for this many tokens, and reads the answer.
    pub(super) async fn ask(&self, max_tokens: Option<u32>) -> Transcript {
        let mut request = request();
        request.stop.max_tokens = max_tokens;
        let outputs = self.generate(request, RequestContext::new("r")).await;
        read(outputs.unwrap()).await
    }

    pub(super) fn offer(&self) -> Offer {
        self.offer.lock().clone().expect("the worker is reachable")
    }

    pub(super) fn calls(&self) -> Vec<Call> {
        self.calls.borrow().clone()
    }

    pub(super) fn count(&self, call: Call) -> usize {
        self.calls.borrow().iter().filter(|c| **c == call).count()
    }

    /// Waits for the first call of a kind.
    pub(super) async fn called(&self, call: Call) {
        self.called_times(call, 1).await;
    }

    /// Waits until a call was made `times` times.
    pub(super) async fn called_times(&self, call: Call, times: usize) {
        let mut calls = self.calls.subscribe();
        let has_come = |calls: &Vec<Call>| calls.iter().filter(|c| **c == call).count() >= times;
        calls.wait_for(has_come).await.unwrap();
    }

    /// Returns the context of the last request that the engine received.
    pub(super) fn last_seen(&self) -> RequestContext {
        self.seen.lock().last().cloned().expect("a request came")
    }

    pub(super) fn aborted_ids(&self) -> Vec<String> {
        let aborted = self.aborted.lock();
        aborted.iter().map(|ctx| ctx.id().to_owned()).collect()
    }

    pub(super) fn cleanup_met_start(&self) -> bool {
        self.cleanup_met_start.load(Ordering::SeqCst)
    }

    /// Returns the value of a metric, by its name and labels in text form.
    pub(super) fn metric(&self, name: &str) -> u64 {
        let text = self.metrics.encode();
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.map_or(0, |value| value.parse().unwrap())
    }

    async fn enter(&self, call: Call) -> Result<(), EngineError> {
        self.calls.send_modify(|calls| calls.push(call));
        self.act(call).await
    }

    async fn act(&self, call: Call) -> Result<(), EngineError> {
        let act = match self.plan.lock().get_mut(&call) {
            Some(acts) => acts.pop_front().unwrap_or(Act::Succeed),
            None => Act::Succeed,
        };
        act.perform(call).await
    }
}

struct FakeEngine(Arc<World>);

struct Starting<'a>(&'a AtomicBool);

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

#[async_trait]
impl LLMEngine for FakeEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        *self.0.start.lock() = Some(ctx);
        self.0.is_starting.store(true, Ordering::SeqCst);
        let _starting = Starting(&self.0.is_starting);
        self.0.enter(Call::Start).await?;
        Ok(self.0.config.lock().clone())
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.0.seen.lock().push(ctx.clone());
        self.0.enter(Call::Generate).await?;
        let answering = Arc::clone(&self.0.answering.lock());
        answering(request, ctx)
    }

    async fn abort(&self, ctx: &RequestContext) {
        self.0.aborted.lock().push(ctx.clone());
        drop(self.0.act(Call::Abort).await);
    }

    async fn drain(&self, _ctx: DrainContext) -> Result<(), EngineError> {
        self.0.enter(Call::Drain).await
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        if self.0.is_starting.load(Ordering::SeqCst) {
            self.0.cleanup_met_start.store(true, Ordering::SeqCst);
        }
        self.0.enter(Call::Cleanup).await
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        self.0.controls.get().map(|controls| &**controls)
    }
}

struct FakeRegistrar(Arc<World>);

struct FakeRegistration {
    world: Arc<World>,
    offer: Offer,
}

#[async_trait]
impl Registrar for FakeRegistrar {
    async fn serve(&self, offer: Offer) -> Result<Box<dyn Registration>, EngineError> {
        self.0.enter(Call::Serve).await?;
        *self.0.offer.lock() = Some(offer.clone());
        let world = Arc::clone(&self.0);
        Ok(Box::new(FakeRegistration { world, offer }))
    }
}

#[async_trait]
impl Registration for FakeRegistration {
    async fn probe(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.world.enter(Call::Probe).await?;
        self.offer.generate.generate(request, ctx).await
    }

    async fn list(&self) -> Result<(), EngineError> {
        self.world.enter(Call::List).await
    }

    async fn unlist(&self) -> Result<(), EngineError> {
        self.world.enter(Call::Unlist).await
    }

    async fn lost(&self) {
        if self.world.act(Call::Lost).await.is_ok() {
            self.world.lease.notified().await;
        }
    }

    async fn close(&self) {
        // The port's signature allows no error here; a planned one counts as success.
        drop(self.world.enter(Call::Close).await);
    }
}

/// Distinct limits, so that a worker's duration shows which one it hit. No canary except the first.
pub(super) fn config() -> WorkerConfig {
    WorkerConfig {
        start_timeout: Duration::from_secs(1000),
        register_timeout: Duration::from_secs(10),
        grace: Duration::from_secs(30),
        drain_timeout: Duration::from_secs(20),
        cleanup_timeout: Duration::from_secs(40),
        canary: CanaryConfig {
            interval: None,
            ..CanaryConfig::default()
        },
        ..WorkerConfig::default()
    }
}

pub(super) fn spawn(world: &Arc<World>, config: WorkerConfig) -> WorkerHandle {
    let engine = Arc::new(FakeEngine(Arc::clone(world)));
    let registrar = Arc::new(FakeRegistrar(Arc::clone(world)));
    Worker::new(WORKER_ID, engine, config, registrar, world.metrics.clone()).spawn()
}

pub(super) async fn serving(world: &Arc<World>, config: WorkerConfig) -> WorkerHandle {
    let handle = spawn(world, config);
    handle.ready().await.unwrap();
    handle
}

/// Returns a serving worker in a world of its own, in which everything succeeds.
pub(super) async fn served(config: WorkerConfig) -> (Arc<World>, WorkerHandle) {
    let world = World::new();
    let handle = serving(&world, config).await;
    (world, handle)
}

/// Like [`served`]; the engine streams one token and then stalls.
pub(super) async fn stalling(config: WorkerConfig) -> (Arc<World>, WorkerHandle) {
    let (world, handle) = served(config).await;
    world.answer_with(|_, ctx| Ok(one_token_then_silence(ctx)));
    (world, handle)
}

/// Returns the report of a worker that ended; no task may remain.
pub(super) async fn ended(handle: &WorkerHandle) -> Report {
    let limit = Duration::from_secs(24 * 3600);
    let report = tokio::time::timeout(limit, handle.join())
        .await
        .expect("the worker ends");
    assert_eq!(handle.tasks(), 0, "a task outlives its worker");
    report
}

/// Waits until the worker is in this state.
pub(super) async fn reaches(handle: &WorkerHandle, state: State) {
    let mut states = handle.states();
    states.wait_for(|now| *now == state).await.unwrap();
}

/// Stops an idle worker.
pub(super) async fn stop_cleanly(handle: &WorkerHandle) {
    handle.stop();
    assert_eq!(ended(handle).await.outcome, Outcome::Clean);
}

/// Returns a request for four tokens after a prompt of two.
pub(super) fn request() -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens(MODEL, vec![1, 2]);
    request.stop.max_tokens = Some(4);
    request
}

/// The number of prompt tokens in [`request`].
pub(super) const PROMPT_TOKENS: u32 = 2;

/// Streams items as they are.
pub(super) fn raw(
    items: impl Stream<Item = Result<Output, EngineError>> + Send + 'static,
) -> OutputStream {
    OutputStream::from_raw(Box::pin(items))
}

/// Like [`raw`], with all items ready.
pub(super) fn raw_items<I>(items: I) -> OutputStream
where
    I: IntoIterator<Item = Result<Output, EngineError>>,
    I::IntoIter: Send + 'static,
{
    raw(futures_util::stream::iter(items))
}

/// Streams the tokens 0, 1, 2, ... up to `max_tokens`, at once.
pub(super) fn counting(request: GenerateRequest, ctx: RequestContext) -> OutputStream {
    let max_tokens = request.stop.max_tokens.unwrap_or(4);
    output::stream(ctx, move |out| async move {
        for token in 0..max_tokens {
            out.token(token).await?;
        }
        Ok(Finish::length())
    })
}

/// Streams one token, then nothing until the request is cancelled.
pub(super) fn one_token_then_silence(ctx: RequestContext) -> OutputStream {
    output::stream(ctx, |out| async move {
        out.token(0).await?;
        std::future::pending().await
    })
}

/// Streams a token every `pause`, up to `max_tokens`.
pub(super) fn slowly(
    request: GenerateRequest,
    ctx: RequestContext,
    pause: Duration,
) -> OutputStream {
    let max_tokens = request.stop.max_tokens.unwrap_or(4);
    output::stream(ctx, move |out| async move {
        for token in 0..max_tokens {
            tokio::time::sleep(pause).await;
            out.token(token).await?;
        }
        Ok(Finish::length())
    })
}
