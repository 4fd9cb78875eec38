//! Runtimes, endpoints and Workers for tests.

use std::future::{Ready, ready};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use genset_backend_common::output::{self, Finish, Usage};
use genset_backend_common::worker::{CanaryConfig, Worker, WorkerConfig, WorkerHandle};
use genset_backend_common::{
    EngineConfig, EngineControls, EngineError, GenerateRequest, LLMEngine, MetricsRegistry, Output,
    OutputStream, RequestContext, StartContext, async_trait, card::Artifact, controls::SleepLevel,
};
use genset_engine_sample::{SampleArgs, SampleEngine};
use genset_runtime::discovery::{Address, InstanceRecord, MemoryDiscovery};
use genset_runtime::plane::{
    Handler, MemoryPlane, ResponseStream, TcpConfig, WireConfig, WirePlane,
};
use genset_runtime::{Endpoint, EndpointName, InstanceId, Runtime, RuntimeRegistrar, Serving};

/// The time after which a test has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what)
        .await
        .expect("it never came")
}

/// Lets other tasks run until `holds` returns true. After its first turns it sleeps between them, which advances a paused clock;
/// if it only waits for tasks, it does not get that far.
pub(crate) async fn until(holds: impl Fn() -> bool) {
    const TURNS_AT_ONCE: u32 = 100;
    soon(async {
        let mut turns = 0;
        while !holds() {
            if turns < TURNS_AT_ONCE {
                turns += 1;
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    })
    .await;
}

pub(crate) fn ctx() -> RequestContext {
    RequestContext::new("test")
}

/// A runtime and its discovery.
pub(crate) fn runtime() -> (Runtime, MemoryDiscovery) {
    let discovery = MemoryDiscovery::new();
    let runtime = Runtime::new(Arc::new(discovery.clone()), Arc::new(MemoryPlane::new()));
    (runtime, discovery)
}

/// A plane over TCP on loopback, like that of another process.
pub(crate) fn over_tcp(config: WireConfig, metrics: &MetricsRegistry) -> Arc<WirePlane> {
    Arc::new(WirePlane::tcp(TcpConfig::default(), config, metrics).unwrap())
}

pub(crate) fn endpoint(runtime: &Runtime, name: &str) -> Endpoint {
    let component = runtime.namespace("test").unwrap().component("c").unwrap();
    component.endpoint(name).unwrap()
}

/// Serves and lists a handler under an id.
pub(crate) async fn listed<Req, Resp>(
    endpoint: &Endpoint,
    id: u64,
    handler: Arc<dyn Handler<Req, Resp>>,
) -> Serving
where
    Req: genset_runtime::plane::Payload,
    Resp: genset_runtime::plane::Payload,
{
    let serving = endpoint.serve_as(InstanceId(id), handler).await.unwrap();
    serving.list(None).await.unwrap();
    serving
}

/// Responds to every request with the items, or the refusal, of a function; counts the calls.
pub(crate) struct Answering<F> {
    answer: F,
    calls: AtomicUsize,
}

impl<F> Answering<F> {
    pub(crate) fn new(answer: F) -> Arc<Self> {
        Arc::new(Self {
            answer,
            calls: AtomicUsize::new(0),
        })
    }

    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl<F, Req, Resp> Handler<Req, Resp> for Answering<F>
where
    F: Fn(Req) -> Result<Vec<Resp>, EngineError> + Send + Sync + 'static,
    Req: Send + 'static,
    Resp: Send + 'static,
{
    async fn handle(
        &self,
        request: Req,
        _ctx: RequestContext,
    ) -> Result<ResponseStream<Resp>, EngineError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        Ok(Box::pin(stream::iter((self.answer)(request)?).map(Ok)))
    }
}

/// A handler that is a function.
struct Function<A>(A);

#[async_trait]
impl<A, F, Req, Resp> Handler<Req, Resp> for Function<A>
where
    A: Fn(Req, RequestContext) -> F + Send + Sync + 'static,
    F: Future<Output = Result<ResponseStream<Resp>, EngineError>> + Send + 'static,
    Req: Send + 'static,
    Resp: Send + 'static,
{
    async fn handle(
        &self,
        request: Req,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Resp>, EngineError> {
        (self.0)(request, ctx).await
    }
}

pub(crate) fn handler<A, F, Req, Resp>(answer: A) -> Arc<dyn Handler<Req, Resp>>
where
    A: Fn(Req, RequestContext) -> F + Send + Sync + 'static,
    F: Future<Output = Result<ResponseStream<Resp>, EngineError>> + Send + 'static,
    Req: Send + 'static,
    Resp: Send + 'static,
{
    Arc::new(Function(answer))
}

/// A response of these items.
pub(crate) fn streaming<T: Send + 'static>(
    items: impl Stream<Item = Result<T, EngineError>> + Send + 'static,
) -> Ready<Result<ResponseStream<T>, EngineError>> {
    let items: ResponseStream<T> = Box::pin(items);
    ready(Ok(items))
}

/// Accepts requests and never sends an item.
pub(crate) fn silent<Req: Send + 'static, Resp: Send + 'static>() -> Arc<dyn Handler<Req, Resp>> {
    handler(|_: Req, _ctx: RequestContext| streaming(stream::pending()))
}

/// The record of an instance at this address, without a card.
pub(crate) fn record(
    endpoint: &EndpointName,
    id: u64,
    plane: &str,
    location: String,
) -> InstanceRecord {
    InstanceRecord {
        endpoint: endpoint.clone(),
        instance: InstanceId(id),
        address: Address {
            plane: plane.into(),
            location,
        },
        card: None,
        started_ms: 0,
    }
}

/// The sample engine with this pause before each token.
pub(crate) fn sample(token_delay_ms: u64) -> Arc<dyn LLMEngine> {
    Arc::new(SampleEngine::from_args(&SampleArgs {
        vocab_size: 1000,
        token_delay_ms,
    }))
}

/// An engine that keeps its start context, and counts requests.
#[derive(Default)]
pub(crate) struct Publishing {
    pub(crate) start: OnceLock<StartContext>,
    pub(crate) requests: AtomicU32,
}

#[async_trait]
impl LLMEngine for Publishing {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        drop(self.start.set(ctx));
        Ok(EngineConfig::new("publishing", 100))
    }

    async fn generate(
        &self,
        _request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        Ok(output::stream(ctx, |out| async move {
            out.token(1).await?;
            Ok(Finish::stop())
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        Ok(())
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        Some(self)
    }
}

#[async_trait]
impl EngineControls for Publishing {
    async fn sleep(&self, level: SleepLevel) -> Result<(), EngineError> {
        assert_eq!(level, SleepLevel::Weights);
        Ok(())
    }
}

/// A config without periodic canaries, publishing `artifacts`.
pub(crate) fn worker_config(artifacts: Vec<Artifact>) -> WorkerConfig {
    WorkerConfig {
        artifacts,
        canary: CanaryConfig {
            interval: None,
            ..CanaryConfig::default()
        },
        ..WorkerConfig::default()
    }
}

/// Starts a Worker under the default name and waits until it serves.
pub(crate) async fn start(
    runtime: &Runtime,
    id: u64,
    engine: Arc<dyn LLMEngine>,
    config: WorkerConfig,
) -> WorkerHandle {
    let name = EndpointName::default();
    let registrar = Arc::new(RuntimeRegistrar::new(runtime.clone(), name));
    // Its own registry: two Workers in one process would register the same names.
    let metrics = MetricsRegistry::default();
    let worker = Worker::new(id, engine, config, registrar, metrics).spawn();
    soon(worker.ready()).await.expect("the worker starts");
    worker
}

pub(crate) async fn shut_down(workers: impl IntoIterator<Item = WorkerHandle>) {
    for worker in workers {
        soon(worker.shutdown()).await;
    }
}

/// A request for `max_tokens` tokens.
pub(crate) fn request(max_tokens: u32) -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens("sample", vec![1, 2, 3]);
    request.stop.max_tokens = Some(max_tokens);
    request
}

/// Reads a stream to its end.
pub(crate) async fn finish(mut outputs: OutputStream) -> Result<Usage, EngineError> {
    while let Some(item) = soon(outputs.next()).await {
        if let Output::Finished(finished) = item? {
            return Ok(finished.usage);
        }
    }
    panic!("a stream without a terminal");
}
