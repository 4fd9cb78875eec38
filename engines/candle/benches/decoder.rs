//! The decoder alone: steps of a random model of 125 million weights, without scheduler and sampler.
//!
//! `decode/N` computes one row for each of N sequences with 128 previous tokens; `prefill/512` computes one prompt of 512
//! tokens. Elements are tokens. Run with `cargo bench -p genset-engine-candle --bench decoder`.

#![expect(
    clippy::expect_used,
    reason = "a benchmark that cannot run says so by panicking"
)]

use std::collections::HashMap;
use std::hint::black_box;

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use genset_devtools::synthetic::{SyntheticSize, make_model};
use genset_engine_candle::error::LoadError;
use genset_engine_candle::load::OpenModel;
use genset_engine_candle::model::{
    KvCache, KvCacheSpec, Matrix, Model, ModelConfig, Piece, StepBatch, Weights,
};

const BLOCK_SIZE: usize = 16;
const CONTEXT: usize = 128;

/// Random weights of one type. Matrices of one shape have equal numbers, but separate memory.
struct RandomWeights {
    dtype: GgmlDType,
    made: HashMap<(usize, usize), Vec<u8>>,
}

impl RandomWeights {
    fn random(&mut self, out_features: usize, in_features: usize) -> candle_core::Result<Matrix> {
        let shape = (out_features, in_features);
        if !self.made.contains_key(&shape) {
            let floats = Tensor::randn(0.0f32, 0.02, shape, &Device::Cpu)?;
            let quantized = QTensor::quantize(&floats, self.dtype)?;
            self.made.insert(shape, quantized.data()?.into_owned());
        }
        let storage = QStorage::from_data((&self.made[&shape]).into(), &Device::Cpu, self.dtype)?;
        Matrix::quantized(QTensor::new(storage, shape)?)
    }
}

fn candle(source: candle_core::Error) -> LoadError {
    LoadError::Candle {
        name: "random weights".to_owned(),
        source,
    }
}

impl Weights for RandomWeights {
    fn device(&self) -> &Device {
        &Device::Cpu
    }

    fn tensor(&mut self, _name: &str, shape: &[usize]) -> Result<Tensor, LoadError> {
        Tensor::ones(shape, DType::F32, &Device::Cpu).map_err(candle)
    }

    fn matrix(
        &mut self,
        _name: &str,
        out_features: usize,
        in_features: usize,
    ) -> Result<Matrix, LoadError> {
        self.random(out_features, in_features).map_err(candle)
    }
}

/// A step of `sequences` sequences, each with `rows` new tokens after `done`.
fn step(sequences: usize, done: usize, rows: usize) -> StepBatch {
    let context_len = done + rows;
    let blocks_each = context_len.div_ceil(BLOCK_SIZE);
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let mut batch = StepBatch::default();
    for sequence in 0..sequences {
        let first_block = sequence * blocks_each;
        let token = |position| number((sequence * 7919 + position * 31) % 32_000);
        let tokens: Vec<u32> = (done..context_len).map(token).collect();
        let blocks = first_block..first_block + blocks_each;
        let piece = Piece {
            tokens: &tokens,
            start: done,
            blocks: blocks.map(number).collect(),
            wanted: 1,
        };
        batch.push(BLOCK_SIZE, piece);
    }
    batch
}

fn decoder(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a folder");
    make_model(folder.path(), SyntheticSize::M100, 1).expect("a random model");
    let config: ModelConfig = OpenModel::open(folder.path()).expect("a model").config;
    let types = [
        ("q8_0", GgmlDType::Q8_0),
        ("q5_0", GgmlDType::Q5_0),
        ("q4_k", GgmlDType::Q4K),
    ];
    for (name, dtype) in types {
        let mut weights = RandomWeights {
            dtype,
            made: HashMap::new(),
        };
        let model = Model::try_new(&config, &mut weights).expect("a random model");
        let spec = KvCacheSpec {
            num_blocks: 1024,
            block_size: BLOCK_SIZE,
            dtype: DType::F16,
        };
        let mut kv = KvCache::try_new(&config, spec, &Device::Cpu).expect("a KV cache");
        let mut group = criterion.benchmark_group(name);
        group.sampling_mode(SamplingMode::Flat).sample_size(10);
        let decode = [1, 4, 16, 64].map(|n| (format!("decode/{n}"), step(n, CONTEXT, 1)));
        let prefill = ("prefill/512".to_owned(), step(1, 0, 512));
        for (name, batch) in decode.into_iter().chain([prefill]) {
            group.throughput(Throughput::Elements(batch.tokens.len() as u64));
            group.bench_function(name, |bencher| {
                bencher.iter(|| black_box(model.forward(&mut kv, &batch).expect("a step")));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, decoder);
criterion_main!(benches);
