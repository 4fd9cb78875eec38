//! The cost of a token between an engine and the reader of its stream, with one token per item.
//!
//! Run with `cargo bench -p genset-backend-common --bench output`. An iteration is one request of 4096 tokens; elements are
//! tokens, so the time of an element is the time of a token. `stream` and `channel` are the helpers alone; `worker_*`
//! puts the Worker's adapter and guard on top; `bare` is a hand-written stream, the floor of what reading costs.

#![expect(
    clippy::unwrap_used,
    reason = "a benchmark that cannot be set up has nothing to measure"
)]

#[path = "../tests/door/mod.rs"]
mod door;

use std::hint::black_box;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use door::{Door, Served};
use futures_util::{StreamExt, stream};
use genset_backend_common::output::{self, Finish, Output, OutputStream, TokenSink, TrySendError};
use genset_backend_common::ports::Generate;
use genset_backend_common::worker::{Worker, WorkerConfig, WorkerHandle};
use genset_backend_common::{
    EngineConfig, EngineError, GenerateRequest, LLMEngine, MetricsRegistry, RequestContext,
    StartContext, async_trait,
};
use tokio::runtime::Runtime;

const TOKENS: u32 = 4096;

/// Tokens by which an engine thread may be ahead of its reader: the default channel's capacity.
const BURST: u32 = 64;

fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().build().unwrap()
}

fn context() -> RequestContext {
    RequestContext::new("bench").with_prompt_tokens(2)
}

fn request() -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens("bench", vec![1, 2]);
    request.stop.max_tokens = Some(TOKENS);
    request
}

async fn read(mut outputs: OutputStream) -> u32 {
    let mut tokens = 0;
    while let Some(item) = outputs.next().await {
        tokens += black_box(item.unwrap()).token_count();
    }
    tokens
}

/// The same tokens without any helper.
fn bare(ctx: &RequestContext, tokens: u32) -> OutputStream {
    let end = Finish::length().into_finished(ctx.prompt_tokens(), tokens);
    let items = (0..tokens).map(|token| Ok(Output::from(token)));
    let end = stream::once(async { Ok(Output::Finished(Box::new(end))) });
    OutputStream::from_raw(Box::pin(stream::iter(items).chain(end)))
}

fn from_body(ctx: RequestContext, tokens: u32) -> OutputStream {
    output::stream(ctx, move |out| async move {
        for token in 0..tokens {
            out.token(token).await?;
        }
        Ok(Finish::length())
    })
}

/// Writes and reads alternately on one thread, a burst at a time, so that neither side waits.
async fn channel_on_one_thread(ctx: RequestContext) -> u32 {
    let (sink, mut outputs) = output::channel(ctx);
    let mut tokens = 0;
    for burst in 0..TOKENS / BURST {
        for token in 0..BURST {
            sink.try_send((burst * BURST + token).into()).unwrap();
        }
        for _ in 0..BURST {
            tokens += black_box(outputs.next().await.unwrap().unwrap()).token_count();
        }
    }
    sink.finish(Finish::length());
    tokens + read(outputs).await
}

/// A thread that serves requests in sequence, like the loop of a native engine.
struct EngineThread {
    work: Option<SyncSender<(TokenSink, u32)>>,
    thread: Option<JoinHandle<()>>,
}

impl EngineThread {
    fn spawn() -> Self {
        let (work, requests) = sync_channel(1);
        let thread = std::thread::spawn(move || Self::run(&requests));
        Self {
            work: Some(work),
            thread: Some(thread),
        }
    }

    fn run(requests: &Receiver<(TokenSink, u32)>) {
        while let Ok((sink, tokens)) = requests.recv() {
            for token in 0..tokens {
                match sink.try_send(token.into()) {
                    Ok(()) => {}
                    // A real engine continues with other sequences; this one has none.
                    Err(TrySendError::Full(chunk)) => sink.blocking_send(chunk).unwrap(),
                    Err(TrySendError::Closed) => return,
                }
            }
            sink.finish(Finish::length());
        }
    }

    fn generate(&self, ctx: RequestContext, tokens: u32) -> OutputStream {
        let (sink, outputs) = output::channel(ctx);
        let work = self.work.as_ref().unwrap();
        work.send((sink, tokens)).unwrap();
        outputs
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        self.work = None;
        self.thread.take().unwrap().join().unwrap();
    }
}

/// How the engine under a Worker creates its streams.
enum Source {
    Bare,
    Body,
    Thread(EngineThread),
}

#[async_trait]
impl LLMEngine for Source {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        Ok(EngineConfig::new("bench", 1 << 16).with_vocab_size(1 << 16))
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let tokens = request.stop.max_tokens.unwrap_or(TOKENS);
        Ok(match self {
            Self::Bare => bare(&ctx, tokens),
            Self::Body => from_body(ctx, tokens),
            Self::Thread(thread) => thread.generate(ctx, tokens),
        })
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        Ok(())
    }
}

async fn serve(engine: Source) -> (WorkerHandle, Arc<dyn Generate>) {
    let served = Served::new(None);
    let door = Arc::new(Door(served.clone()));
    let (config, metrics) = (WorkerConfig::default(), MetricsRegistry::default());
    let handle = Worker::new(1, Arc::new(engine), config, door, metrics).spawn();
    handle.ready().await.unwrap();
    let generate = served.borrow().clone();
    (handle, generate.unwrap())
}

fn helpers(criterion: &mut Criterion) {
    let runtime = runtime();
    let mut group = criterion.benchmark_group("output");
    group.throughput(Throughput::Elements(u64::from(TOKENS)));
    group.bench_function("bare", |b| {
        b.iter(|| assert_eq!(runtime.block_on(read(bare(&context(), TOKENS))), TOKENS));
    });
    group.bench_function("stream", |b| {
        b.iter(|| assert_eq!(runtime.block_on(read(from_body(context(), TOKENS))), TOKENS));
    });
    group.bench_function("channel_same_thread", |b| {
        b.iter(|| assert_eq!(runtime.block_on(channel_on_one_thread(context())), TOKENS));
    });
    let thread = EngineThread::spawn();
    group.bench_function("channel_engine_thread", |b| {
        b.iter(|| {
            let outputs = thread.generate(context(), TOKENS);
            assert_eq!(runtime.block_on(read(outputs)), TOKENS);
        });
    });
    group.finish();
}

fn worker(criterion: &mut Criterion) {
    let runtime = runtime();
    let mut group = criterion.benchmark_group("output");
    group.throughput(Throughput::Elements(u64::from(TOKENS)));
    for (name, engine) in [
        ("worker_bare", Source::Bare),
        ("worker_stream", Source::Body),
        (
            "worker_engine_thread",
            Source::Thread(EngineThread::spawn()),
        ),
    ] {
        let (handle, generate) = runtime.block_on(serve(engine));
        group.bench_function(name, |b| {
            b.iter(|| {
                let tokens = runtime.block_on(async {
                    read(generate.generate(request(), context()).await.unwrap()).await
                });
                assert_eq!(tokens, TOKENS);
            });
        });
        let report = runtime.block_on(handle.shutdown());
        assert_eq!(report.outcome.exit_code(), 0);
    }
    group.finish();
}

criterion_group!(benches, helpers, worker);
criterion_main!(benches);
