//! The decoder compared with `transformers`, and with itself: packing, chunking and placement of rows change no bits.
//!
//! `tests/reference/make.py` makes the reference models and logits.

mod lora;
mod on_gpu;
mod packed;

use candle_core::{DType, Device, Tensor};
use serde::Deserialize;

use super::*;
use crate::load::tests::reference;
use crate::load::{OpenModel, Quantization, WeightOptions};

const BLOCK_SIZE: usize = 4;
/// Reference models of plain weights. GGUF files cannot hold the last two.
pub(crate) const MODELS: [&str; 32] = [
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
    "olmo2",
    "olmo3",
    "glm4",
    "starcoder2",
    "qwen2-moe",
    "granite-moe",
    "olmoe",
    "ministral3",
    "hunyuan",
    "cohere2",
    "exaone4",
    "ernie45",
    "seed-oss",
    "granite",
    "granite4",
    "glm",
    "gpt-oss-bf16",
];

/// The absolute tolerance of logits against the reference; they are of order 1 to 10.
const TOLERANCE: f32 = 1e-4;

#[derive(Deserialize)]
struct Expected {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    tokens: Vec<u32>,
    /// The logits of the last rows.
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
    let open = OpenModel::open(&reference(name)).unwrap();
    let options = WeightOptions {
        device: device.clone(),
        dtype,
        quantization,
    };
    let model = Model::try_new(&open.config, &mut open.weights(options, |_| Ok(()))).unwrap();
    (model, open.config)
}

fn cases(name: &str) -> Vec<Case> {
    let text = std::fs::read_to_string(reference(name).join("expected.json")).unwrap();
    serde_json::from_str::<Expected>(&text).unwrap().cases
}

fn spec(dtype: DType) -> KvCacheSpec {
    KvCacheSpec {
        num_blocks: 64,
        block_size: BLOCK_SIZE,
        dtype,
    }
}

pub(crate) fn cache(config: &ModelConfig) -> KvCache {
    cache_of(DType::F32, config)
}

fn cache_of(dtype: DType, config: &ModelConfig) -> KvCache {
    KvCache::try_new(config, spec(dtype), &Device::Cpu).unwrap()
}

/// One sequence's part of a step: its tokens so far, the number computed before, and its blocks.
struct Chunk<'a> {
    tokens: &'a [u32],
    done: usize,
    blocks: &'a [u32],
}

/// A step that wants the logits of all its rows.
fn step(chunks: &[Chunk<'_>]) -> StepBatch {
    let mut batch = StepBatch::default();
    for chunk in chunks {
        let tokens = &chunk.tokens[chunk.done..];
        let piece = Piece {
            tokens,
            start: chunk.done,
            blocks: chunk.blocks[..chunk.tokens.len().div_ceil(BLOCK_SIZE)].to_vec(),
            wanted: tokens.len(),
        };
        batch.push(BLOCK_SIZE, piece);
    }
    batch
}

fn rows(logits: &Tensor) -> Vec<Vec<f32>> {
    logits.to_vec2().unwrap()
}

/// Blocks that are neither sorted nor adjacent.
fn scattered_blocks(from: u32) -> Vec<u32> {
    (0..16).map(|i| from + (i * 7 + 3) % 16).collect()
}

/// A step with a whole prompt.
fn prompt(tokens: &[u32]) -> StepBatch {
    let blocks: Vec<u32> = (0..16).collect();
    step(&[Chunk {
        tokens,
        done: 0,
        blocks: &blocks,
    }])
}

pub(crate) fn prefill(model: &Model, kv: &mut KvCache, tokens: &[u32]) -> Vec<Vec<f32>> {
    rows(&model.forward(kv, &prompt(tokens)).unwrap())
}

/// The logits of the rows that the reference has.
fn last_rows(model: &Model, kv: &mut KvCache, case: &Case) -> Vec<Vec<f32>> {
    let mut all = prefill(model, kv, &case.tokens);
    all.split_off(all.len() - case.logits.len())
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
            let last = last_rows(&model, &mut cache(&config), &case);
            let what = format!("{name}, {} tokens", case.tokens.len());
            assert_close(&last, &case.logits, TOLERANCE, &what);
        }
    }
}

#[test]
fn products_are_timed_by_kind_and_read_the_experts_that_their_rows_need() {
    let (model, _) = load("qwen3-moe", Quantization::None);
    let kinds = [
        "embedding (F32)",
        "q, k, v (F32)",
        "attention's output (F32)",
        "router (F32)",
        "experts' gate, up (F32)",
        "experts' down (F32)",
        "output head (F32)",
    ];
    // Of eight experts, each row needs three.
    for (sequences, experts) in [(1u8, 3), (2, 6), (4, 8)] {
        let times = model.time_products(sequences.into(), 2).unwrap().unwrap();
        let found: Vec<&str> = times.iter().map(|time| time.kind.as_str()).collect();
        assert_eq!(found, kinds);
        let bytes: Vec<u64> = times.iter().map(|time| time.bytes).collect();
        let (layers, hidden, inner) = (2, 48, 64);
        assert_eq!(bytes[0], u64::from(sequences) * hidden * 4);
        assert_eq!(bytes[1], layers * 128 * hidden * 4);
        assert_eq!(bytes[5], layers * experts * hidden * inner * 4);
    }
}

/// The models whose bits are compared: every architecture, in f32 and as served by default.
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
        // First all but one token of each; then a whole prompt beside single rows and a chunk.
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
    let mut batch = prompt(tokens);
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
        let last = last_rows(&model, &mut cache_of(DType::F16, &config), case);
        assert_close(&last, &case.logits, 2e-2, name);
        let in_f32 = last_rows(&model, &mut cache(&config), case);
        assert!(last != in_f32, "{name}: not f16");
    }
}

#[test]
fn a_batch_that_does_not_fit_is_refused() {
    let (model, config) = load("llama", Quantization::None);
    let good = prompt(&[5, 6, 7, 8, 9]);
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
