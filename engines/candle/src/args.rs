//! [`CandleArgs`]: the settings of the engine; with the feature `cli`, its command-line flags.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use genset_backend_common::byte_size::ByteSize;
pub use genset_kernels::{ActivationBits, IsaChoice};

use crate::load::Quantization;

mod speculation;

pub(crate) use speculation::SpeculationSettings;
pub use speculation::{SpeculateChoice, SpeculationArgs};

/// How long a prefill instance holds blocks that are not fetched, in seconds, by default.
pub(crate) const DEFAULT_KV_LEASE_S: NonZeroU32 = NonZeroU32::new(30).unwrap();

/// The default number of adapters loaded at once.
const DEFAULT_MAX_ADAPTERS: u32 = 16;

/// The default memory for all adapters.
const DEFAULT_ADAPTER_MEMORY: ByteSize = ByteSize(1 << 30);

/// What the engine is built from; with the feature `cli`, its command-line flags.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct CandleArgs {
    /// Where to compute: cpu, cuda:N, or auto for the first GPU if there is one
    #[cfg_attr(feature = "cli", arg(long, default_value_t, env = "GENSET_DEVICE"))]
    pub device: DeviceChoice,
    /// Type of weights and activations on a GPU: bf16 or f16; auto is bf16. On the CPU it is f32
    #[cfg_attr(feature = "cli", arg(long, default_value_t))]
    pub dtype: DtypeChoice,
    /// Whether a GPU runs a step's kernels one by one, without CUDA graphs
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "BOOL", action = clap::ArgAction::Set, default_value_t = false,
            num_args = 0..=1, require_equals = true, default_missing_value = "true")
    )]
    pub enforce_eager: bool,
    /// Quantization on the CPU of weights that their file has as floats: none, q8_0, q6_k, q5_k, q4_k, q4_0
    #[cfg_attr(feature = "cli", arg(long, default_value_t, value_name = "TYPE"))]
    pub quantize: Quantization,
    /// The most tokens of a sequence; `None` for as many as the model's context holds. The KV cache is made for it.
    #[cfg_attr(feature = "cli", arg(skip))]
    pub context_length_tokens: Option<NonZeroU32>,
    /// Memory for the KV cache, such as 512MiB or 8GiB, which is also 8G [default: enough for every sequence, at most half of what is free]
    #[cfg_attr(feature = "cli", arg(long, value_name = "BYTES"))]
    pub kv_cache_memory: Option<ByteSize>,
    /// Type of the numbers in the KV cache: on the CPU f16 (auto) or f32; on a GPU that of --dtype
    #[cfg_attr(feature = "cli", arg(long, default_value_t, value_name = "DTYPE"))]
    pub kv_cache_dtype: DtypeChoice,
    /// Sequences that run at once [default: 32 on the CPU, 256 on a GPU]
    #[cfg_attr(feature = "cli", arg(long, value_name = "COUNT"))]
    pub max_num_seqs: Option<u32>,
    /// Tokens that one step computes at most [default: 512 on the CPU, 4096 on a GPU]
    #[cfg_attr(feature = "cli", arg(long, value_name = "TOKENS"))]
    pub max_num_batched_tokens: Option<u32>,
    /// Tokens per KV block
    #[cfg_attr(
        feature = "cli",
        arg(long, default_value_t = 16, value_name = "TOKENS")
    )]
    pub block_size: u32,
    /// Threads that compute on the CPU [default: one for each core]
    #[cfg_attr(feature = "cli", arg(long, value_name = "COUNT"))]
    pub threads: Option<usize>,
    /// Widest instructions that the CPU computes with: avx512 (with VNNI), avxvnni, avx2; i8mm, dotprod, neon; auto is the widest it has
    #[cfg_attr(feature = "cli", arg(long, default_value_t, value_name = "ISA"))]
    pub isa: IsaChoice,
    /// Bits of the activations that quantized weights are multiplied with on the CPU: 8 where that is enough, or 16 everywhere,
    /// which is as exact as floats and slower
    #[cfg_attr(feature = "cli", arg(long, default_value_t, value_name = "BITS"))]
    pub activation_bits: ActivationBits,
    /// Sequences that wait in the engine; more are refused
    #[cfg_attr(
        feature = "cli",
        arg(long, default_value_t = 1024, value_name = "COUNT")
    )]
    pub max_waiting: u32,
    /// How long a prefill worker holds KV blocks that nobody fetches, in seconds [out=candle, vllm]
    #[cfg_attr(
        feature = "cli",
        arg(long, default_value_t = DEFAULT_KV_LEASE_S, value_name = "SECONDS")
    )]
    pub kv_lease: NonZeroU32,
    /// LoRA adapters that may be loaded at once; 0 for none
    #[cfg_attr(feature = "cli", arg(long, default_value_t = DEFAULT_MAX_ADAPTERS, value_name = "COUNT"))]
    pub max_adapters: u32,
    /// Memory for LoRA adapters, those that are unloaded and still in use included
    #[cfg_attr(feature = "cli", arg(long, default_value_t = DEFAULT_ADAPTER_MEMORY, value_name = "BYTES"))]
    pub adapter_memory: ByteSize,
    /// Whether tokens are guessed, and how.
    #[cfg_attr(feature = "cli", command(flatten))]
    pub speculation: SpeculationArgs,
}

impl Default for CandleArgs {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            dtype: DtypeChoice::Auto,
            enforce_eager: false,
            quantize: Quantization::default(),
            context_length_tokens: None,
            kv_cache_memory: None,
            kv_cache_dtype: DtypeChoice::Auto,
            max_num_seqs: None,
            max_num_batched_tokens: None,
            block_size: 16,
            threads: None,
            isa: IsaChoice::default(),
            activation_bits: ActivationBits::default(),
            max_waiting: 1024,
            kv_lease: DEFAULT_KV_LEASE_S,
            max_adapters: DEFAULT_MAX_ADAPTERS,
            adapter_memory: DEFAULT_ADAPTER_MEMORY,
            speculation: SpeculationArgs::default(),
        }
    }
}

/// Where to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The first GPU if the build and the machine have one, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU of this number.
    Cuda(usize),
}

genset_backend_common::named! {
    /// A type of numbers: that of weights and activations on a GPU, or that of the KV cache.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum DtypeChoice: FromStr {
        /// On a GPU `bf16`; on the CPU `f32`, and `f16` in the KV cache.
        #[default]
        Auto = "auto",
        /// 32 bits; the CPU only.
        F32 = "f32",
        /// 16 bits; on the CPU in the KV cache only.
        F16 = "f16",
        /// 16 bits with the range of f32; a GPU only.
        Bf16 = "bf16",
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                let number = text
                    .strip_prefix("cuda:")
                    .and_then(|number| number.parse().ok());
                number
                    .map(Self::Cuda)
                    .ok_or_else(|| format!("{text:?} is none of auto, cpu, cuda:N"))
            }
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_shown_as_they_are_read() {
        for text in ["auto", "cpu", "cuda:3"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        assert!(
            "gpu".parse::<DeviceChoice>().is_err() && "cuda:x".parse::<DeviceChoice>().is_err()
        );
    }
}
