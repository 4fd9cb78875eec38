//! Reads [`ModelConfig`] from a GGUF file's metadata and its list of tensors.
//!
//! # Source
//! The keys are those of ggml's `docs/gguf.md`. What llama.cpp assumes (Gemma's windows, softcaps and scales) is assumed here
//! too.

mod experts;

use std::path::Path;

use self::experts::{experts, intermediate_size};
use super::header::{Header, Value};
use crate::error::LoadError;
use crate::load::config::rope::{context_length, yarn_amplitude};
use crate::load::config::window::period;
use crate::load::config::{self, attention_scale};
use crate::model::config::{
    Activation, BlockNorms, ModelConfig, NormKind, QueryGrowth, QueryKeyNorm, Rope, RopeScaling,
    SlidingWindow,
};

/// The supported architectures of GGUF files; files of Mistral and Mixtral say llama, newer ones of Mistral Small and Ministral 3
/// mistral3.
const ARCHITECTURES: [&str; 21] = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "gemma2",
    "gemma3",
    "phi3",
    "smollm3",
    "mistral3",
    "olmo2",
    "glm4",
    "granite",
    "seed_oss",
    "ernie4_5",
    "exaone4",
    "cohere2",
    "hunyuan-dense",
    "olmoe",
    "granitemoe",
    "qwen2moe",
    "starcoder2",
];

pub(crate) const SEED_OSS: &str = "seed_oss";

/// The default base of rotary frequencies.
const DEFAULT_THETA: f32 = 10_000.0;
const WINDOW: &str = "attention.sliding_window";
const ORIGINAL_CONTEXT: &str = "rope.scaling.original_context_length";
pub(crate) const FREQUENCIES: &str = "rope_freqs.weight";
const LONG_FREQUENCIES: &str = "rope_factors_long.weight";
pub(crate) const SHORT_FREQUENCIES: &str = "rope_factors_short.weight";

/// Reads a file's metadata by key; errors name the key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Metadata<'a> {
    pub(crate) path: &'a Path,
    pub(crate) header: &'a Header,
    pub(crate) architecture: &'a str,
}

impl<'a> Metadata<'a> {
    /// # Errors
    /// The file names no architecture.
    pub(crate) fn new(path: &'a Path, header: &'a Header) -> Result<Self, LoadError> {
        let Some(Value::Text(architecture)) = header.metadata.get("general.architecture") else {
            let problem = "missing; is it a language model?";
            return Err(LoadError::bad_config(path, "general.architecture", problem));
        };
        Ok(Self {
            path,
            header,
            architecture,
        })
    }

    /// Checks that the decoder supports the architecture.
    ///
    /// # Errors
    /// It does not.
    pub(crate) fn check_architecture(&self) -> Result<(), LoadError> {
        if ARCHITECTURES.contains(&self.architecture) {
            return Ok(());
        }
        Err(LoadError::UnknownArchitecture {
            path: self.path.to_owned(),
            architecture: self.architecture.to_owned(),
            known: ARCHITECTURES.to_vec(),
        })
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.header.metadata.get(&self.key(key))
    }

    fn bad<T>(&self, key: &str, problem: &str) -> Result<T, LoadError> {
        Err(LoadError::bad_config(self.path, &self.key(key), problem))
    }

    fn unsupported<T>(
        &self,
        key: &str,
        value: impl std::fmt::Display,
        fix: &'static str,
    ) -> Result<T, LoadError> {
        let key = self.key(key);
        Err(LoadError::unsupported(self.path, &key, value, fix))
    }

    /// A size; if it is a list with an entry per layer, all must be equal.
    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, LoadError> {
        let to_size = |value: i64| usize::try_from(value).ok();
        let found = match self.get(key) {
            None => return Ok(None),
            Some(Value::Integer(value)) => to_size(*value),
            Some(Value::Numbers(values)) => match values.first() {
                Some(first) if values.iter().all(|value| value == first) => to_size(whole(*first)),
                Some(_) => {
                    let fix = "only models whose layers are all alike are supported";
                    return self.unsupported(key, "a list of different values", fix);
                }
                None => None,
            },
            Some(
                Value::Float(_) | Value::Bool(_) | Value::Text(_) | Value::Texts(_) | Value::Nested,
            ) => None,
        };
        match found {
            Some(size) => Ok(Some(size)),
            None => self.bad(key, "is no size"),
        }
    }

    fn required_size(&self, key: &str) -> Result<usize, LoadError> {
        match self.size(key)? {
            Some(size) => Ok(size),
            None => self.bad(key, "missing"),
        }
    }

    fn float(&self, key: &str) -> Result<Option<f64>, LoadError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(value)) if value.is_finite() => Ok(Some(*value)),
            Some(_) => self.bad(key, "is no finite number"),
        }
    }

    fn single(&self, key: &str) -> Result<Option<f32>, LoadError> {
        Ok(self.float(key)?.map(config::single))
    }

    fn text(&self, key: &str) -> Option<&'a str> {
        match self.get(key) {
            Some(Value::Text(text)) => Some(text),
            Some(_) | None => None,
        }
    }

    fn has(&self, tensor: &str) -> bool {
        self.header.tensors.contains_key(tensor)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the cast saturates, and what is out of range is refused as a size"
)]
fn whole(value: f64) -> i64 {
    value as i64
}

/// Reads the configuration; `frequencies` are the numbers of `rope_freqs.weight`, if the file has it.
///
/// # Errors
/// A key is missing, out of its range, or requests something that the decoder does not support.
pub(crate) fn read(
    metadata: Metadata<'_>,
    frequencies: Option<Vec<f32>>,
) -> Result<ModelConfig, LoadError> {
    if let Some(layers @ 1..) = metadata.size("nextn_predict_layers")? {
        return metadata.unsupported("nextn_predict_layers", layers, "it must be 0");
    }
    let key = "rope.scaling.finetuned";
    if metadata.architecture.starts_with("granite")
        && metadata.get(key) == Some(&Value::Bool(false))
    {
        return metadata.unsupported(key, false, "it must be true: positions rotate");
    }
    let key = "rope.dimension_sections";
    if metadata.get(key).is_some() {
        return metadata.unsupported(key, "a list", "models that take images have it");
    }
    let experts = experts(metadata)?;
    let hidden_size = metadata.required_size("embedding_length")?;
    let num_heads = metadata.required_size("attention.head_count")?;
    let head_dim = head_dim(metadata, hidden_size, num_heads)?;
    let num_layers = metadata.required_size("block_count")?;
    let is_gemma = metadata.architecture.starts_with("gemma");
    let is_cohere = metadata.architecture == "cohere2";
    let is_starcoder = metadata.architecture == "starcoder2";
    let eps = if is_cohere || is_starcoder {
        "attention.layer_norm_epsilon"
    } else {
        "attention.layer_norm_rms_epsilon"
    };
    let logit_scale = metadata.single("logit_scale")?.unwrap_or(1.0);
    let query_scale = query_scale(metadata, hidden_size, num_heads, num_layers, head_dim);
    let rope = rope(metadata, frequencies, head_dim)?;
    let original_context = metadata.size(ORIGINAL_CONTEXT)?;
    let config = ModelConfig {
        vocab_size: vocab_size(metadata)?,
        hidden_size,
        intermediate_size: intermediate_size(metadata, experts)?,
        num_layers,
        num_heads,
        num_kv_heads: metadata
            .size("attention.head_count_kv")?
            .unwrap_or(num_heads),
        head_dim,
        context_length: context_length(
            metadata.required_size("context_length")?,
            &rope.scaling,
            original_context.is_some(),
        ),
        norm_kind: if is_cohere || is_starcoder {
            NormKind::Layer {
                has_bias: is_starcoder,
            }
        } else {
            NormKind::RootMeanSquare
        },
        norm_eps: match metadata.float(eps)? {
            Some(eps) => eps,
            None => return metadata.bad(eps, "missing"),
        },
        norm_weight_offset: 0.0,
        query_key_norm: query_key_norm(metadata),
        block_norms: block_norms(metadata),
        has_qkv_bias: metadata.has("blk.0.attn_q.bias"),
        has_output_bias: metadata.has("blk.0.attn_output.bias"),
        has_mlp_bias: metadata.has("blk.0.ffn_up.bias"),
        has_sinks: false,
        experts,
        is_gated: !is_starcoder,
        activation: if is_gemma || is_starcoder {
            Activation::GeluTanh
        } else {
            Activation::Silu
        },
        rope,
        window: window(metadata)?,
        attention_scale: match metadata.single("attention.scale")? {
            Some(scale) if scale > 0.0 => scale,
            Some(_) | None => attention_scale(query_scale),
        },
        query_growth: query_growth(metadata)?,
        attention_softcap: softcap(metadata, "attn_logit_softcapping", 50.0)?,
        logit_softcap: softcap(metadata, "final_logit_softcapping", 30.0)?,
        embedding_scale: if is_gemma {
            config::embedding_scale(hidden_size)
        } else {
            metadata.single("embedding_scale")?.unwrap_or(1.0)
        },
        residual_scale: metadata.single("residual_scale")?.unwrap_or(1.0),
        // Granite's is a divisor.
        logit_scale: if is_cohere {
            logit_scale
        } else {
            logit_scale.recip()
        },
        is_tied: !metadata.has("output.weight"),
    };
    config::check(metadata.path, &config, &metadata.key(eps))?;
    Ok(config)
}

fn query_growth(metadata: Metadata<'_>) -> Result<Option<QueryGrowth>, LoadError> {
    let slope = metadata.single("attention.temperature_scale")?;
    let Some(slope) = slope.filter(|slope| *slope != 0.0) else {
        return Ok(None);
    };
    let period = metadata.required_size(ORIGINAL_CONTEXT)?;
    Ok(Some(QueryGrowth { slope, period }))
}

fn query_key_norm(metadata: Metadata<'_>) -> QueryKeyNorm {
    if !metadata.has("blk.0.attn_q_norm.weight") {
        QueryKeyNorm::None
    } else if matches!(metadata.architecture, "olmo2" | "olmoe") {
        QueryKeyNorm::Whole
    } else if metadata.architecture == "hunyuan-dense" {
        QueryKeyNorm::RotatedHeads
    } else {
        QueryKeyNorm::Heads
    }
}

fn block_norms(metadata: Metadata<'_>) -> BlockNorms {
    // In files of Seed-OSS, `post_attention_norm` is the name of the norm before the feed-forward block.
    if metadata.architecture == "cohere2" {
        BlockNorms::Shared
    } else if metadata.architecture == SEED_OSS || !metadata.has("blk.0.post_attention_norm.weight")
    {
        BlockNorms::Inputs
    } else if metadata.has("blk.0.attn_norm.weight") {
        BlockNorms::Both
    } else {
        BlockNorms::Outputs
    }
}

/// The number of rows of the embedding.
pub(crate) fn vocab_size(metadata: Metadata<'_>) -> Result<usize, LoadError> {
    let name = "token_embd.weight";
    let info = metadata.header.tensors.get(name);
    let info = info.ok_or_else(|| LoadError::MissingTensor {
        path: metadata.path.to_owned(),
        name: name.into(),
    })?;
    match info.shape.as_slice() {
        [rows, _] => Ok(*rows),
        shape => Err(LoadError::broken(
            metadata.path,
            format!("tensor {name} has the shape {shape:?}"),
        )),
    }
}

fn head_dim(
    metadata: Metadata<'_>,
    hidden_size: usize,
    num_heads: usize,
) -> Result<usize, LoadError> {
    let head_dim = match metadata.size("attention.key_length")? {
        Some(head_dim) => head_dim,
        None => hidden_size.checked_div(num_heads).unwrap_or(0),
    };
    let key = "attention.value_length";
    match metadata.size(key)? {
        Some(value) if value != head_dim => {
            metadata.unsupported(key, value, "it must be as wide as a head")
        }
        Some(_) | None => Ok(head_dim),
    }
}

/// Attention scores are divided by the square root of this. In the largest Gemmas it differs from the head's width, and their
/// files do not have it.
fn query_scale(
    metadata: Metadata<'_>,
    hidden_size: usize,
    num_heads: usize,
    num_layers: usize,
    head_dim: usize,
) -> usize {
    let is_27b = matches!(
        (metadata.architecture, num_layers),
        ("gemma2", 46) | ("gemma3", 62)
    );
    if is_27b {
        hidden_size.checked_div(num_heads).unwrap_or(head_dim)
    } else {
        head_dim
    }
}

/// The number of rotated dimensions per head.
fn rotary_dim(metadata: Metadata<'_>, head_dim: usize) -> Result<usize, LoadError> {
    let key = "rope.dimension_count";
    match metadata.size(key)? {
        Some(value) if value != head_dim && !matches!(metadata.architecture, "phi3" | "glm4") => {
            metadata.unsupported(key, value, "it must be as wide as a head")
        }
        Some(value) if value == 0 || value > head_dim || !value.is_multiple_of(2) => {
            let problem = format!("is {value}; it must be even, and at most {head_dim}");
            metadata.bad(key, &problem)
        }
        Some(value) => Ok(value),
        None => Ok(head_dim),
    }
}

fn rope(
    metadata: Metadata<'_>,
    frequencies: Option<Vec<f32>>,
    head_dim: usize,
) -> Result<Rope, LoadError> {
    let theta = metadata.single("rope.freq_base")?.unwrap_or(DEFAULT_THETA);
    let of_windows = metadata.single("rope.freq_base_swa")?;
    let has_windows = metadata.size(WINDOW)?.is_some_and(|size| size > 0);
    Ok(Rope {
        theta,
        window_theta: match metadata.architecture {
            "gemma3" => Some(of_windows.unwrap_or(DEFAULT_THETA)),
            // Without the scaling of the other layers.
            "olmo2" if has_windows => Some(of_windows.unwrap_or(theta)),
            _ => None,
        },
        scaling: match frequencies {
            Some(factors) => RopeScaling::Factors(factors),
            None => scaling(metadata)?,
        },
        rotary_dim: rotary_dim(metadata, head_dim)?,
        amplitude: amplitude(metadata)?,
        is_paired: matches!(metadata.architecture, "glm4" | "ernie4_5" | "cohere2"),
        still_every: still_every(metadata)?,
    })
}

/// The amplitude of rotated dimensions: YaRN's own factor times the file's.
fn amplitude(metadata: Metadata<'_>) -> Result<f32, LoadError> {
    let key = "rope.scaling.attn_factor";
    let own = match metadata.single(key)? {
        Some(own) if own > 0.0 => own,
        Some(_) => return metadata.bad(key, "is no positive number"),
        None => 1.0,
    };
    let is_whole = metadata.architecture == "olmo2" && metadata.get(key).is_some();
    // `mscale_all_dim` in `transformers`.
    let key = "rope.scaling.yarn_log_multiplier";
    let all = match metadata.single(key)? {
        Some(all) if all >= 0.0 && all.is_finite() => all,
        Some(_) => return metadata.bad(key, "is no finite number from 0 on"),
        None => 0.0,
    };
    match (
        metadata.text("rope.scaling.type"),
        scaling_factor(metadata)?,
    ) {
        // The converter of OLMo 3 writes the whole amplitude.
        (Some("yarn"), Some(_)) if is_whole => Ok(own),
        (Some("yarn"), Some(factor)) => {
            Ok(own * yarn_amplitude(factor, 1.0) / yarn_amplitude(factor, all))
        }
        (Some(_) | None, _) => Ok(own),
    }
}

fn scaling_factor(metadata: Metadata<'_>) -> Result<Option<f32>, LoadError> {
    match metadata.single("rope.scaling.factor")? {
        Some(factor) => Ok(Some(factor)),
        // The key in older files.
        None => metadata.single("rope.scale_linear"),
    }
}

fn yarn(metadata: Metadata<'_>, factor: f32) -> Result<RopeScaling, LoadError> {
    let turns = |key: &str, by_default| match metadata.single(key)? {
        Some(turns) if turns > 0.0 => Ok(turns),
        Some(_) => metadata.bad(key, "is no positive number"),
        None => Ok(by_default),
    };
    let original = metadata.size(ORIGINAL_CONTEXT)?;
    Ok(RopeScaling::Yarn {
        factor,
        fast_turns: turns("rope.scaling.yarn_beta_fast", 32.0)?,
        slow_turns: turns("rope.scaling.yarn_beta_slow", 1.0)?,
        original_context_length: match original {
            Some(original) => original,
            None => metadata.required_size("context_length")?,
        },
        is_rounded: true,
    })
}

fn scaling(metadata: Metadata<'_>) -> Result<RopeScaling, LoadError> {
    let kind = metadata.text("rope.scaling.type");
    match (kind, scaling_factor(metadata)?) {
        (Some("none"), _) | (None | Some("linear" | "yarn"), None) => Ok(RopeScaling::None),
        (None | Some("linear"), Some(factor)) if factor >= 1.0 => {
            Ok(RopeScaling::Linear { factor })
        }
        (Some("yarn"), Some(factor)) if factor >= 1.0 => yarn(metadata, factor),
        (None | Some("linear" | "yarn"), Some(_)) => {
            metadata.bad("rope.scaling.factor", "is less than 1")
        }
        (Some(other), _) => {
            let fix = "none, linear and yarn are, and factors in rope_freqs.weight";
            metadata.unsupported("rope.scaling.type", other, fix)
        }
    }
}

fn window(metadata: Metadata<'_>) -> Result<Option<SlidingWindow>, LoadError> {
    let by_default = (metadata.architecture == "gemma2").then_some(4096);
    let size = metadata.size(WINDOW)?.or(by_default);
    let Some(size_tokens) = size.filter(|size| *size > 0) else {
        return Ok(None);
    };
    let full_every = full_every(metadata)?;
    let window = SlidingWindow {
        size_tokens,
        full_every,
    };
    Ok((full_every != Some(1)).then_some(window))
}

/// The period of layers with full attention. Files have a number, or a list that says which layers have the window.
fn full_every(metadata: Metadata<'_>) -> Result<Option<usize>, LoadError> {
    let key = "attention.sliding_window_pattern";
    if let Some(Value::Numbers(are_windowed)) = metadata.get(key) {
        let are_full: Vec<bool> = are_windowed.iter().map(|layer| *layer == 0.0).collect();
        return match period(&are_full) {
            Some(every) => Ok(every),
            None => {
                let fix = "every nth layer must be without a window and all others with one";
                metadata.unsupported(key, "a list without a period", fix)
            }
        };
    }
    Ok(match metadata.size(key)? {
        Some(0) => None,
        Some(period) => Some(period),
        None => usual_full_every(metadata.architecture),
    })
}

/// The default period of layers with full attention, by architecture.
pub(crate) fn usual_full_every(architecture: &str) -> Option<usize> {
    match architecture {
        "gemma2" => Some(2),
        "gemma3" => Some(6),
        "olmo2" | "exaone4" | "cohere2" => Some(4),
        _ => None,
    }
}

/// The period of layers without rotation, by architecture; files do not have it.
fn still_every(metadata: Metadata<'_>) -> Result<Option<usize>, LoadError> {
    match metadata.architecture {
        "smollm3" => Ok(Some(4)),
        // Those without a window.
        "exaone4" | "cohere2" => Ok(window(metadata)?.and_then(|window| window.full_every)),
        _ => Ok(None),
    }
}

/// Gemma 2's softcaps are `by_default` unless its file names them.
fn softcap(metadata: Metadata<'_>, key: &str, by_default: f32) -> Result<Option<f32>, LoadError> {
    let by_default = (metadata.architecture == "gemma2").then_some(by_default);
    let given = metadata.single(key)?;
    Ok(given.or(by_default).filter(|cap| *cap > 0.0))
}

/// The tensor with a factor for each pair's frequency: of those for short and for long contexts, the one that fits the model's
/// context.
pub(crate) fn frequencies_tensor(metadata: Metadata<'_>) -> Result<&'static str, LoadError> {
    if metadata.has(FREQUENCIES) {
        return Ok(FREQUENCIES);
    }
    let context = metadata.size("context_length")?;
    let original = metadata.size(ORIGINAL_CONTEXT)?;
    Ok(if original.or(context) < context {
        LONG_FREQUENCIES
    } else {
        SHORT_FREQUENCIES
    })
}
