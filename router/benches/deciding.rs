//! The cost of choosing an instance.
//!
//! Run with `cargo bench -p genset-router --bench deciding`. All workers hold the first 16 blocks of the prompt; one in eight
//! holds all 64.
//!
//! - `lookup`: finds the holders of the prompt among a number of workers.
//! - `request`: a request with that prompt through the layers to an in-process worker whose single token is ready. The extra time
//!   of `kv` over `round-robin` is the choice: hashing 1,024 tokens, the lookup, each worker's cost, and counting the request's
//!   work.
//! - `busy`: the same as `request` with four open requests a worker, whose prompts share the first 16 blocks with that prompt.
//! - `full`: the same as `request` with 999 of 1,000 workers filled by others. `kv` learns of it from their loads, `round-robin`
//!   from refusals.

#![expect(
    clippy::unwrap_used,
    reason = "a benchmark that cannot be set up has nothing to measure"
)]

use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use futures_util::StreamExt;
use genset_backend_common::kv::{BlockHash, KvEventData, hash_blocks};
use genset_backend_common::output::{self, Finish, OutputStream};
use genset_backend_common::ports::Generate;
use genset_backend_common::worker::{
    CanaryConfig, RequestLimits, Worker, WorkerConfig, WorkerHandle,
};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, GenerateRequest, LLMEngine, MetricsRegistry,
    RequestContext, StartContext, async_trait,
};
use genset_router::index::{Lookup, index};
use genset_router::{Layers, RouterConfig, RouterMode, connect};
use genset_runtime::{
    EndpointName, InstanceId, LiveModel, ModelDirectory, Runtime, RuntimeRegistrar, SelectionMode,
};

const WORKERS: [u32; 3] = [8, 64, 1000];
const MODES: [RouterMode; 2] = [RouterMode::Plain(SelectionMode::RoundRobin), RouterMode::Kv];
const BLOCK_TOKENS: NonZeroU32 = NonZeroU32::new(16).unwrap();
const PROMPT_TOKENS: u32 = 1024;
const SHARED_BLOCKS: usize = 16;
const PATIENCE: Duration = Duration::from_secs(60);

fn prompt() -> Vec<u32> {
    (0..PROMPT_TOKENS).collect()
}

/// Returns the blocks of the prompt that a worker holds.
fn held_by(worker: u32) -> Vec<BlockHash> {
    let mut blocks = hash_blocks(None, &prompt(), BLOCK_TOKENS);
    if !worker.is_multiple_of(8) {
        blocks.truncate(SHARED_BLOCKS);
    }
    blocks
}

/// An engine whose single token is ready.
struct Ready(u32);

#[async_trait]
impl LLMEngine for Ready {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        ctx.kv_events.publish(KvEventData::Stored {
            parent: None,
            blocks: held_by(self.0),
        });
        let mut can = Capabilities::tokens();
        can.kv_events = true;
        let mut config = EngineConfig::new("m", 1 << 20).with_capabilities(can);
        config.kv_block_size = Some(BLOCK_TOKENS);
        config.kv_total_blocks = Some(1 << 20);
        Ok(config)
    }

    async fn generate(
        &self,
        _request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        Ok(output::stream(ctx, |out| async move {
            out.token(1).await?;
            Ok(Finish::length())
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        Ok(())
    }
}

fn lookup(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("lookup");
    let prompt = held_by(0);
    for workers in WORKERS {
        let (mut writer, reader) = index();
        for worker in 0..workers {
            writer.store(worker, None, &held_by(worker)).unwrap();
        }
        let mut lookup = Lookup::default();
        group.bench_function(BenchmarkId::from_parameter(workers), |bencher| {
            bencher.iter(|| {
                reader.find(black_box(&prompt), &mut lookup);
                lookup.overlaps().len()
            });
        });
        assert_eq!(lookup.overlaps().len(), workers as usize);
    }
    group.finish();
}

/// In-process workers.
struct Fleet {
    runtime: Runtime,
    directory: ModelDirectory,
    workers: Vec<WorkerHandle>,
}

impl Fleet {
    /// Starts them on the current runtime. The first `small` of them run one request at a time.
    fn start(workers: u32, small: u32) -> Self {
        let runtime = Runtime::in_process();
        let directory = ModelDirectory::follow(&runtime);
        let worker = |id: u32| {
            let mut limits = RequestLimits::default();
            if id < small {
                limits.max_running = 1;
                limits.max_waiting = 0;
            }
            let config = WorkerConfig {
                limits,
                canary: CanaryConfig {
                    interval: None,
                    ..CanaryConfig::default()
                },
                ..WorkerConfig::default()
            };
            let registrar = RuntimeRegistrar::new(runtime.clone(), EndpointName::default());
            let metrics = MetricsRegistry::default();
            let engine = Arc::new(Ready(id));
            Worker::new(
                u64::from(id) + 1,
                engine,
                config,
                Arc::new(registrar),
                metrics,
            )
            .spawn()
        };
        let workers: Vec<_> = (0..workers).map(worker).collect();
        Self {
            runtime,
            directory,
            workers,
        }
    }

    /// Waits for the model that all of them serve.
    async fn model(&self) -> LiveModel {
        let mut models = self.directory.subscribe();
        let count = self.workers.len();
        let all = models.wait_for(|models| {
            let model = models.get("m");
            model.is_some_and(|model| model.instances().len() == count)
        });
        all.await.unwrap().get("m").unwrap().clone()
    }

    /// Fills the first `small` workers, until the answers are dropped.
    async fn fill(&self, small: u32) -> Vec<OutputStream> {
        let model = self.model().await;
        let others = (self.directory).client(&model, SelectionMode::RoundRobin, PATIENCE);
        let others = others.await.unwrap();
        let mut answers = Vec::new();
        for id in 1..=u64::from(small) {
            let request = GenerateRequest::from_tokens("m", prompt());
            let answer = others.direct(InstanceId(id), request, RequestContext::new("r"));
            answers.push(answer.await.unwrap());
        }
        answers
    }

    /// Builds the layers over all workers, and gives them time to discover the workers.
    async fn way(&self, mode: RouterMode) -> Arc<dyn Generate> {
        let model = self.model().await;
        let config = RouterConfig {
            mode,
            ..RouterConfig::default()
        };
        let layers = Layers::register(&MetricsRegistry::default(), config);
        let way = connect(&self.directory, &model, &layers, PATIENCE)
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_secs(2)).await;
        way
    }

    async fn stop(self) {
        for worker in self.workers {
            worker.shutdown().await;
        }
        self.runtime.shutdown().await;
    }
}

async fn one_token(way: &dyn Generate, prompt: &[u32]) {
    let mut request = GenerateRequest::from_tokens("m", prompt.to_vec());
    request.stop.max_tokens = Some(1);
    let mut outputs = way
        .generate(request, RequestContext::new("r"))
        .await
        .unwrap();
    while let Some(item) = outputs.next().await {
        black_box(item.unwrap());
    }
}

/// Begins requests that stay open, until the answers are dropped. Each has its own prompt after the shared blocks.
async fn begin(way: &dyn Generate, requests: u32) -> Vec<OutputStream> {
    let shared = SHARED_BLOCKS * usize::try_from(BLOCK_TOKENS.get()).unwrap();
    let mut answers = Vec::new();
    for number in 1..=requests {
        let mut tokens = prompt();
        for token in tokens.iter_mut().skip(shared) {
            *token += number * PROMPT_TOKENS;
        }
        let request = GenerateRequest::from_tokens("m", tokens);
        let answer = way.generate(request, RequestContext::new("r")).await;
        answers.push(answer.unwrap());
    }
    answers
}

/// Benchmarks requests through the layers over a number of workers. Others have filled `small` of them, and `open` requests went
/// through the same layers before.
fn through_layers(criterion: &mut Criterion, name: &str, workers: u32, small: u32, open: u32) {
    let threads = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let mut group = criterion.benchmark_group(name);
    let prompt = prompt();
    let fleet = threads.block_on(async { Fleet::start(workers, small) });
    let answers = threads.block_on(fleet.fill(small));
    for mode in MODES {
        let way = threads.block_on(fleet.way(mode));
        let open = threads.block_on(begin(&*way, open));
        group.bench_function(BenchmarkId::new(mode.to_string(), workers), |bencher| {
            bencher.iter(|| threads.block_on(one_token(&*way, &prompt)));
        });
        drop(open);
    }
    drop(answers);
    threads.block_on(fleet.stop());
    group.finish();
}

fn request(criterion: &mut Criterion) {
    for workers in WORKERS {
        through_layers(criterion, "request", workers, 0, 0);
    }
}

fn busy(criterion: &mut Criterion) {
    through_layers(criterion, "busy", 1000, 0, 4000);
}

fn full(criterion: &mut Criterion) {
    through_layers(criterion, "full", 1000, 999, 0);
}

criterion_group!(benches, lookup, request, busy, full);
criterion_main!(benches);
