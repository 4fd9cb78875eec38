//! The cost of choosing one token, by vocabulary and options.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use genset_backend_common::GenerateRequest;
use genset_sampling::{Sampler, TokenMask};

/// Logits like a model's: a few good tokens, a long tail. Deterministic.
fn logits(vocab: u32) -> Vec<f32> {
    let noise = |token: u32| {
        let hash = token.wrapping_add(1).wrapping_mul(0x9E37_79B9);
        f32::from(u16::try_from((hash ^ (hash >> 15)) >> 16).unwrap_or(0)) / 65_536.0
    };
    (0..vocab)
        .map(|token| noise(token).powi(3) * 24.0 - 8.0)
        .collect()
}

type Case = (&'static str, fn(&mut GenerateRequest));

const CASES: [Case; 7] = [
    ("greedy", |_| {}),
    ("greedy_logprobs_5", |r| r.output.logprobs = Some(5)),
    ("greedy_penalties", |r| {
        r.sampling.repetition_penalty = Some(1.1)
    }),
    ("temperature", |r| r.sampling.temperature = Some(0.8)),
    ("top_k_50", |r| {
        (r.sampling.temperature, r.sampling.top_k) = (Some(0.8), Some(50))
    }),
    ("top_p_0.9", |r| {
        (r.sampling.temperature, r.sampling.top_p) = (Some(0.8), Some(0.9))
    }),
    ("min_p_0.05", |r| {
        (r.sampling.temperature, r.sampling.min_p) = (Some(0.8), Some(0.05))
    }),
];

fn sampling(criterion: &mut Criterion) {
    for vocab in [32_000, 128_256] {
        let row = logits(vocab);
        let mut group = criterion.benchmark_group(format!("sample/{vocab}"));
        for (name, set) in CASES {
            let mut request = GenerateRequest::from_tokens("m", (0..1000).collect());
            set(&mut request);
            let Ok(mut sampler) = Sampler::try_new(&request, row.len(), 1) else {
                continue;
            };
            group.bench_function(name, |bench| {
                bench.iter_batched_ref(
                    || row.clone(),
                    |row| black_box(sampler.sample(row, None).is_ok()),
                    BatchSize::LargeInput,
                );
            });
        }
        let request = GenerateRequest::from_tokens("m", vec![1]);
        if let Ok(mut sampler) = Sampler::try_new(&request, row.len(), 1) {
            let mut mask = TokenMask::none(row.len());
            (0..vocab).step_by(7).for_each(|token| mask.allow(token));
            group.bench_function("greedy_masked", |bench| {
                bench.iter_batched_ref(
                    || row.clone(),
                    |row| black_box(sampler.sample(row, Some(&mask)).is_ok()),
                    BatchSize::LargeInput,
                );
            });
        }
        group.finish();
    }
}

criterion_group!(benches, sampling);
criterion_main!(benches);
