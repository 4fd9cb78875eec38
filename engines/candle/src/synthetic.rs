//! Models with random weights, for benchmarks and tests: the sizes of real ones, and answers that mean nothing.
//!
//! Weights are drawn tensor by tensor from a seed and the tensor's name while they are written, so that a model larger
//! than memory can be made and the same seed always makes the same files.

mod adapter;

use std::borrow::Cow;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rayon::prelude::*;
use safetensors::{Dtype, View};
use serde_json::json;

pub use self::adapter::{USUAL_MODULES, make_adapter};
use crate::error::LoadError;
use crate::load::{
    GgufType, LoadProgress, ModelFile, OpenModel, PlannedTensor, Role, plan, write_gguf,
};
use crate::model::config::{Activation, ModelConfig, Rope, RopeScaling};

/// How large a model with random weights is: all are of Llama's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyntheticSize {
    /// 2.2 million weights, for tests.
    Tiny,
    /// 125 million weights.
    M100,
    /// 510 million weights.
    M500,
    /// 1.1 billion weights.
    B1,
}

impl SyntheticSize {
    /// Every size.
    pub const ALL: [Self; 4] = [Self::Tiny, Self::M100, Self::M500, Self::B1];

    /// The name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::M100 => "100m",
            Self::M500 => "500m",
            Self::B1 => "1b",
        }
    }

    /// What the decoder has to be.
    #[must_use]
    pub fn config(self) -> ModelConfig {
        let shape = match self {
            Self::Tiny => Shape {
                vocab: 2048,
                hidden: 256,
                wide: 512,
                layers: 2,
                heads: 4,
                kv_heads: 2,
            },
            Self::M100 => Shape {
                vocab: 32_000,
                hidden: 768,
                wide: 2048,
                layers: 12,
                heads: 12,
                kv_heads: 4,
            },
            Self::M500 => Shape {
                vocab: 32_000,
                hidden: 1280,
                wide: 3584,
                layers: 24,
                heads: 20,
                kv_heads: 5,
            },
            Self::B1 => Shape {
                vocab: 32_000,
                hidden: 2048,
                wide: 8192,
                layers: 16,
                heads: 32,
                kv_heads: 8,
            },
        };
        shape.config()
    }
}

impl FromStr for SyntheticSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|size| size.name() == text);
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("{text:?} is none of {names}")
        })
    }
}

/// The numbers in which the sizes differ.
struct Shape {
    vocab: usize,
    hidden: usize,
    wide: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
}

/// Width of a head, in all sizes.
const HEAD_DIM: usize = 64;
const CONTEXT_LENGTH: usize = 4096;

impl Shape {
    fn config(self) -> ModelConfig {
        ModelConfig {
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            intermediate_size: self.wide,
            num_layers: self.layers,
            num_heads: self.heads,
            num_kv_heads: self.kv_heads,
            head_dim: HEAD_DIM,
            context_length: CONTEXT_LENGTH,
            rms_norm_eps: 1e-5,
            norm_weight_offset: 0.0,
            has_qk_norm: false,
            has_post_norms: false,
            has_qkv_bias: false,
            has_output_bias: false,
            has_mlp_bias: false,
            has_sinks: false,
            experts: None,
            activation: Activation::Silu,
            rope: Rope {
                theta: 10_000.0,
                window_theta: None,
                scaling: RopeScaling::None,
                rotary_dim: HEAD_DIM,
                amplitude: 1.0,
                still_every: None,
            },
            window: None,
            attention_scale: 0.125,
            attention_softcap: None,
            logit_softcap: None,
            embedding_scale: 1.0,
            is_tied: false,
        }
    }
}

/// What to make.
#[derive(Debug, Clone, Copy)]
pub struct SyntheticOptions<'a> {
    /// How large.
    pub size: SyntheticSize,
    /// Decides all weights.
    pub seed: u64,
    /// The type of a GGUF file to write beside the checkout, if any.
    pub gguf: Option<GgufType>,
    /// Files of a tokenizer whose ids are below the vocabulary's size; without them the model takes tokens only.
    pub tokenizer: &'a [ModelFile],
}

/// What was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyntheticModel {
    /// The checkout's folder.
    pub folder: PathBuf,
    /// The GGUF file in it.
    pub gguf: Option<PathBuf>,
    /// Weights in all.
    pub parameters: u64,
}

/// Makes a checkout in `folder`, which is created: `config.json`, `model.safetensors` in bf16, the tokenizer's files, and
/// on demand a GGUF file of the same weights. `progress` is called while the weights are written, first for the checkout,
/// then for the GGUF file.
///
/// # Errors
/// A file cannot be written.
pub fn make_model(
    folder: &Path,
    options: &SyntheticOptions<'_>,
    progress: &(dyn Fn(LoadProgress) + Sync),
) -> Result<SyntheticModel, LoadError> {
    let config = options.size.config();
    let write = |error| LoadError::read(folder, error);
    fs::create_dir_all(folder).map_err(write)?;
    fs::write(folder.join("config.json"), config_json(&config)).map_err(write)?;
    for file in options.tokenizer {
        fs::write(folder.join(file.name), &file.content).map_err(write)?;
    }
    let planned = plan(&config);
    write_weights(
        &folder.join("model.safetensors"),
        &planned,
        options.seed,
        progress,
    )?;
    let gguf = match options.gguf {
        None => None,
        Some(kind) => {
            let path = folder.join("model.gguf");
            write_gguf(&OpenModel::open(folder)?, &path, kind, progress)?;
            Some(path)
        }
    };
    let elements = |tensor: &PlannedTensor| tensor.shape.iter().product::<usize>();
    let parameters: usize = planned.iter().map(elements).sum();
    Ok(SyntheticModel {
        folder: folder.to_owned(),
        gguf,
        parameters: u64::try_from(parameters).unwrap_or(u64::MAX),
    })
}

fn config_json(config: &ModelConfig) -> String {
    let json = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "attention_bias": false,
        "mlp_bias": false,
        "tie_word_embeddings": config.is_tied,
        "torch_dtype": "bfloat16",
    });
    format!("{json:#}\n")
}

fn write_weights(
    path: &Path,
    planned: &[PlannedTensor],
    seed: u64,
    progress: &(dyn Fn(LoadProgress) + Sync),
) -> Result<(), LoadError> {
    let total = LoadProgress {
        tensors: 0,
        all_tensors: planned.len(),
        bytes: 0,
        all_bytes: planned.iter().map(bytes).sum(),
    };
    let done = parking_lot::Mutex::new(total);
    let report = |bytes: u64| {
        let mut done = done.lock();
        done.tensors += 1;
        done.bytes += bytes;
        progress(*done);
    };
    let views = planned.iter().map(|planned| {
        let drawn = Drawn {
            planned,
            seed: seed ^ hash(&planned.name),
            report: &report,
        };
        (planned.name.as_str(), drawn)
    });
    safetensors::serialize_to_file(views, None, path)
        .map_err(|error| LoadError::read(path, std::io::Error::other(error)))
}

/// Bytes of a tensor in bf16.
fn bytes(planned: &PlannedTensor) -> u64 {
    let elements: usize = planned.shape.iter().product();
    2 * u64::try_from(elements).unwrap_or(u64::MAX / 2)
}

/// A tensor that is drawn when it is written.
struct Drawn<'a> {
    planned: &'a PlannedTensor,
    seed: u64,
    report: &'a (dyn Fn(u64) + Sync),
}

impl View for Drawn<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::BF16
    }

    fn shape(&self) -> &[usize] {
        &self.planned.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let values = match self.planned.role {
            Role::Norm => constant(&self.planned.shape, 1.0),
            Role::Bias => constant(&self.planned.shape, 0.0),
            Role::Matrix(_) => drawn(&self.planned.shape, self.seed),
        };
        (self.report)(bytes(self.planned));
        Cow::Owned(values)
    }

    fn data_len(&self) -> usize {
        2 * self.planned.shape.iter().product::<usize>()
    }
}

fn constant(shape: &[usize], value: f32) -> Vec<u8> {
    half::bf16::from_f32(value)
        .to_le_bytes()
        .repeat(shape.iter().product())
}

/// Numbers spread evenly around 0, so wide that a product keeps the size of its input.
fn drawn(shape: &[usize], seed: u64) -> Vec<u8> {
    let row_len = shape.last().copied().unwrap_or(1).max(1);
    let elements: usize = shape.iter().product();
    #[expect(clippy::cast_precision_loss, reason = "a width of a model")]
    let most = (3.0 / row_len as f32).sqrt();
    let mut bytes = vec![0; 2 * elements];
    bytes
        .par_chunks_mut(2 * row_len)
        .enumerate()
        .for_each(|(row, bytes)| {
            let row = u64::try_from(row).unwrap_or(u64::MAX);
            let mut state = mix(seed ^ mix(row));
            for bytes in bytes.as_chunks_mut::<2>().0 {
                state = state.wrapping_add(STEP);
                let value = most * unit(mix(state));
                *bytes = half::bf16::from_f32(value).to_le_bytes();
            }
        });
    bytes
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The mixing function of SplitMix64.
fn mix(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// Between -1 and 1.
fn unit(random: u64) -> f32 {
    #[expect(
        clippy::cast_precision_loss,
        reason = "24 bits, which f32 holds exactly"
    )]
    let value = (random >> 40) as f32;
    value / 8_388_608.0 - 1.0
}

fn hash(name: &str) -> u64 {
    name.bytes().fold(STEP, |hash, byte| {
        mix(hash ^ u64::from(byte)).wrapping_add(STEP)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_what_their_names_say() {
        for (size, expected) in [
            (SyntheticSize::M100, 124_668_672),
            (SyntheticSize::M500, 510_588_160),
            (SyntheticSize::B1, 1_104_218_112),
        ] {
            let planned = plan(&size.config());
            let elements = |tensor: &PlannedTensor| tensor.shape.iter().product::<usize>();
            assert_eq!(planned.iter().map(elements).sum::<usize>(), expected);
            assert_eq!(size.name().parse(), Ok(size));
        }
    }

    #[test]
    fn the_seed_decides_the_weights() {
        let numbers = |seed| drawn(&[3, 4], seed);
        assert_eq!(numbers(7), numbers(7));
        assert_ne!(numbers(7), numbers(8));
        let values: Vec<f32> = drawn(&[64, 64], 1)
            .as_chunks::<2>()
            .0
            .iter()
            .map(|bytes| half::bf16::from_le_bytes(*bytes).to_f32())
            .collect();
        let square: f32 = values.iter().map(|value| value * value).sum();
        // One square a row of 64, on average.
        assert!((square / 64.0 - 1.0).abs() < 0.1, "{square}");
    }
}
