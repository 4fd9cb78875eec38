//! The cost of planning and committing steps, for decoding and for prompts, by the number of sequences:
//! `cargo bench -p genset-scheduler --bench steps`.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use genset_scheduler::{Limits, NewSequence, Outcome, Report, Scheduler, SequenceId};

const BLOCK_SIZE: usize = 16;
const PROMPT_TOKENS: u32 = 1024;
/// The number of steps per measurement. It is bounded because sequences that never end would run out of blocks.
const STEPS: u32 = 64;

/// A scheduler with `count` waiting sequences. Their prompts begin with the same `shared` tokens.
fn waiting(count: u32, shared: u32) -> Scheduler {
    let places = usize::try_from(count).unwrap();
    // The first sequences already generate tokens while later prompts are computed.
    let tokens = usize::try_from(PROMPT_TOKENS + 2 * STEPS).unwrap();
    let limits = Limits {
        max_num_seqs: places,
        max_num_batched_tokens: 8192,
        max_waiting: places,
    };
    let num_blocks = places * tokens.div_ceil(BLOCK_SIZE);
    let mut scheduler = Scheduler::try_new(limits, num_blocks, BLOCK_SIZE).unwrap();
    for number in 0..count {
        let first_own = number * PROMPT_TOKENS;
        let shared = 0..shared;
        let own = first_own + shared.end..first_own + PROMPT_TOKENS;
        let new = NewSequence {
            id: SequenceId(number.into()),
            prompt: shared.chain(own).collect(),
            priority: 0,
            root: None,
        };
        scheduler.add(new).unwrap();
    }
    scheduler
}

/// Makes one step, as an engine's loop does. Returns whether every row sampled a token.
fn step(scheduler: &mut Scheduler) -> bool {
    let step = scheduler.plan();
    let report = |id| Report {
        id,
        outcome: Outcome::Sampled(7),
    };
    let reports: Vec<_> = step.rows.iter().map(|row| report(row.id)).collect();
    scheduler.commit(&reports);
    black_box(scheduler.take_events());
    step.rows.iter().all(|row| row.wants_token)
}

/// Makes steps until every sequence has a token.
fn take_in(scheduler: &mut Scheduler) {
    while !step(scheduler) || scheduler.stats().waiting > 0 {}
}

fn steps(criterion: &mut Criterion) {
    for count in [1, 8, 64, 256] {
        let mut group = criterion.benchmark_group(format!("scheduler/{count}"));
        group.throughput(Throughput::Elements(u64::from(STEPS * count)));
        group.bench_function("decode", |bench| {
            let running = || {
                let mut scheduler = waiting(count, 0);
                take_in(&mut scheduler);
                scheduler
            };
            bench.iter_batched_ref(
                running,
                |scheduler| (0..STEPS).all(|_| step(scheduler)),
                BatchSize::PerIteration,
            );
        });
        group.throughput(Throughput::Elements(u64::from(PROMPT_TOKENS * count)));
        for (name, shared) in [("prompts", 0), ("prompts_shared", PROMPT_TOKENS / 2)] {
            group.bench_function(name, |bench| {
                let waiting = || waiting(count, shared);
                bench.iter_batched_ref(waiting, take_in, BatchSize::PerIteration);
            });
        }
        group.finish();
    }
}

criterion_group!(benches, steps);
criterion_main!(benches);
