//! The supported families, and what is particular to their configurations: what they leave out, and what they always have.

use crate::load::checkout::Naming;
use crate::model::config::{BlockNorms, QueryKeyNorm};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    Llama,
    Mistral,
    Mixtral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Gemma2,
    Gemma3,
    Phi3,
    Glm,
    Glm4,
    Granite,
    Granite4,
    SeedOss,
    Ernie45,
    Exaone4,
    Cohere2,
    Hunyuan,
    Ministral3,
    Olmoe,
    GraniteMoe,
    Qwen2Moe,
    Starcoder2,
    Olmo2,
    Olmo3,
    SmolLm3,
    GptOss,
}

/// The supported architectures of checkouts, as `config.json` calls them, and their names in GGUF files.
pub(super) const ARCHITECTURES: [(&str, Family, &str); 28] = [
    ("LlamaForCausalLM", Family::Llama, "llama"),
    ("MistralForCausalLM", Family::Mistral, "llama"),
    ("MixtralForCausalLM", Family::Mixtral, "llama"),
    ("Qwen2ForCausalLM", Family::Qwen2, "qwen2"),
    ("Qwen3ForCausalLM", Family::Qwen3, "qwen3"),
    ("Qwen3MoeForCausalLM", Family::Qwen3Moe, "qwen3moe"),
    ("Gemma2ForCausalLM", Family::Gemma2, "gemma2"),
    ("Gemma3ForCausalLM", Family::Gemma3, "gemma3"),
    ("Phi3ForCausalLM", Family::Phi3, "phi3"),
    ("GlmForCausalLM", Family::Glm, "chatglm"),
    ("Glm4ForCausalLM", Family::Glm4, "glm4"),
    ("GraniteForCausalLM", Family::Granite, "granite"),
    ("GraniteMoeHybridForCausalLM", Family::Granite4, "granite"),
    ("SeedOssForCausalLM", Family::SeedOss, "seed_oss"),
    ("Ernie4_5ForCausalLM", Family::Ernie45, "ernie4_5"),
    ("Ernie4_5_ForCausalLM", Family::Ernie45, "ernie4_5"),
    ("Exaone4ForCausalLM", Family::Exaone4, "exaone4"),
    ("Cohere2ForCausalLM", Family::Cohere2, "cohere2"),
    (
        "HunYuanDenseV1ForCausalLM",
        Family::Hunyuan,
        "hunyuan-dense",
    ),
    ("Ministral3ForCausalLM", Family::Ministral3, "mistral3"),
    ("OlmoeForCausalLM", Family::Olmoe, "olmoe"),
    ("GraniteMoeForCausalLM", Family::GraniteMoe, "granitemoe"),
    ("Qwen2MoeForCausalLM", Family::Qwen2Moe, "qwen2moe"),
    ("Starcoder2ForCausalLM", Family::Starcoder2, "starcoder2"),
    ("Olmo2ForCausalLM", Family::Olmo2, "olmo2"),
    ("Olmo3ForCausalLM", Family::Olmo3, "olmo2"),
    ("SmolLM3ForCausalLM", Family::SmolLm3, "smollm3"),
    ("GptOssForCausalLM", Family::GptOss, "gpt-oss"),
];

/// What is particular to a family's configurations.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts {
    pub(super) naming: Naming,
    /// The defaults of keys that a file may leave out. Cohere's key is `layer_norm_eps`, StarCoder2's `norm_epsilon`.
    pub(super) rms_norm_eps: f64,
    pub(super) theta: f64,
    /// `None` if it is the hidden size divided by the number of heads.
    pub(super) head_dim: Option<usize>,
    /// The default; `None` if all dimensions of a head rotate.
    pub(super) partial_rotary_factor: Option<f64>,
    /// Whether rows `2j` and `2j + 1` of a head rotate together.
    pub(super) is_paired: bool,
    pub(super) is_tied: bool,
    /// The biases of the projections to queries, keys and values; the key is `attention_bias`, but for Ernie and StarCoder2, all of
    /// whose biases have one key, and Qwen2-MoE.
    pub(super) qkv_bias: Bias,
    /// That of attention's output projection; the key is the same, but for Seed-OSS.
    pub(super) output_bias: Bias,
    /// Those of the feed-forward block; the key is `mlp_bias`.
    pub(super) mlp_bias: Bias,
    pub(super) query_key_norm: QueryKeyNorm,
    pub(super) block_norms: BlockNorms,
    pub(super) windows: Windows,
    pub(super) window_theta: WindowTheta,
    /// The defaults of the numbers of experts per layer and per token; `None` for families without experts.
    pub(super) experts: Option<(usize, usize)>,
}

/// Whether projections have biases.
#[derive(Debug, Clone, Copy)]
pub(super) enum Bias {
    /// Whatever the file says.
    Always(bool),
    /// Unless the file says otherwise.
    ByDefault(bool),
}

impl Bias {
    pub(super) fn is_there(self, said: Option<bool>) -> bool {
        match self {
            Self::Always(always) => always,
            Self::ByDefault(default) => said.unwrap_or(default),
        }
    }
}

/// Which layers have a sliding window.
#[derive(Debug, Clone, Copy)]
pub(super) enum Windows {
    /// None, whatever the file says.
    Never,
    /// Those that the file says, if `use_sliding_window` is true.
    IfSaid,
    /// Unless the file says otherwise, all but each `full_every`th layer.
    Usual {
        /// `None` if the file must have the size.
        size_tokens: Option<usize>,
        full_every: Option<usize>,
    },
}

/// How layers with a window rotate.
#[derive(Debug, Clone, Copy)]
pub(super) enum WindowTheta {
    /// As all others.
    Same,
    /// Without the scaling of the others.
    Unscaled,
    /// As [`Self::Unscaled`], with this base unless the file has one.
    Own(f64),
}

/// Llama's.
const USUAL: Facts = Facts {
    naming: Naming::Usual,
    rms_norm_eps: 1e-6,
    theta: 10_000.0,
    head_dim: None,
    partial_rotary_factor: None,
    is_paired: false,
    is_tied: false,
    qkv_bias: Bias::ByDefault(false),
    output_bias: Bias::ByDefault(false),
    mlp_bias: Bias::Always(false),
    query_key_norm: QueryKeyNorm::None,
    block_norms: BlockNorms::Inputs,
    windows: Windows::Never,
    window_theta: WindowTheta::Same,
    experts: None,
};

impl Family {
    pub(super) const fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    pub(super) const fn is_granite(self) -> bool {
        matches!(self, Self::Granite | Self::Granite4 | Self::GraniteMoe)
    }

    pub(super) const fn facts(self) -> Facts {
        match self {
            Self::Llama => Facts {
                mlp_bias: Bias::ByDefault(false),
                ..USUAL
            },
            Self::Mistral => Facts {
                windows: Windows::Usual {
                    size_tokens: Some(4096),
                    full_every: None,
                },
                ..USUAL
            },
            Self::Mixtral => Facts {
                naming: Naming::Mixtral,
                rms_norm_eps: 1e-5,
                theta: 1_000_000.0,
                windows: Windows::Usual {
                    size_tokens: None,
                    full_every: None,
                },
                experts: Some((8, 2)),
                ..USUAL
            },
            Self::Qwen2 => Facts {
                qkv_bias: Bias::Always(true),
                output_bias: Bias::Always(false),
                windows: Windows::IfSaid,
                ..USUAL
            },
            Self::Qwen3 => Facts {
                head_dim: Some(128),
                query_key_norm: QueryKeyNorm::Heads,
                windows: Windows::IfSaid,
                ..USUAL
            },
            Self::Qwen3Moe => Facts {
                query_key_norm: QueryKeyNorm::Heads,
                windows: Windows::IfSaid,
                experts: Some((128, 8)),
                ..USUAL
            },
            Self::Gemma2 => Facts {
                head_dim: Some(256),
                is_tied: true,
                block_norms: BlockNorms::Both,
                windows: Windows::Usual {
                    size_tokens: Some(4096),
                    full_every: Some(2),
                },
                ..USUAL
            },
            Self::Gemma3 => Facts {
                theta: 1_000_000.0,
                head_dim: Some(256),
                is_tied: true,
                query_key_norm: QueryKeyNorm::Heads,
                block_norms: BlockNorms::Both,
                windows: Windows::Usual {
                    size_tokens: Some(4096),
                    full_every: Some(6),
                },
                window_theta: WindowTheta::Own(10_000.0),
                ..USUAL
            },
            Self::Phi3 => Facts {
                naming: Naming::Phi3,
                rms_norm_eps: 1e-5,
                partial_rotary_factor: Some(1.0),
                qkv_bias: Bias::Always(false),
                output_bias: Bias::Always(false),
                windows: Windows::Usual {
                    size_tokens: None,
                    full_every: None,
                },
                ..USUAL
            },
            Self::Glm => Facts {
                naming: Naming::Glm,
                rms_norm_eps: 1.5625e-7,
                head_dim: Some(128),
                partial_rotary_factor: Some(0.5),
                is_paired: true,
                qkv_bias: Bias::ByDefault(true),
                output_bias: Bias::Always(false),
                ..USUAL
            },
            Self::Glm4 => Facts {
                block_norms: BlockNorms::Both,
                ..Self::Glm.facts()
            },
            Self::Granite => Facts {
                mlp_bias: Bias::ByDefault(false),
                ..USUAL
            },
            Self::Granite4 => Facts {
                naming: Naming::Granite4,
                ..USUAL
            },
            Self::SeedOss => Facts {
                head_dim: Some(128),
                qkv_bias: Bias::ByDefault(true),
                mlp_bias: Bias::ByDefault(false),
                ..USUAL
            },
            Self::Ernie45 => Facts {
                rms_norm_eps: 1e-5,
                theta: 500_000.0,
                head_dim: Some(128),
                is_paired: true,
                is_tied: true,
                mlp_bias: Bias::ByDefault(false),
                ..USUAL
            },
            Self::Exaone4 => Facts {
                rms_norm_eps: 1e-5,
                qkv_bias: Bias::Always(false),
                output_bias: Bias::Always(false),
                query_key_norm: QueryKeyNorm::Heads,
                block_norms: BlockNorms::Outputs,
                windows: Windows::Usual {
                    size_tokens: Some(4096),
                    full_every: Some(4),
                },
                ..USUAL
            },
            Self::Cohere2 => Facts {
                rms_norm_eps: 1e-5,
                is_paired: true,
                is_tied: true,
                block_norms: BlockNorms::Shared,
                windows: Windows::Usual {
                    size_tokens: Some(4096),
                    full_every: Some(4),
                },
                ..USUAL
            },
            Self::Hunyuan => Facts {
                naming: Naming::Hunyuan,
                rms_norm_eps: 1e-5,
                query_key_norm: QueryKeyNorm::RotatedHeads,
                ..USUAL
            },
            Self::Ministral3 => Facts {
                rms_norm_eps: 1e-5,
                theta: 1_000_000.0,
                head_dim: Some(128),
                qkv_bias: Bias::Always(false),
                output_bias: Bias::Always(false),
                windows: Windows::Usual {
                    size_tokens: None,
                    full_every: None,
                },
                ..USUAL
            },
            Self::Olmoe => Facts {
                rms_norm_eps: 1e-5,
                query_key_norm: QueryKeyNorm::Whole,
                experts: Some((64, 8)),
                ..USUAL
            },
            Self::GraniteMoe => Facts {
                naming: Naming::GraniteMoe,
                experts: Some((8, 2)),
                ..USUAL
            },
            Self::Qwen2Moe => Facts {
                qkv_bias: Bias::ByDefault(true),
                output_bias: Bias::Always(false),
                experts: Some((60, 4)),
                ..USUAL
            },
            Self::Starcoder2 => Facts {
                naming: Naming::Starcoder2,
                rms_norm_eps: 1e-5,
                is_tied: true,
                qkv_bias: Bias::ByDefault(true),
                output_bias: Bias::ByDefault(true),
                mlp_bias: Bias::ByDefault(true),
                windows: Windows::Usual {
                    size_tokens: None,
                    full_every: None,
                },
                ..USUAL
            },
            Self::Olmo2 => Facts {
                rms_norm_eps: 1e-5,
                query_key_norm: QueryKeyNorm::Whole,
                block_norms: BlockNorms::Outputs,
                ..USUAL
            },
            Self::Olmo3 => Facts {
                theta: 500_000.0,
                windows: Windows::Usual {
                    size_tokens: Some(4096),
                    full_every: Some(4),
                },
                window_theta: WindowTheta::Unscaled,
                ..Self::Olmo2.facts()
            },
            Self::SmolLm3 => Facts {
                theta: 2_000_000.0,
                is_tied: true,
                mlp_bias: Bias::ByDefault(false),
                ..USUAL
            },
            Self::GptOss => Facts {
                naming: Naming::GptOss,
                rms_norm_eps: 1e-5,
                theta: 150_000.0,
                head_dim: Some(64),
                qkv_bias: Bias::ByDefault(true),
                output_bias: Bias::ByDefault(true),
                mlp_bias: Bias::Always(true),
                windows: Windows::Usual {
                    size_tokens: Some(128),
                    full_every: Some(2),
                },
                experts: Some((128, 4)),
                ..USUAL
            },
        }
    }
}
