//! KV blocks between a prefill and a decode instance over TCP on loopback, beside a bare TCP copy of the same bytes.
//!
//! Run with `cargo bench -p genset-engine-candle --bench transfer`. A random model of 125 million weights is served twice: by
//! one aggregated instance, and by a prefill and a decode instance, each with its own request plane. The instances that
//! compute prompts have all of them in their prefix caches, so only the handover is measured; the decode instance clears its
//! cache after each round. Each figure is the median of the rounds; each round does all of these in turn:
//!
//! - `copy`: sends the bytes from one socket to another with `read` and `write`.
//! - `fetch`: fetches the blocks and discards them.
//! - `first`, `second`: from the request to its first and second token, aggregated and disaggregated.
//!
//! Under `cargo test` it does nothing.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark prints, and fails by panicking"
)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::byte_size::ByteSize;
use genset_backend_common::ports::Generate;
use genset_backend_common::worker::{CanaryConfig, Worker, WorkerConfig, WorkerHandle};
use genset_backend_common::{
    GenerateRequest, LLMEngine, MetricsRegistry, Output, RequestContext, Role,
    transfer::{KvCarrier, TransferParams},
};
use genset_devtools::synthetic::{SyntheticSize, make_model};
use genset_engine_candle::{CandleArgs, CandleEngine, DeviceChoice, DtypeChoice};
use genset_router::{Layers, RouterConfig, connect};
use genset_runtime::discovery::{FileDiscovery, FileDiscoveryConfig};
use genset_runtime::plane::{TcpConfig, WireConfig, WirePlane};
use genset_runtime::{
    EndpointName, KvBlocksClient, LiveModel, ModelDirectory, Runtime, RuntimeRegistrar,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// The allocator of the `genset` binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const PROMPTS: [u32; 3] = [128, 1024, 3072];
const ROUNDS: usize = 15;
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes of one write of the bare copy, the size of an engine's pieces.
const WRITE_BYTES: usize = 1 << 20;

fn main() {
    let words: Vec<String> = std::env::args().collect();
    let is_asked = words.iter().any(|word| word == "--bench");
    if !is_asked || words.iter().any(|word| word == "--test") {
        return;
    }
    let threads = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    threads.block_on(measure());
}

async fn measure() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    make_model(&model, SyntheticSize::M100, 1).unwrap();
    let place = |name: &str| Place {
        model: model.clone(),
        listed: folder.path().join(name),
    };
    let whole = Fleet::start(&place("whole"), &[Role::Aggregated]).await;
    let apart = Fleet::start(&place("apart"), &[Role::Prefill, Role::Decode]).await;
    println!("prompt tokens, bytes; medians of {ROUNDS} rounds");
    for tokens in PROMPTS {
        prompt(tokens, &whole, &apart).await;
    }
    whole.stop().await;
    apart.stop().await;
}

/// Measures with a prompt of `tokens` tokens.
async fn prompt(tokens: u32, whole: &Fleet, apart: &Fleet) {
    let bytes = apart.fetch(tokens).await;
    let mut copying = Copying::start(bytes).await;
    let mut times = Times::default();
    // The first round is not counted: it computes prompts, opens connections and touches memory.
    for round in 0..=ROUNDS {
        let mut now = Times::default();
        now.copy.push(copying.copy().await);
        let began = Instant::now();
        let (fetched, taken) = apart.fetch_timed(tokens).await;
        assert_eq!(fetched, bytes, "after {:?}", began.elapsed());
        now.fetch.push(taken);
        now.whole.push(whole.first_two(tokens).await);
        apart.forget().await;
        now.apart.push(apart.first_two(tokens).await);
        if round > 0 {
            times.add(now);
        }
    }
    times.show(tokens, bytes);
}

/// The folders of a fleet's model and of its worker registrations.
struct Place {
    model: std::path::PathBuf,
    listed: std::path::PathBuf,
}

/// An instance with its own request plane.
struct Instance {
    role: Role,
    engine: Arc<CandleEngine>,
    worker: WorkerHandle,
    runtime: Runtime,
}

/// Instances, and the client that reaches them.
struct Fleet {
    instances: Vec<Instance>,
    way: Arc<dyn Generate>,
    model: String,
    client: Runtime,
}

impl Fleet {
    async fn start(place: &Place, roles: &[Role]) -> Self {
        let mut instances = Vec::new();
        for (id, role) in (1..).zip(roles) {
            instances.push(Instance::start(id, *role, place).await);
        }
        let client = runtime(&place.listed);
        let directory = ModelDirectory::follow(&client);
        let model = live_model(&directory, roles.len()).await;
        let layers = Layers::register(client.metrics(), RouterConfig::default());
        let way = connect(&directory, &model, &layers, PATIENCE)
            .await
            .unwrap();
        Self {
            instances,
            way,
            model: model.card.name,
            client,
        }
    }

    fn of_role(&self, role: Role) -> &Instance {
        self.instances.iter().find(|it| it.role == role).unwrap()
    }

    fn request(&self, tokens: u32) -> GenerateRequest {
        let prompt = (0..tokens).map(|place| (place * 7 + tokens) % 30_000 + 3);
        let mut request = GenerateRequest::from_tokens(&self.model, prompt.collect());
        request.stop.max_tokens = Some(2);
        request.stop.ignore_eos = true;
        request
    }

    /// The times from the request to its first and second token.
    async fn first_two(&self, tokens: u32) -> (Duration, Duration) {
        let began = Instant::now();
        let ctx = RequestContext::new("tokens");
        let mut outputs = self.way.generate(self.request(tokens), ctx).await.unwrap();
        let (mut times, mut count) = (Vec::new(), 0);
        while let Some(item) = outputs.next().await {
            count += item.unwrap().token_count();
            times.resize(count as usize, began.elapsed());
        }
        (times[0], times[1])
    }

    /// Clears the decode instance's prefix cache.
    async fn forget(&self) {
        let engine = &self.of_role(Role::Decode).engine;
        let controls = engine.controls().unwrap();
        controls.clear_prefix_cache().await.unwrap();
    }

    /// Makes the prefill instance compute a prompt, or find it in its cache; returns where its blocks are.
    async fn held(&self, tokens: u32) -> TransferParams {
        let ctx = RequestContext::new("held");
        let engine = &self.of_role(Role::Prefill).engine;
        let mut outputs = engine.generate(self.request(tokens), ctx).await.unwrap();
        let mut held = None;
        while let Some(item) = outputs.next().await {
            if let Output::Finished(finished) = item.unwrap() {
                held = finished.transfer;
            }
        }
        held.unwrap()
    }

    /// The number of bytes of a prompt's blocks.
    async fn fetch(&self, tokens: u32) -> usize {
        self.fetch_timed(tokens).await.0
    }

    /// Fetches the blocks of a prompt as a decode instance does, and discards them.
    async fn fetch_timed(&self, tokens: u32) -> (usize, Duration) {
        let held = self.held(tokens).await;
        let decode = KvBlocksClient::new(&self.of_role(Role::Decode).runtime);
        let began = Instant::now();
        let ctx = RequestContext::new("fetch");
        let mut pieces = decode.fetch(&held, ctx).await.unwrap();
        let mut bytes = 0;
        while let Some(piece) = pieces.next().await {
            bytes += piece.unwrap().len();
        }
        (bytes, began.elapsed())
    }

    async fn stop(self) {
        drop(self.way);
        for instance in self.instances {
            instance.worker.shutdown().await;
            instance.runtime.shutdown().await;
        }
        self.client.shutdown().await;
    }
}

impl Instance {
    async fn start(id: u64, role: Role, place: &Place) -> Self {
        let args = CandleArgs {
            device: DeviceChoice::Cpu,
            kv_cache_dtype: DtypeChoice::F32,
            kv_cache_memory: Some(ByteSize(512 << 20)),
            ..CandleArgs::default()
        };
        let engine = Arc::new(CandleEngine::from_args(&args, &place.model));
        let config = WorkerConfig {
            role,
            canary: CanaryConfig {
                interval: None,
                ..CanaryConfig::default()
            },
            ..WorkerConfig::default()
        };
        let runtime = runtime(&place.listed);
        let name = EndpointName::try_new("bench", role.name(), "generate").unwrap();
        let registrar = Arc::new(RuntimeRegistrar::new(runtime.clone(), name));
        let metrics = MetricsRegistry::default();
        let worker = Worker::new(id, engine.clone(), config, registrar, metrics).spawn();
        worker.ready().await.unwrap();
        Self {
            role,
            engine,
            worker,
            runtime,
        }
    }
}

/// A process registered in `folder`.
fn runtime(folder: &Path) -> Runtime {
    let metrics = MetricsRegistry::default();
    let discovery = FileDiscovery::open(folder.into(), FileDiscoveryConfig::default()).unwrap();
    let plane = WirePlane::tcp(TcpConfig::default(), WireConfig::default(), &metrics).unwrap();
    Runtime::on(None, Arc::new(discovery), Arc::new(plane), metrics)
}

/// The only model, once `pools` pools serve it.
async fn live_model(directory: &ModelDirectory, pools: usize) -> LiveModel {
    let mut models = directory.subscribe();
    let has_pools = models.wait_for(|models| {
        let model = models.values().next();
        model.is_some_and(|model| model.pools.len() == pools)
    });
    let models = tokio::time::timeout(PATIENCE, has_pools).await.unwrap();
    models.unwrap().values().next().unwrap().clone()
}

/// The two ends of a connection, and the bytes to copy over it.
struct Copying {
    asks: TcpStream,
    read: Vec<u8>,
    _writes: JoinSet<()>,
}

impl Copying {
    async fn start(bytes: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let asks = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (mut answers, _) = listener.accept().await.unwrap();
        for end in [&asks, &answers] {
            end.set_nodelay(true).unwrap();
        }
        let mut writes = JoinSet::new();
        writes.spawn(async move {
            let all = vec![7; bytes];
            // Until the other end closes.
            while answers.read_u8().await.is_ok() {
                for piece in all.chunks(WRITE_BYTES) {
                    answers.write_all(piece).await.unwrap();
                }
            }
        });
        Self {
            asks,
            read: vec![0; bytes],
            _writes: writes,
        }
    }

    async fn copy(&mut self) -> Duration {
        let began = Instant::now();
        self.asks.write_u8(1).await.unwrap();
        self.asks.read_exact(&mut self.read).await.unwrap();
        began.elapsed()
    }
}

#[derive(Default)]
struct Times {
    copy: Vec<Duration>,
    fetch: Vec<Duration>,
    whole: Vec<(Duration, Duration)>,
    apart: Vec<(Duration, Duration)>,
}

impl Times {
    fn add(&mut self, more: Self) {
        self.copy.extend(more.copy);
        self.fetch.extend(more.fetch);
        self.whole.extend(more.whole);
        self.apart.extend(more.apart);
    }

    fn show(&self, tokens: u32, bytes: usize) {
        let megabytes = bytes as f64 / 1e6;
        let gigabytes_a_second = |ms: f64| megabytes / ms;
        let (copy, fetch) = (median(&self.copy), median(&self.fetch));
        println!(
            "{tokens} tokens, {megabytes:.1} MB: copy {copy:.2} ms ({:.2} GB/s), fetch {fetch:.2} ms ({:.2} GB/s)",
            gigabytes_a_second(copy),
            gigabytes_a_second(fetch),
        );
        let first = |times: &[(Duration, Duration)]| {
            median(&times.iter().map(|(first, _)| *first).collect::<Vec<_>>())
        };
        let gap = |times: &[(Duration, Duration)]| {
            let gaps = times.iter().map(|(first, second)| *second - *first);
            median(&gaps.collect::<Vec<_>>())
        };
        let show = |what: &str, whole: f64, apart: f64| {
            let added = apart - whole;
            println!(
                "  {what}: whole {whole:.2} ms, in two legs {apart:.2} ms: {added:.2} ms more"
            );
        };
        show("first token", first(&self.whole), first(&self.apart));
        show("first to second", gap(&self.whole), gap(&self.apart));
        let aim = 5.0 + 1.3 * megabytes / 2.0;
        println!("  the aim for that: 5 ms and 1.3 times the bytes at 2 GB/s, {aim:.2} ms");
    }
}

/// The median in milliseconds.
fn median(times: &[Duration]) -> f64 {
    let mut times = times.to_vec();
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e3
}
