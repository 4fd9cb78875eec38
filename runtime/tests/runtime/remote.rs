//! A live endpoint as an engine: the conformance kit over every plane, and other engine functions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use genset_backend_common::worker::WorkerHandle;
use genset_backend_common::{
    EngineConfig, EngineError, ErrorKind, GenerateRequest, LLMEngine, MetricsRegistry, ModelCard,
    OutputStream, RequestContext, StartContext, async_trait,
};
use genset_conformance::{Options, Scenario, Subject, Verdict, run_conformance_with};
use genset_runtime::discovery::{Discovery, Entry, InstanceRecord, Lease, MemoryDiscovery, Watch};
use genset_runtime::plane::{MemoryPlane, RequestPlane};
use genset_runtime::{EndpointName, InstanceId, RemoteConfig, RemoteEngine, Runtime};

use crate::plane::deaf;
use crate::support::{
    ctx, finish, over_tcp, record, request, runtime, sample, shut_down, soon, start, until,
    worker_config,
};

/// Creates the plane of another process.
type MakePlane = Arc<dyn Fn() -> Arc<dyn RequestPlane> + Send + Sync>;

/// The runtime of another process: all share only discovery.
fn process(discovery: &MemoryDiscovery, plane: &MakePlane) -> Runtime {
    let discovery: Arc<dyn Discovery> = Arc::new(discovery.clone());
    Runtime::new(discovery, plane())
}

/// Runs the kit on a worker, each check from its own process, and asserts that every applicable check passes.
fn assert_conformant_over(plane: MakePlane) {
    let workers = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let discovery = MemoryDiscovery::new();
    // Tokens are slow, so that a response can be cancelled before its end.
    let worker: WorkerHandle = workers.block_on(async {
        let runtime = process(&discovery, &plane);
        start(&runtime, 1, sample(1), worker_config(Vec::new())).await
    });
    let engine = move |_: &Scenario| {
        let (discovery, plane) = (discovery.clone(), Arc::clone(&plane));
        let connect = move || {
            let runtime = process(&discovery, &plane);
            async move { Ok::<_, EngineError>(runtime) }.boxed()
        };
        let config = RemoteConfig::new(EndpointName::default());
        Subject::new(RemoteEngine::connecting(connect, config))
    };
    let report = run_conformance_with(engine, &Options::default());
    workers.block_on(worker.shutdown());
    let mut verdicts: BTreeMap<&str, usize> = BTreeMap::new();
    for check in &report.checks {
        let verdict = match check.verdict {
            Verdict::Pass => "pass",
            Verdict::Skip { .. } => "skip",
            Verdict::Measured { .. } => "measured",
            Verdict::Fail { .. }
            | Verdict::ExpectedFail { .. }
            | Verdict::UnexpectedPass { .. } => "fail",
        };
        *verdicts.entry(verdict).or_default() += 1;
    }
    assert!(report.is_good(), "{}", report.to_terminal(false));
    assert!(verdicts["pass"] > 80, "{verdicts:?}");
}

#[test]
fn it_passes_the_conformance_kit_over_memory() {
    let plane = MemoryPlane::new();
    assert_conformant_over(Arc::new(move || Arc::new(plane.clone())));
}

#[test]
fn it_passes_the_conformance_kit_over_tcp() {
    assert_conformant_over(Arc::new(|| over_tcp(deaf(), &MetricsRegistry::default())));
}

#[cfg(feature = "nats")]
#[test]
fn it_passes_the_conformance_kit_over_nats() {
    let server = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(crate::plane::NatsServer::start());
    assert_conformant_over(Arc::new(move || Arc::new(server.plane(deaf()))));
}

fn engine(runtime: &Runtime, instance: Option<u64>) -> RemoteEngine {
    let config = RemoteConfig {
        instance: instance.map(InstanceId),
        wait: Duration::from_millis(50),
        ..RemoteConfig::new(EndpointName::default())
    };
    RemoteEngine::new(runtime.clone(), config)
}

#[tokio::test]
async fn without_a_worker_the_start_says_what_it_waited_for() {
    let (runtime, _) = runtime();
    let error = engine(&runtime, None)
        .start(StartContext::detached(1))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(
        error.message().contains("genset.backend.generate"),
        "{error}"
    );
}

#[tokio::test]
async fn an_engine_of_one_instance_passes_on_its_load() {
    let (runtime, _) = runtime();
    let worker = start(&runtime, 7, sample(5), worker_config(Vec::new())).await;
    let engine = engine(&runtime, Some(7));
    let start_ctx = StartContext::detached(1);
    let declared = soon(engine.start(start_ctx.clone())).await.unwrap();
    assert_eq!(
        declared.vocab_size.map(std::num::NonZeroU32::get),
        Some(1000)
    );
    let answer = soon(engine.generate(request(1000), ctx())).await.unwrap();
    let load = start_ctx.load.subscribe();
    until(|| load.borrow().running_requests == 1).await;
    drop(answer);
    until(|| load.borrow().running_requests == 0).await;
    engine.cleanup().await.unwrap();
    soon(worker.shutdown()).await;
}

/// An engine that declares how many sequences it runs at once.
struct Seated(Arc<dyn LLMEngine>, u32);

#[async_trait]
impl LLMEngine for Seated {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let mut config = self.0.start(ctx).await?;
        config.max_num_seqs = Some(self.1);
        Ok(config)
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.0.generate(request, ctx).await
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.0.cleanup().await
    }
}

#[tokio::test]
async fn it_runs_as_many_sequences_at_once_as_its_worker() {
    let (runtime, _) = runtime();
    let seated = |seats| Arc::new(Seated(sample(0), seats));
    let workers = [
        start(&runtime, 1, seated(4), worker_config(Vec::new())).await,
        start(&runtime, 2, seated(2), worker_config(Vec::new())).await,
    ];
    for (instance, seats) in [(None, None), (Some(1), Some(4)), (Some(2), Some(2))] {
        let engine = engine(&runtime, instance);
        let declared = soon(engine.start(StartContext::detached(1))).await.unwrap();
        assert_eq!(declared.max_num_seqs, seats, "{instance:?}");
        engine.cleanup().await.unwrap();
    }
    shut_down(workers).await;
}

#[tokio::test]
async fn controls_travel_to_the_worker_and_are_refused_there() {
    let (runtime, _) = runtime();
    let worker = start(&runtime, 7, sample(0), worker_config(Vec::new())).await;
    let engine = engine(&runtime, None);
    soon(engine.start(StartContext::detached(1))).await.unwrap();
    let controls = engine.controls().unwrap();
    let error = soon(controls.wake()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("wake"), "{error}");
    soon(worker.shutdown()).await;
}

/// Discovery whose watches go on, and that answers nothing.
struct Silent(MemoryDiscovery);

#[async_trait]
impl Discovery for Silent {
    async fn lease(&self) -> Result<Box<dyn Lease>, EngineError> {
        self.0.lease().await
    }

    async fn get(&self, _prefix: &str) -> Result<Vec<Entry>, EngineError> {
        Err(EngineError::new(ErrorKind::Unavailable, "it is away"))
    }

    async fn watch(&self, prefix: &str) -> Result<Box<dyn Watch>, EngineError> {
        self.0.watch(prefix).await
    }
}

#[tokio::test]
async fn controls_of_a_known_worker_need_no_discovery() {
    let discovery = Arc::new(Silent(MemoryDiscovery::new()));
    let runtime = Runtime::new(discovery, Arc::new(MemoryPlane::new()));
    let worker = start(&runtime, 7, sample(0), worker_config(Vec::new())).await;
    let engine = engine(&runtime, None);
    soon(engine.start(StartContext::detached(1))).await.unwrap();
    let controls = engine.controls().unwrap();
    // It may know the worker's `control` a moment later.
    let refused = async {
        while controls.wake().await.unwrap_err().kind() != ErrorKind::Unsupported {
            tokio::task::yield_now().await;
        }
    };
    soon(refused).await;
    soon(worker.shutdown()).await;
}

#[tokio::test]
async fn a_worker_that_lists_no_control_supports_none() {
    let (runtime, discovery) = runtime();
    let listed = InstanceRecord {
        card: Some(ModelCard::from_config(&EngineConfig::new("m", 100))),
        ..record(&EndpointName::default(), 7, "memory", "nowhere".into())
    };
    let lease = discovery.lease().await.unwrap();
    lease.put(listed.to_entry().unwrap()).await.unwrap();
    let engine = engine(&runtime, None);
    soon(engine.start(StartContext::detached(1))).await.unwrap();
    let error = soon(engine.controls().unwrap().wake()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

#[tokio::test]
async fn one_stands_for_several_workers() {
    let (runtime, _) = runtime();
    let workers = [
        start(&runtime, 1, sample(0), worker_config(Vec::new())).await,
        start(&runtime, 2, sample(0), worker_config(Vec::new())).await,
    ];
    let engine = engine(&runtime, None);
    soon(engine.start(StartContext::detached(1))).await.unwrap();
    for _ in 0..4 {
        let answer = soon(engine.generate(request(3), ctx())).await.unwrap();
        assert_eq!(finish(answer).await.unwrap().completion_tokens, 3);
    }
    let error = soon(engine.controls().unwrap().wake()).await.unwrap_err();
    assert!(error.message().contains("2 workers"), "{error}");
    shut_down(workers).await;
}
