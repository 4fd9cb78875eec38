//! The cost per token of being able to migrate.
//!
//! Run with `cargo bench -p genset-router --bench migrating`. An iteration is one request of 4096 tokens, one token per item;
//! elements are tokens. `below` is the plain stream, `migrating` the same stream under the layer.

#![expect(
    clippy::unwrap_used,
    reason = "a benchmark that cannot be set up has nothing to measure"
)]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use futures_util::{FutureExt, StreamExt, stream};
use genset_backend_common::output::{Finish, Output, OutputStream};
use genset_backend_common::ports::Generate;
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, GenerateRequest, MetricsRegistry, ModelCard,
    RequestContext, async_trait,
};
use genset_router::{Holder, Migrating, MigrationConfig, Migrations, Route, Routed};
use genset_runtime::InstanceId;
use tokio::time::Instant;

const TOKENS: u32 = 4096;

/// An instance whose tokens are ready.
struct Ready;

#[async_trait]
impl Generate for Ready {
    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        Ok(self.route(request, ctx, &[]).await?.outputs)
    }
}

#[async_trait]
impl Route for Ready {
    async fn route(
        &self,
        _request: GenerateRequest,
        _ctx: RequestContext,
        _left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let end = Finish::length().into_finished(2, TOKENS);
        let items = (0..TOKENS).map(|token| Ok(Output::from(token)));
        let end = stream::once(async { Ok(Output::Finished(Box::new(end))) });
        Ok(Routed {
            holder: Holder::One(InstanceId(1)),
            began: Instant::now(),
            outputs: OutputStream::from_raw(Box::pin(stream::iter(items).chain(end))),
        })
    }
}

fn read(engine: &dyn Generate) -> u32 {
    let mut request = GenerateRequest::from_tokens("m", vec![1, 2]);
    request.stop.max_tokens = Some(TOKENS);
    let reading = async {
        let mut outputs = engine.generate(request, RequestContext::new("r")).await;
        let mut tokens = 0;
        while let Some(item) = outputs.as_mut().unwrap().next().await {
            tokens += black_box(item.unwrap()).token_count();
        }
        tokens
    };
    reading.now_or_never().unwrap()
}

fn migrating(criterion: &mut Criterion) {
    let can = Capabilities::tokens().with_resume();
    let config = EngineConfig::new("m", 1 << 20).with_capabilities(can);
    let migrations = Migrations::register(&MetricsRegistry::default(), MigrationConfig::default());
    let layer = Migrating::new(
        Arc::new(Ready),
        &ModelCard::from_config(&config),
        migrations,
    );
    let mut group = criterion.benchmark_group("migrating");
    group.throughput(Throughput::Elements(u64::from(TOKENS)));
    group.bench_function("below", |bencher| bencher.iter(|| read(&Ready)));
    group.bench_function("migrating", |bencher| bencher.iter(|| read(&layer)));
    group.finish();
}

criterion_group!(benches, migrating);
criterion_main!(benches);
