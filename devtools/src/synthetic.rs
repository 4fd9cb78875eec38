//! Models with random weights, for benchmarks and tests: realistic sizes, meaningless answers.
//!
//! Weights are drawn tensor by tensor from a seed and the tensor's name while they are written. So a model can be larger than
//! memory, and the same seed always yields the same files.

mod adapter;

use std::borrow::Cow;
use std::fs;
use std::path::Path;
use std::str::FromStr;

use anyhow::Context as _;
use rayon::prelude::*;
use safetensors::{Dtype, View};
use serde_json::json;

pub use self::adapter::make_adapter;
use crate::checkout::{Config, Family, WEIGHTS};

/// The size of a model with random weights.
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
    /// The width of SmolLM 135M, whose rows are not divisible into blocks of 256; likewise the next three.
    W576,
    /// The width of Gemma 3 270M.
    W640,
    /// The width of Qwen2.5 0.5B.
    W896,
    /// The width of SmolLM 360M.
    W960,
    /// The width of Qwen3 0.6B.
    W1024,
    /// The width of Qwen2.5 1.5B.
    W1536,
}

impl SyntheticSize {
    /// Every size.
    pub const ALL: [Self; 10] = [
        Self::Tiny,
        Self::M100,
        Self::M500,
        Self::B1,
        Self::W576,
        Self::W640,
        Self::W896,
        Self::W960,
        Self::W1024,
        Self::W1536,
    ];

    /// The name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::M100 => "100m",
            Self::M500 => "500m",
            Self::B1 => "1b",
            Self::W576 => "w576",
            Self::W640 => "w640",
            Self::W896 => "w896",
            Self::W960 => "w960",
            Self::W1024 => "w1024",
            Self::W1536 => "w1536",
        }
    }

    /// The model's configuration, as a Llama.
    #[must_use]
    pub fn config(self) -> Config {
        let [vocab, hidden, wide, layers, heads, kv_heads] = match self {
            Self::Tiny => [2048, 256, 512, 2, 4, 2],
            Self::M100 => [32_000, 768, 2048, 12, 12, 4],
            Self::M500 => [32_000, 1280, 3584, 24, 20, 5],
            Self::B1 => [32_000, 2048, 8192, 16, 32, 8],
            // Rows have the real widths; there are enough layers to dominate a step.
            Self::W576 => [32_000, 576, 1536, 16, 9, 3],
            Self::W640 => [32_000, 640, 2048, 12, 10, 2],
            Self::W896 => [32_000, 896, 4864, 6, 14, 2],
            Self::W960 => [32_000, 960, 2560, 8, 15, 5],
            Self::W1024 => [32_000, 1024, 3072, 8, 16, 8],
            Self::W1536 => [32_000, 1536, 8960, 3, 24, 4],
        };
        Config {
            model_type: Family::Llama,
            vocab_size: vocab,
            hidden_size: hidden,
            intermediate_size: wide,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim: 64,
            max_position_embeddings: 4096,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            initializer_range: 0.02,
            tie_word_embeddings: false,
        }
    }

    /// The `config.json` of a Llama.
    #[must_use]
    pub fn config_json(self) -> String {
        self.config_json_of(Family::Llama)
    }

    fn config_json_of(self, family: Family) -> String {
        let config = self.config();
        let (architecture, model_type) = match family {
            Family::Llama => ("LlamaForCausalLM", "llama"),
            Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
        };
        let mut json = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.max_position_embeddings,
            "initializer_range": config.initializer_range,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_theta,
            "hidden_act": "silu",
            "attention_bias": false,
            "mlp_bias": false,
            "tie_word_embeddings": config.tie_word_embeddings,
            "torch_dtype": "bfloat16",
        });
        if family == Family::Qwen3 {
            json["use_sliding_window"] = false.into();
            json["sliding_window"] = serde_json::Value::Null;
            json["max_window_layers"] = config.num_hidden_layers.into();
        }
        format!("{json:#}\n")
    }

    /// The total number of weights.
    #[must_use]
    pub fn parameters(self) -> usize {
        let tensors = self.config().tensors();
        let elements = tensors
            .iter()
            .map(|(_, shape)| shape.iter().product::<usize>());
        elements.sum()
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

/// Creates `folder` with a Llama: `config.json`, and `model.safetensors` in bf16. `seed` determines all weights.
///
/// # Errors
/// If a file cannot be written.
pub fn make_model(folder: &Path, size: SyntheticSize, seed: u64) -> anyhow::Result<()> {
    make_model_of(Family::Llama, folder, size, seed)
}

/// Like [`make_model`], for any family.
///
/// # Errors
/// If a file cannot be written.
pub fn make_model_of(
    family: Family,
    folder: &Path,
    size: SyntheticSize,
    seed: u64,
) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| unwritable(folder))?;
    let path = folder.join("config.json");
    fs::write(&path, size.config_json_of(family)).with_context(|| unwritable(&path))?;
    let config = Config {
        model_type: family,
        ..size.config()
    };
    let tensors = config.tensors();
    let tensors = tensors.into_iter().map(|(name, shape)| {
        let seed = seed ^ hash(&name);
        (name, Drawn { shape, seed })
    });
    let path = folder.join(WEIGHTS);
    safetensors::serialize_to_file(tensors, None, &path).with_context(|| unwritable(&path))
}

fn unwritable(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

/// A tensor that is generated while it is written.
struct Drawn {
    shape: Vec<usize>,
    seed: u64,
}

impl View for Drawn {
    fn dtype(&self) -> Dtype {
        Dtype::BF16
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        // A norm has one dimension.
        let values = match *self.shape {
            [width] => half::bf16::ONE.to_le_bytes().repeat(width),
            _ => drawn(&self.shape, self.seed),
        };
        Cow::Owned(values)
    }

    fn data_len(&self) -> usize {
        2 * self.shape.iter().product::<usize>()
    }
}

/// Numbers uniformly distributed around 0, scaled so that a product has the size of its input.
fn drawn(shape: &[usize], seed: u64) -> Vec<u8> {
    /// Numbers that are worth several threads. Fewer are drawn on this one: the first use of rayon's threads fixes their number for
    /// the process, before an engine under test sets it.
    const WORTH_SHARING: usize = 1 << 20;
    let row_len = shape.last().copied().unwrap_or(1).max(1);
    let elements: usize = shape.iter().product();
    #[expect(clippy::cast_precision_loss, reason = "a width of a model")]
    let most = (3.0 / row_len as f32).sqrt();
    let mut bytes = vec![0; 2 * elements];
    let draw = |(row, bytes): (usize, &mut [u8])| {
        let row = u64::try_from(row).unwrap_or(u64::MAX);
        let mut state = mix(seed ^ mix(row));
        for bytes in bytes.as_chunks_mut::<2>().0 {
            state = state.wrapping_add(STEP);
            let value = most * unit(mix(state));
            *bytes = half::bf16::from_f32(value).to_le_bytes();
        }
    };
    if elements < WORTH_SHARING {
        bytes.chunks_mut(2 * row_len).enumerate().for_each(draw);
    } else {
        bytes.par_chunks_mut(2 * row_len).enumerate().for_each(draw);
    }
    bytes
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The mixing function of SplitMix64.
fn mix(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// Maps to a number between -1 and 1.
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
            assert_eq!(size.parameters(), expected);
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
        // The squares of a row of 64 sum to one, on average.
        assert!((square / 64.0 - 1.0).abs() < 0.1, "{square}");
    }
}
