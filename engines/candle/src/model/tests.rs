//! The decoder against `transformers`, and against itself: however rows are packed, chunked and placed, the bits stay.
//!
//! The reference models and logits are made by `tests/reference/make.py`.

mod lora;

use std::path::Path;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;

use super::*;
use crate::error::LoadError;
use crate::load::{ModelWeights, OpenModel, Quantization, WeightOptions};

const BLOCK_SIZE: usize = 4;
/// Reference models of plain weights. Of the last there are no GGUF files.
pub(crate) const MODELS: [&str; 16] = [
    "llama",
    "llama3",
    "llama-linear",
    "llama-biases",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3-yarn",
    "qwen3-moe",
    "mixtral",
    "gemma2",
    "gemma3",
    "phi3",
    "phi4-mini",
    "smollm3",
    "gpt-oss-bf16",
];

/// Models of packed weights, made by `tests/reference/packed.py`.
const PACKED: [&str; 12] = [
    "gptq",
    "gptq-zeros",
    "gptq-order",
    "gptq-v2",
    "gptq-small-groups",
    "awq",
    "compressed-int4",
    "compressed-int4-zeros",
    "fp8-blocks",
    "fp8-rows",
    "fp8-whole",
    "gpt-oss",
];

/// How far logits may be from the reference, absolutely; they are of order 1 to 10.
const TOLERANCE: f32 = 1e-4;

#[derive(Deserialize)]
struct Expected {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    tokens: Vec<u32>,
    /// Of the last rows.
    logits: Vec<Vec<f32>>,
}

fn load(name: &str, quantization: Quantization) -> (Model, ModelConfig) {
    load_on(name, quantization, &Device::Cpu, DType::F32)
}

fn load_on(
    name: &str,
    quantization: Quantization,
    device: &Device,
    dtype: DType,
) -> (Model, ModelConfig) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/reference")
        .join(name);
    let open = OpenModel::open(&folder).unwrap();
    let options = WeightOptions {
        device: device.clone(),
        dtype,
        quantization,
    };
    let model = Model::try_new(&open.config, &mut open.weights(options, |_| {})).unwrap();
    (model, open.config)
}

fn cases(name: &str) -> Vec<Case> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/reference")
        .join(name)
        .join("expected.json");
    serde_json::from_str::<Expected>(&std::fs::read_to_string(file).unwrap())
        .unwrap()
        .cases
}

fn spec(dtype: DType) -> KvCacheSpec {
    KvCacheSpec {
        num_blocks: 64,
        block_size: BLOCK_SIZE,
        dtype,
    }
}

fn cache(config: &ModelConfig) -> KvCache {
    cache_of(DType::F32, config)
}

fn cache_of(dtype: DType, config: &ModelConfig) -> KvCache {
    KvCache::try_new(config, spec(dtype), &Device::Cpu).unwrap()
}

/// One sequence's share of a step: its tokens so far, how many were computed before, and its blocks.
struct Chunk<'a> {
    tokens: &'a [u32],
    done: usize,
    blocks: &'a [u32],
}

/// A step that wants the logits of all its rows.
fn step(chunks: &[Chunk<'_>]) -> StepBatch {
    let mut batch = StepBatch::default();
    for chunk in chunks {
        let first_row = batch.tokens.len();
        for position in chunk.done..chunk.tokens.len() {
            batch.tokens.push(chunk.tokens[position]);
            batch.positions.push(u32::try_from(position).unwrap());
            let offset = u32::try_from(position % BLOCK_SIZE).unwrap();
            let block_size = u32::try_from(BLOCK_SIZE).unwrap();
            batch
                .slots
                .push(chunk.blocks[position / BLOCK_SIZE] * block_size + offset);
        }
        batch.sequences.push(SequenceRows {
            rows: first_row..batch.tokens.len(),
            context_len: chunk.tokens.len(),
            blocks: chunk.blocks[..chunk.tokens.len().div_ceil(BLOCK_SIZE)].to_vec(),
        });
    }
    batch.logit_rows = (0..u32::try_from(batch.tokens.len()).unwrap()).collect();
    batch
}

fn rows(logits: &Tensor) -> Vec<Vec<f32>> {
    logits.to_vec2().unwrap()
}

/// Blocks that are neither in order nor neighbours.
fn scattered_blocks(from: u32) -> Vec<u32> {
    (0..16).map(|i| from + (i * 7 + 3) % 16).collect()
}

fn prefill(model: &Model, kv: &mut KvCache, tokens: &[u32]) -> Vec<Vec<f32>> {
    let blocks: Vec<u32> = (0..16).collect();
    rows(
        &model
            .forward(
                kv,
                &step(&[Chunk {
                    tokens,
                    done: 0,
                    blocks: &blocks,
                }]),
            )
            .unwrap(),
    )
}

fn assert_close(got: &[Vec<f32>], want: &[Vec<f32>], tolerance: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let differences = got
        .iter()
        .flatten()
        .zip(want.iter().flatten())
        .map(|(a, b)| (a - b).abs());
    let worst = differences.fold(
        0.0f32,
        |worst, d| if d > worst || d.is_nan() { d } else { worst },
    );
    assert!(worst <= tolerance, "{what}: logits differ by up to {worst}");
}

#[test]
fn logits_equal_the_reference() {
    for name in MODELS {
        let (model, config) = load(name, Quantization::None);
        for case in cases(name) {
            let got = prefill(&model, &mut cache(&config), &case.tokens);
            let last = &got[got.len() - case.logits.len()..];
            assert_close(
                last,
                &case.logits,
                TOLERANCE,
                &format!("{name}, {} tokens", case.tokens.len()),
            );
        }
    }
}

/// Weights whose matrices are those of a loader in f32, so that blocks are multiplied without rounding activations.
struct Exact<'a>(ModelWeights<'a>);

impl Exact<'_> {
    fn exact(matrix: &Matrix) -> Matrix {
        let ids: Vec<u32> = (0..).take(matrix.out_features()).collect();
        Matrix::dense(matrix.rows(&ids, &Device::Cpu, DType::F32).unwrap()).unwrap()
    }
}

impl Weights for Exact<'_> {
    fn device(&self) -> &Device {
        self.0.device()
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, LoadError> {
        self.0.tensor(name, shape)
    }

    fn matrix(&mut self, name: &str, rows: usize, columns: usize) -> Result<Matrix, LoadError> {
        Ok(Self::exact(&self.0.matrix(name, rows, columns)?))
    }

    fn embedding(&mut self, name: &str, rows: usize, columns: usize) -> Result<Matrix, LoadError> {
        Ok(Self::exact(&self.0.embedding(name, rows, columns)?))
    }
}

fn load_exact(name: &str) -> (Model, ModelConfig) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/reference")
        .join(name);
    let open = OpenModel::open(&folder).unwrap();
    let mut weights = Exact(open.weights(WeightOptions::exact(), |_| {}));
    let model = Model::try_new(&open.config, &mut weights).unwrap();
    drop(weights);
    (model, open.config)
}

/// As [`Exact`], but the matrices with `part` in their names are quantized.
struct QuantizedPart<'a> {
    exact: Exact<'a>,
    part: &'a str,
}

impl QuantizedPart<'_> {
    fn quantized(&self, name: &str, matrix: Matrix) -> Matrix {
        if !name.contains(self.part) {
            return matrix;
        }
        let ids: Vec<u32> = (0..).take(matrix.out_features()).collect();
        let numbers = matrix.rows(&ids, &Device::Cpu, DType::F32).unwrap();
        Matrix::quantized(QTensor::quantize(&numbers, GgmlDType::Q8_0).unwrap()).unwrap()
    }
}

impl Weights for QuantizedPart<'_> {
    fn device(&self) -> &Device {
        self.exact.device()
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, LoadError> {
        self.exact.tensor(name, shape)
    }

    fn matrix(&mut self, name: &str, rows: usize, columns: usize) -> Result<Matrix, LoadError> {
        let matrix = self.exact.matrix(name, rows, columns)?;
        Ok(self.quantized(name, matrix))
    }

    fn embedding(&mut self, name: &str, rows: usize, columns: usize) -> Result<Matrix, LoadError> {
        let matrix = self.exact.embedding(name, rows, columns)?;
        Ok(self.quantized(name, matrix))
    }
}

#[test]
fn a_step_with_any_quantized_matrix_is_not_recorded() {
    let can_be_recorded = |model: &str, part: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/reference")
            .join(model);
        let open = OpenModel::open(&folder).unwrap();
        let exact = Exact(open.weights(WeightOptions::exact(), |_| {}));
        let mut weights = QuantizedPart { exact, part };
        let model = Model::try_new(&open.config, &mut weights).unwrap();
        model.can_be_recorded()
    };
    // Its rows are whole blocks, and its output matrix is no embedding.
    let model = "gptq";
    assert!(can_be_recorded(model, "none"));
    for part in [
        "embed_tokens",
        "layers.1.self_attn.q_proj",
        "layers.1.self_attn.v_proj",
        "layers.1.self_attn.o_proj",
        "layers.1.mlp.gate_proj",
        "layers.1.mlp.up_proj",
        "layers.1.mlp.down_proj",
        "lm_head",
    ] {
        assert!(!can_be_recorded(model, part), "{part}");
    }
    assert!(!can_be_recorded("gpt-oss-bf16", "none"), "experts");
}

#[test]
fn packed_weights_are_the_numbers_that_they_stand_for() {
    for name in PACKED {
        let (model, config) = load_exact(name);
        for case in cases(name) {
            let got = prefill(&model, &mut cache(&config), &case.tokens);
            let last = &got[got.len() - case.logits.len()..];
            let what = format!("{name}, {} tokens", case.tokens.len());
            assert_close(last, &case.logits, TOLERANCE, &what);
        }
    }
}

/// As they are served: with activations in eight bits, and what is no block of a type in the usual one. Of random
/// experts, which are nothing alike, a rounded row may go to others.
#[test]
fn packed_weights_as_they_are_served_are_near_the_reference() {
    for name in PACKED {
        let (model, config) = load(name, Quantization::default());
        for case in cases(name) {
            let got = prefill(&model, &mut cache(&config), &case.tokens);
            let last = &got[got.len() - case.logits.len()..];
            let pairs = || last.iter().flatten().zip(case.logits.iter().flatten());
            let error: f32 = pairs().map(|(a, b)| (a - b) * (a - b)).sum();
            let size: f32 = pairs().map(|(_, b)| b * b).sum();
            let error = (error / size).sqrt();
            assert!(error > 0.0 && error < 0.25, "{name}: {error}");
        }
    }
}

#[test]
fn logits_by_tensor_operations_equal_the_reference() {
    compare_with_reference_as_on_gpu(&Device::Cpu, DType::F32, TOLERANCE, false);
}

/// On a GPU in each type that it computes with; emulated in f32, which is what activations are on the host.
#[cfg(any(feature = "cuda", kernels_are_emulated))]
#[test]
fn logits_by_kernels_for_gpus_equal_the_reference() {
    let device = kernels::test_device();
    // Halves round every activation: by 2^-11 in f16, by 2^-8 in bf16.
    let all = [(DType::F32, 1e-3), (DType::F16, 3e-2), (DType::BF16, 3e-1)];
    let dtypes = if device.is_cpu() { &all[..1] } else { &all[..] };
    for (dtype, tolerance) in dtypes {
        compare_with_reference_as_on_gpu(&device, *dtype, *tolerance, true);
    }
}

fn compare_with_reference_as_on_gpu(
    device: &Device,
    dtype: DType,
    tolerance: f32,
    has_kernels: bool,
) {
    for name in MODELS {
        let (model, config) = load_on(name, Quantization::None, device, dtype);
        for case in cases(name) {
            let mut kv =
                KvCache::try_new_as_on_gpu(&config, spec(dtype), device, has_kernels).unwrap();
            let blocks = scattered_blocks(0);
            let half = case.tokens.len() / 2;
            let chunk = Chunk {
                tokens: &case.tokens[..half],
                done: 0,
                blocks: &blocks,
            };
            model
                .forward(
                    &mut kv,
                    &step(if half > 0 {
                        std::slice::from_ref(&chunk)
                    } else {
                        &[]
                    }),
                )
                .unwrap();
            let chunk = Chunk {
                tokens: &case.tokens,
                done: half,
                blocks: &blocks,
            };
            let got = rows(&model.forward(&mut kv, &step(&[chunk])).unwrap());
            let kept = got.len().min(case.logits.len());
            let want = &case.logits[case.logits.len() - kept..];
            assert_close(
                &got[got.len() - kept..],
                want,
                tolerance,
                &format!("{name} in {dtype:?}, {} tokens", case.tokens.len()),
            );
        }
    }
}

/// The models for which bits are compared: every architecture, in f32 and as it is served by default.
fn subjects() -> impl Iterator<Item = Subject> {
    MODELS.into_iter().flat_map(|name| {
        [
            (Quantization::None, DType::F32),
            (Quantization::Q8_0, DType::F16),
        ]
        .map(|(quantization, kv_dtype)| {
            let (model, config) = load(name, quantization);
            Subject {
                name: format!("{name} {quantization}"),
                model,
                config,
                cases: cases(name),
                kv_dtype,
            }
        })
    })
}

struct Subject {
    name: String,
    model: Model,
    config: ModelConfig,
    cases: Vec<Case>,
    kv_dtype: DType,
}

impl Subject {
    fn cache(&self) -> KvCache {
        cache_of(self.kv_dtype, &self.config)
    }
}

#[test]
fn a_prompt_in_chunks_gives_the_bits_of_the_whole() {
    for subject in subjects() {
        let Subject {
            name, model, cases, ..
        } = &subject;
        let tokens = &cases[3].tokens;
        let whole = prefill(model, &mut subject.cache(), tokens);
        for size in [1, 3, 4, 16, 31] {
            let mut kv = subject.cache();
            let blocks = scattered_blocks(20);
            let mut got = Vec::new();
            for end in (size..tokens.len() + size).step_by(size) {
                let tokens = &tokens[..end.min(tokens.len())];
                let batch = step(&[Chunk {
                    tokens,
                    done: end - size,
                    blocks: &blocks,
                }]);
                got.extend(rows(&model.forward(&mut kv, &batch).unwrap()));
            }
            assert!(
                got == whole,
                "{name}: chunks of {size} differ from the whole"
            );
        }
    }
}

#[test]
fn a_row_has_the_same_bits_beside_any_others() {
    for subject in subjects() {
        let Subject {
            name, model, cases, ..
        } = &subject;
        let alone: Vec<_> = cases
            .iter()
            .map(|case| prefill(model, &mut subject.cache(), &case.tokens))
            .collect();
        let mut kv = subject.cache();
        let blocks: Vec<_> = (0..4).map(|i| scattered_blocks(i * 16)).collect();
        // First one token less of each; then a whole prompt beside single rows and a chunk.
        let chunks = |done: [usize; 4], end: [usize; 4]| -> Vec<Chunk<'_>> {
            let parts = cases.iter().zip(&blocks).zip(done.into_iter().zip(end));
            let chunks = parts.map(|((case, blocks), (done, end))| Chunk {
                tokens: &case.tokens[..end],
                done,
                blocks,
            });
            chunks
                .filter(|chunk| chunk.done < chunk.tokens.len())
                .collect()
        };
        let first = rows(
            &model
                .forward(&mut kv, &step(&chunks([0, 0, 0, 0], [0, 6, 18, 20])))
                .unwrap(),
        );
        let second = rows(
            &model
                .forward(&mut kv, &step(&chunks([0, 6, 18, 20], [1, 7, 19, 45])))
                .unwrap(),
        );
        let want_first = [&alone[1][..6], &alone[2][..18], &alone[3][..20]].concat();
        let want_second = [
            &alone[0][..1],
            &alone[1][6..],
            &alone[2][18..],
            &alone[3][20..],
        ]
        .concat();
        assert!(first == want_first, "{name}: the first step differs");
        assert!(second == want_second, "{name}: the second step differs");
    }
}

#[test]
fn only_the_rows_that_are_asked_for_get_logits() {
    let (model, config) = load("llama", Quantization::Q8_0);
    let tokens = &cases("llama")[2].tokens;
    let whole = prefill(&model, &mut cache(&config), tokens);
    let blocks: Vec<u32> = (0..16).collect();
    let mut batch = step(&[Chunk {
        tokens,
        done: 0,
        blocks: &blocks,
    }]);
    batch.logit_rows = vec![18, 3];
    let got = rows(&model.forward(&mut cache(&config), &batch).unwrap());
    assert!(got == [whole[18].clone(), whole[3].clone()]);
    batch.logit_rows.clear();
    assert_eq!(
        model.forward(&mut cache(&config), &batch).unwrap().dims(),
        [0, config.vocab_size]
    );
    let nothing = model
        .forward(&mut cache(&config), &StepBatch::default())
        .unwrap();
    assert_eq!(nothing.dims(), [0, config.vocab_size]);
}

#[test]
fn what_a_block_held_before_is_not_seen() {
    for name in ["llama", "gemma2"] {
        let (model, config) = load(name, Quantization::None);
        let tokens = &cases(name)[2].tokens;
        let clean = prefill(&model, &mut cache(&config), tokens);
        let mut kv = cache(&config);
        kv.fill(f32::NAN);
        assert!(prefill(&model, &mut kv, tokens) == clean, "{name}");
    }
}

#[test]
fn half_precision_in_the_kv_cache_is_close() {
    for name in MODELS {
        let (model, config) = load(name, Quantization::None);
        let case = &cases(name)[3];
        let got = prefill(&model, &mut cache_of(DType::F16, &config), &case.tokens);
        let last = &got[got.len() - case.logits.len()..];
        assert_close(last, &case.logits, 2e-2, name);
        assert!(
            last != prefill(&model, &mut cache(&config), &case.tokens)
                .split_at(got.len() - 4)
                .1,
            "{name}: not f16"
        );
    }
}

#[test]
fn a_batch_that_does_not_fit_is_refused() {
    let (model, config) = load("llama", Quantization::None);
    let blocks: Vec<u32> = (0..16).collect();
    let good = step(&[Chunk {
        tokens: &[5, 6, 7, 8, 9],
        done: 0,
        blocks: &blocks,
    }]);
    let refused = |change: &dyn Fn(&mut StepBatch)| {
        let mut batch = good.clone();
        change(&mut batch);
        match model.forward(&mut cache(&config), &batch) {
            Err(ForwardError::Batch(error)) => error.to_string(),
            other => panic!("not refused: {other:?}"),
        }
    };
    assert_eq!(
        refused(&|b| b.tokens[1] = 96),
        "token 96 is out of range: 96 is the number of them"
    );
    assert_eq!(
        refused(&|b| b.slots[0] = 256),
        "slot 256 is out of range: 256 is the number of them"
    );
    assert_eq!(
        refused(&|b| b.logit_rows[0] = 5),
        "logit row 5 is out of range: 5 is the number of them"
    );
    assert_eq!(
        refused(&|b| b.sequences[0].blocks[1] = 64),
        "block 64 is out of range: 64 is the number of them"
    );
    assert_eq!(
        refused(&|b| _ = b.positions.pop()),
        "5 tokens, 4 positions and 5 slots in one step"
    );
    assert_eq!(
        refused(&|b| b.sequences[0].rows = 0..4),
        "sequence 0 has 4 rows and 2 blocks for a context of 5 tokens"
    );
    assert_eq!(
        refused(&|b| _ = b.sequences[0].blocks.pop()),
        "sequence 0 has 5 rows and 1 blocks for a context of 5 tokens"
    );
    assert_eq!(
        refused(&|b| b.sequences.clear()),
        "sequence 0 does not continue the rows before it, or rows are left over"
    );
}

#[test]
fn a_context_of_several_partitions_gives_the_same_bits_and_the_reference() {
    for name in MODELS {
        let (model, config) = load(name, Quantization::None);
        let tokens: Vec<u32> = (0..250).map(|i| 3 + i * 37 % 93).collect();
        let blocks: Vec<u32> = (0..64).map(|i| (i * 7 + 3) % 64).collect();
        let whole = Chunk {
            tokens: &tokens,
            done: 0,
            blocks: &blocks,
        };
        let whole = rows(&model.forward(&mut cache(&config), &step(&[whole])).unwrap());
        let mut tensors =
            KvCache::try_new_as_on_gpu(&config, spec(DType::F32), &Device::Cpu, false).unwrap();
        let mut host = cache(&config);
        for done in [0, 120, 249] {
            let end = [120, 249, 250][usize::from(done > 0) + usize::from(done > 120)];
            let batch = step(&[Chunk {
                tokens: &tokens[..end],
                done,
                blocks: &blocks,
            }]);
            let got = rows(&model.forward(&mut host, &batch).unwrap());
            assert!(got == whole[done..end], "{name}: rows {done}..{end} differ");
            let want = rows(&model.forward(&mut tensors, &batch).unwrap());
            assert_close(
                &got,
                &want,
                TOLERANCE,
                &format!("{name}, rows {done}..{end}"),
            );
        }
    }
}

/// A context that is split, beside a prompt in chunks, through every layer.
#[cfg(any(feature = "cuda", kernels_are_emulated))]
#[test]
fn kernels_for_gpus_mix_chunks_and_decode_rows() {
    let device = kernels::test_device();
    for name in ["llama", "gemma2", "gemma3"] {
        let (on_host, config) = load(name, Quantization::None);
        let (model, _) = load_on(name, Quantization::None, &device, DType::F32);
        let spec = KvCacheSpec {
            num_blocks: 200,
            ..spec(DType::F32)
        };
        let mut host = KvCache::try_new(&config, spec.clone(), &Device::Cpu).unwrap();
        let mut kv = KvCache::try_new_as_on_gpu(&config, spec, &device, true).unwrap();
        let tokens: Vec<u32> = (0..600).map(|i| 3 + i * 37 % 93).collect();
        let blocks: Vec<u32> = (0..200).map(|i| (i * 7 + 3) % 200).collect();
        let (long, short) = blocks.split_at(150);
        // The long one's prompt, then its decode row beside the chunks of the short one.
        for (long_done, long_end, short_done, short_end) in
            [(0, 599, 0, 0), (599, 600, 0, 21), (600, 600, 21, 50)]
        {
            let chunks = [
                Chunk {
                    tokens: &tokens[..long_end],
                    done: long_done,
                    blocks: long,
                },
                Chunk {
                    tokens: &tokens[..short_end],
                    done: short_done,
                    blocks: short,
                },
            ];
            let chunks: Vec<_> = chunks
                .into_iter()
                .filter(|chunk| chunk.done < chunk.tokens.len())
                .collect();
            let batch = step(&chunks);
            let want = rows(&on_host.forward(&mut host, &batch).unwrap());
            let got = rows(&model.forward(&mut kv, &batch).unwrap());
            assert_close(&got, &want, 1e-3, name);
        }
    }
}

/// Decode steps that are recorded and replayed, beside those whose kernels are queued one by one: of three sequences, which end one
/// after the other, over the end of KV blocks and over a context that is rounded up.
#[cfg(feature = "cuda")]
#[test]
fn recorded_steps_equal_those_that_are_not() {
    let device = kernels::test_device();
    for (name, dtype, tolerance) in [
        ("llama", DType::F32, 1e-3),
        ("qwen2", DType::F16, 3e-2),
        ("gemma2", DType::BF16, 3e-1),
        ("gemma3", DType::F32, 1e-3),
        ("gpt-oss-bf16", DType::F32, 1e-3),
    ] {
        let (model, config) = load_on(name, Quantization::None, &device, dtype);
        let spec = KvCacheSpec {
            num_blocks: 241,
            ..spec(dtype)
        };
        let cache = || KvCache::try_new_as_on_gpu(&config, spec.clone(), &device, true).unwrap();
        let (mut kv, mut plain) = (cache(), cache());
        let mut graphs = graphs::Graphs::new(false);
        let tokens: Vec<u32> = (0..300).map(|i| 3 + i * 37 % 93).collect();
        let blocks: Vec<u32> = (0..240).map(|i| (i * 7 + 3) % 240).collect();
        let blocks: Vec<&[u32]> = blocks.chunks(80).collect();
        let first = [250, 30, 7];
        let chunk = |sequence: usize, done, end| Chunk {
            tokens: &tokens[sequence..sequence + end],
            done,
            blocks: blocks[sequence],
        };
        let prompts = step(&[0, 1, 2].map(|sequence| chunk(sequence, 0, first[sequence])));
        for kv in [&mut kv, &mut plain] {
            assert!(graphs.forward(&model, kv, &prompts).unwrap().is_none());
            model.forward(kv, &prompts).unwrap();
        }
        for done in 0..20 {
            let alive = 3 - done / 8;
            let chunks: Vec<_> = (0..alive)
                .map(|sequence| chunk(sequence, first[sequence] + done, first[sequence] + done + 1))
                .collect();
            let batch = step(&chunks);
            let want = rows(&model.forward(&mut plain, &batch).unwrap());
            let got = graphs.forward(&model, &mut kv, &batch).unwrap();
            let got = got.unwrap_or_else(|| model.forward(&mut kv, &batch).unwrap());
            assert_close(
                &rows(&got),
                &want,
                tolerance,
                &format!("{name}, step {done}"),
            );
        }
        // A mixture of experts comes back to the processor in the middle of a step.
        let expected = if config.experts.is_some() { 0 } else { 4 };
        assert_eq!(graphs.count(), expected, "{name}");
    }
}
