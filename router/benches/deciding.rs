//! What it costs to choose an instance.
//!
//! Run with `cargo bench -p genset-router --bench deciding`. All workers hold the first 16 blocks of the prompt, and one in eight
//! all of its 64.
//!
//! - `lookup`: who holds what of the prompt, of so many workers.
//! - `request`: a request of that prompt through the layers and a worker of this process, whose one token is ready. What `kv` takes
//!   longer than `round-robin` is the choice: the hashes of 1,024 tokens, the lookup, the cost of each worker, and the account of
//!   what it has to do.

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
use genset_backend_common::kv::{BlockHash, KvEventData, Xxh3BlockHasher, hash_blocks};
use genset_backend_common::output::{self, Finish, OutputStream};
use genset_backend_common::ports::Generate;
use genset_backend_common::worker::{CanaryConfig, Worker, WorkerConfig, WorkerHandle};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, GenerateRequest, LLMEngine, MetricsRegistry,
    RequestContext, StartContext, async_trait,
};
use genset_router::index::{Lookup, index};
use genset_router::{Layers, RouterConfig, RouterMode, connect};
use genset_runtime::{EndpointName, ModelDirectory, Runtime, RuntimeRegistrar, SelectionMode};

const WORKERS: [u32; 3] = [8, 64, 1000];
const BLOCK_TOKENS: NonZeroU32 = NonZeroU32::new(16).unwrap();
const PROMPT_TOKENS: u32 = 1024;
const SHARED_BLOCKS: usize = 16;
const PATIENCE: Duration = Duration::from_secs(60);

fn prompt() -> Vec<u32> {
    (0..PROMPT_TOKENS).collect()
}

/// What a worker holds of the prompt.
fn held_by(worker: u32) -> Vec<BlockHash> {
    let mut blocks = hash_blocks(&Xxh3BlockHasher::new(), None, &prompt(), BLOCK_TOKENS);
    if !worker.is_multiple_of(8) {
        blocks.truncate(SHARED_BLOCKS);
    }
    blocks
}

/// An engine whose one token is ready.
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

/// Workers of this process.
struct Fleet {
    runtime: Runtime,
    directory: ModelDirectory,
    workers: Vec<WorkerHandle>,
}

impl Fleet {
    /// Starts them on the present runtime.
    fn start(workers: u32) -> Self {
        let runtime = Runtime::in_process();
        let directory = ModelDirectory::follow(&runtime);
        let worker = |id: u32| {
            let config = WorkerConfig {
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

    /// The layers over all of them, once they were followed for a while.
    async fn way(&self, mode: RouterMode) -> Arc<dyn Generate> {
        let mut models = self.directory.subscribe();
        let count = self.workers.len();
        let all = models.wait_for(|models| {
            let model = models.get("m");
            model.is_some_and(|model| model.instances().len() == count)
        });
        let model = all.await.unwrap().get("m").unwrap().clone();
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

fn request(criterion: &mut Criterion) {
    let threads = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let mut group = criterion.benchmark_group("request");
    let prompt = prompt();
    for workers in WORKERS {
        let fleet = threads.block_on(async { Fleet::start(workers) });
        for mode in [RouterMode::Plain(SelectionMode::RoundRobin), RouterMode::Kv] {
            let way = threads.block_on(fleet.way(mode));
            group.bench_function(BenchmarkId::new(mode.to_string(), workers), |bencher| {
                bencher.iter(|| threads.block_on(one_token(&*way, &prompt)));
            });
        }
        threads.block_on(fleet.stop());
    }
    group.finish();
}

criterion_group!(benches, lookup, request);
criterion_main!(benches);
