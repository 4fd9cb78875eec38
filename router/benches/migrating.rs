//! The cost per token of being able to migrate.
//!
//! Run with `cargo bench -p genset-router --bench migrating`. An iteration is one request of 4096 tokens, one token per item;
//! elements are tokens. `below` is the plain stream, `migrating` the same stream under the layer.

#![expect(
    clippy::unwrap_used,
    reason = "a benchmark that cannot be set up has nothing to measure"
)]

#[path = "../tests/ready/mod.rs"]
mod ready;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};

use self::ready::Ready;

const TOKENS: u32 = 4096;

fn migrating(criterion: &mut Criterion) {
    let layer = ready::migrating();
    let mut group = criterion.benchmark_group("migrating");
    group.throughput(Throughput::Elements(u64::from(TOKENS)));
    group.bench_function("below", |bencher| {
        bencher.iter(|| ready::read(&Ready, TOKENS))
    });
    group.bench_function("migrating", |bencher| {
        bencher.iter(|| ready::read(&layer, TOKENS))
    });
    group.finish();
}

criterion_group!(benches, migrating);
criterion_main!(benches);
