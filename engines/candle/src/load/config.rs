//! Reads [`ModelConfig`] from the `config.json` of a checkout, as `transformers` 4 and 5 write it.

mod experts;
mod family;
mod multimodal;
mod required;
pub(crate) mod rope;
pub(crate) mod window;

use std::path::Path;

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use self::family::{ARCHITECTURES, Family};
pub(crate) use self::required::check_required;
use super::checkout::Naming;
use super::packed::{self, Scheme};
use crate::error::LoadError;
use crate::model::config::{Activation, ModelConfig, NormKind, QueryGrowth, RopeScaling};

/// The keys that matter; missing ones have the defaults of `transformers`.
#[derive(Debug, Deserialize)]
struct Raw {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    rms_norm_eps: Option<f64>,
    layer_norm_eps: Option<f64>,
    norm_epsilon: Option<f64>,
    hidden_act: Option<String>,
    hidden_activation: Option<String>,
    attention_bias: Option<bool>,
    attention_out_bias: Option<bool>,
    use_bias: Option<bool>,
    qkv_bias: Option<bool>,
    mlp_bias: Option<bool>,
    rope_theta: Option<f64>,
    rope_local_base_freq: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<Value>,
    partial_rotary_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    #[serde(default, deserialize_with = "said")]
    sliding_window: Option<Option<usize>>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    sliding_window_pattern: Option<Value>,
    layer_types: Option<Vec<String>>,
    query_pre_attn_scalar: Option<f64>,
    #[serde(default, deserialize_with = "said")]
    attn_logit_softcapping: Option<Option<f64>>,
    #[serde(default, deserialize_with = "said")]
    final_logit_softcapping: Option<Option<f64>>,
    tie_word_embeddings: Option<bool>,
    quantization_config: Option<Value>,
    use_bidirectional_attention: Option<bool>,
    num_experts: Option<usize>,
    num_local_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    shared_expert_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
    no_rope_layers: Option<Vec<u8>>,
    no_rope_layer_interval: Option<usize>,
    swiglu_alpha: Option<f64>,
    swiglu_limit: Option<f64>,
    clip_qkv: Option<f64>,
    embedding_multiplier: Option<f64>,
    attention_multiplier: Option<f64>,
    residual_multiplier: Option<f64>,
    logits_scaling: Option<f64>,
    logit_scale: Option<f64>,
    shared_intermediate_size: Option<usize>,
    position_embedding_type: Option<String>,
}

/// Distinguishes a key that is `null` (`Some(None)`) from a missing one.
fn said<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    value: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(value).map(Some)
}

/// The content of a `config.json`.
#[derive(Debug)]
pub(crate) struct Checkout {
    pub(crate) config: ModelConfig,
    /// The architecture's name in GGUF files.
    pub(crate) gguf_name: &'static str,
    pub(crate) naming: Naming,
    /// The packing of weights that are not plain floats.
    pub(crate) packed: Option<Scheme>,
    /// Whether it is the language model of a model that also takes images.
    pub(crate) is_multimodal: bool,
}

/// Reads a `config.json`; errors name `path`. Of a model that also takes images, it reads the language model's part.
///
/// # Errors
/// A key is missing, out of its range, or requests something that the decoder does not support.
pub(crate) fn read(path: &Path, text: &[u8]) -> Result<Checkout, LoadError> {
    let value: Value =
        serde_json::from_slice(text).map_err(|error| LoadError::broken(path, error))?;
    let language_model = multimodal::language_model(&value);
    let is_multimodal = language_model.is_some();
    let value = language_model.unwrap_or(value);
    let (family, gguf_name) = architecture(path, &value)?;
    check_required(path, &value)?;
    let raw: Raw = serde_json::from_value(value).map_err(|error| LoadError::broken(path, error))?;
    let source = Source { path, family, raw };
    let config = source.config()?;
    check(path, &config, source.norm_eps().0)?;
    Ok(Checkout {
        packed: source.packed()?,
        config,
        gguf_name,
        naming: family.facts().naming,
        is_multimodal,
    })
}

/// The family of the architecture, and its name in GGUF files.
fn architecture(path: &Path, value: &Value) -> Result<(Family, &'static str), LoadError> {
    let named = value
        .pointer("/architectures/0")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let model_type = value.get("model_type").and_then(Value::as_str);
    let found = ARCHITECTURES.iter().find(|(known, ..)| *known == named);
    found
        .map(|(_, family, gguf_name)| (*family, *gguf_name))
        .ok_or_else(|| LoadError::UnknownArchitecture {
            path: path.to_owned(),
            architecture: if named.is_empty() {
                format!("of model_type {}", model_type.unwrap_or("(not given)"))
            } else {
                named.to_owned()
            },
            known: ARCHITECTURES.map(|(name, ..)| name).to_vec(),
        })
}

struct Source<'a> {
    path: &'a Path,
    family: Family,
    raw: Raw,
}

impl Source<'_> {
    fn config(&self) -> Result<ModelConfig, LoadError> {
        self.refuse_variants()?;
        let (raw, family) = (&self.raw, self.family);
        let facts = family.facts();
        let is_cohere = family == Family::Cohere2;
        let is_starcoder = family == Family::Starcoder2;
        let head_dim = self.head_dim();
        let rope = self.rope()?;
        let (qkv_bias, output_bias, mlp_bias) = if family == Family::Ernie45 || is_starcoder {
            (raw.use_bias, raw.use_bias, raw.use_bias)
        } else if family == Family::Qwen2Moe {
            (raw.qkv_bias, None, None)
        } else if family == Family::SeedOss {
            (raw.attention_bias, raw.attention_out_bias, raw.mlp_bias)
        } else {
            (raw.attention_bias, raw.attention_bias, raw.mlp_bias)
        };
        Ok(ModelConfig {
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            // The width inside one expert, if there are experts.
            intermediate_size: if family == Family::Qwen3Moe {
                raw.moe_intermediate_size.unwrap_or(768)
            } else if family == Family::Qwen2Moe {
                raw.moe_intermediate_size.unwrap_or(1408)
            } else if family == Family::Granite4 {
                raw.shared_intermediate_size.unwrap_or(1024)
            } else {
                raw.intermediate_size
            },
            num_layers: raw.num_hidden_layers,
            num_heads: raw.num_attention_heads,
            num_kv_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            head_dim,
            context_length: self.context_length(&rope.scaling),
            norm_kind: if is_cohere || is_starcoder {
                NormKind::Layer {
                    has_bias: is_starcoder,
                }
            } else {
                NormKind::RootMeanSquare
            },
            norm_eps: self.norm_eps().1.unwrap_or(facts.rms_norm_eps),
            norm_weight_offset: if family.is_gemma() { 1.0 } else { 0.0 },
            query_key_norm: facts.query_key_norm,
            block_norms: facts.block_norms,
            has_qkv_bias: facts.qkv_bias.is_there(qkv_bias),
            has_output_bias: facts.output_bias.is_there(output_bias),
            has_mlp_bias: facts.mlp_bias.is_there(mlp_bias),
            has_sinks: family == Family::GptOss,
            experts: self.experts()?,
            is_gated: !is_starcoder,
            activation: self.activation()?,
            rope,
            window: self.window()?,
            attention_scale: if family.is_gemma() {
                single(raw.query_pre_attn_scalar.unwrap_or(256.0).powf(-0.5))
            } else if family.is_granite() {
                single(raw.attention_multiplier.unwrap_or(1.0))
            } else {
                attention_scale(head_dim)
            },
            query_growth: self.query_growth()?,
            attention_softcap: self.softcap(raw.attn_logit_softcapping, 50.0),
            logit_softcap: self.softcap(raw.final_logit_softcapping, 30.0),
            embedding_scale: if family.is_gemma() {
                embedding_scale(raw.hidden_size)
            } else {
                self.granite_factor(raw.embedding_multiplier)
            },
            residual_scale: self.granite_factor(raw.residual_multiplier),
            logit_scale: if is_cohere {
                single(raw.logit_scale.unwrap_or(0.0625))
            } else {
                self.granite_factor(raw.logits_scaling).recip()
            },
            is_tied: raw.tie_word_embeddings.unwrap_or(facts.is_tied),
        })
    }

    /// The key of the norms' epsilon, and what it has.
    fn norm_eps(&self) -> (&'static str, Option<f64>) {
        if self.family == Family::Cohere2 {
            ("layer_norm_eps", self.raw.layer_norm_eps)
        } else if self.family == Family::Starcoder2 {
            ("norm_epsilon", self.raw.norm_epsilon)
        } else {
            ("rms_norm_eps", self.raw.rms_norm_eps)
        }
    }

    /// A factor that only Granite has.
    fn granite_factor(&self, given: Option<f64>) -> f32 {
        let given = given.filter(|_| self.family.is_granite());
        given.map_or(1.0, single)
    }

    fn unsupported<T>(
        &self,
        field: &str,
        value: impl std::fmt::Display,
        fix: &'static str,
    ) -> Result<T, LoadError> {
        Err(LoadError::unsupported(self.path, field, value, fix))
    }

    /// The packing of weights that are not plain floats.
    fn packed(&self) -> Result<Option<Scheme>, LoadError> {
        let is_gpt_oss = self.family == Family::GptOss;
        let Some(config) = &self.raw.quantization_config else {
            return Ok(is_gpt_oss.then_some(Scheme::TransposedExperts));
        };
        let scheme = packed::read(self.path, config)?;
        if is_gpt_oss == (scheme == Scheme::Mxfp4Experts) {
            return Ok(Some(scheme));
        }
        let method = config.get("quant_method").and_then(Value::as_str);
        let fix =
            "gpt-oss is read in mxfp4 or without quantization, and no other model is read in mxfp4";
        let field = "quantization_config.quant_method";
        self.unsupported(field, method.unwrap_or_default(), fix)
    }

    fn refuse_variants(&self) -> Result<(), LoadError> {
        if self.raw.use_bidirectional_attention == Some(true) {
            return self.unsupported("use_bidirectional_attention", true, "it must be false");
        }
        if let Some(clip) = self.raw.clip_qkv {
            return self.unsupported("clip_qkv", clip, "it must be null");
        }
        if self.family == Family::Granite4 {
            self.refuse_hybrids()?;
        }
        Ok(())
    }

    /// Of Granite 4, the decoder computes those with attention in each layer and without experts.
    fn refuse_hybrids(&self) -> Result<(), LoadError> {
        let raw = &self.raw;
        let is_attention = |kind: &&String| matches!(kind.as_str(), "attention" | "full_attention");
        let types = raw.layer_types.as_deref().unwrap_or_default();
        let other = types.iter().find(|kind| !is_attention(kind));
        if other.is_some() || types.is_empty() {
            let other = other.map_or("(not given)", String::as_str);
            return self.unsupported("layer_types", other, "all must be attention");
        }
        let experts = raw.num_local_experts.unwrap_or(8);
        if experts > 0 {
            return self.unsupported("num_local_experts", experts, "it must be 0");
        }
        let positions = raw.position_embedding_type.as_deref();
        if positions == Some("rope") {
            return Ok(());
        }
        let positions = positions.unwrap_or("null");
        self.unsupported("position_embedding_type", positions, "it must be rope")
    }

    fn head_dim(&self) -> usize {
        let heads = self.raw.num_attention_heads;
        let equal = self.raw.hidden_size.checked_div(heads).unwrap_or(0);
        let head_dim = self.raw.head_dim.or(self.family.facts().head_dim);
        head_dim.unwrap_or(equal)
    }

    fn activation(&self) -> Result<Activation, LoadError> {
        let raw = &self.raw;
        let (field, named) = match (&raw.hidden_activation, &raw.hidden_act) {
            (Some(named), _) if self.family.is_gemma() => ("hidden_activation", named.as_str()),
            (_, Some(named)) if !self.family.is_gemma() => ("hidden_act", named.as_str()),
            (Some(_) | None, Some(_) | None) if self.family.is_gemma() => {
                ("hidden_activation", "gelu_pytorch_tanh")
            }
            (Some(_) | None, Some(_) | None) if self.family == Family::Starcoder2 => {
                ("hidden_act", "gelu_pytorch_tanh")
            }
            (Some(_) | None, Some(_) | None) => ("hidden_act", "silu"),
        };
        match named {
            "silu" | "swish" if self.family == Family::GptOss => self.clamped_swish(),
            "silu" | "swish" => Ok(Activation::Silu),
            "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
            other => self.unsupported(field, other, "silu and gelu_pytorch_tanh are"),
        }
    }

    fn clamped_swish(&self) -> Result<Activation, LoadError> {
        let slope = self.raw.swiglu_alpha.map(single);
        if let Some(slope) = slope.filter(|slope| *slope != Activation::SWISH_SLOPE) {
            return self.unsupported("swiglu_alpha", slope, "1.702 is");
        }
        let limit = self.raw.swiglu_limit.map_or(7.0, single);
        if limit.is_finite() && limit > 0.0 {
            return Ok(Activation::ClampedSwish { limit });
        }
        let problem = format!("is {limit}; it must be above 0");
        Err(LoadError::bad_config(self.path, "swiglu_limit", problem))
    }

    /// Gemma 2 has softcaps unless its file disables them.
    fn softcap(&self, cap: Option<Option<f64>>, of_gemma2: f64) -> Option<f32> {
        let by_default = (self.family == Family::Gemma2).then_some(of_gemma2);
        cap.unwrap_or(by_default)
            .filter(|cap| self.family.is_gemma() && *cap > 0.0)
            .map(single)
    }
}

/// Rejects impossible sizes, so that later code does not divide by zero or allocate without limit. `eps` is the file's key of the
/// norms' epsilon.
///
/// # Errors
/// Names the invalid size.
pub(crate) fn check(path: &Path, config: &ModelConfig, eps: &str) -> Result<(), LoadError> {
    let bad = |field: &str, problem: String| Err(LoadError::bad_config(path, field, problem));
    let sizes = [
        ("vocabulary size", config.vocab_size, 1 << 22),
        ("hidden size", config.hidden_size, 1 << 17),
        ("feed-forward size", config.intermediate_size, 1 << 20),
        ("number of layers", config.num_layers, 1 << 12),
        ("number of heads", config.num_heads, 1 << 12),
        (
            "number of key and value heads",
            config.num_kv_heads,
            1 << 12,
        ),
        ("head size", config.head_dim, 1 << 12),
        ("context length", config.context_length, 1 << 30),
    ];
    for (name, size, most) in sizes {
        if size == 0 || size > most {
            return bad(name, format!("is {size}; it must be 1 to {most}"));
        }
    }
    if !config.num_heads.is_multiple_of(config.num_kv_heads) {
        let problem = format!(
            "{} do not divide {} heads",
            config.num_kv_heads, config.num_heads
        );
        return bad("number of key and value heads", problem);
    }
    if let Some((field, problem)) = config
        .experts
        .and_then(|experts| experts::problem(experts, config.num_layers))
    {
        return bad(field, problem);
    }
    if !config.head_dim.is_multiple_of(2) {
        return bad(
            "head size",
            format!("is {}; it must be even", config.head_dim),
        );
    }
    let factors = [
        ("factor of attention scores", config.attention_scale),
        ("factor of embeddings", config.embedding_scale),
        ("factor of residuals", config.residual_scale),
        ("factor of logits", config.logit_scale),
    ];
    for (name, factor) in factors {
        if !factor.is_finite() || factor <= 0.0 {
            return bad(name, format!("is {factor}; it must be above 0"));
        }
    }
    if !(f64::MIN_POSITIVE..1.0).contains(&config.norm_eps) {
        return bad(eps, format!("is {}", config.norm_eps));
    }
    let thetas = [Some(config.rope.theta), config.rope.window_theta];
    if thetas
        .iter()
        .flatten()
        .any(|theta| theta.is_nan() || *theta < 1.0)
    {
        return bad("rope_theta", "is less than 1".into());
    }
    if let Some(QueryGrowth { slope, period }) = config.query_growth
        && (!slope.is_finite() || slope < 0.0 || period == 0)
    {
        let problem = format!("is {slope} in each {period} tokens");
        return bad("growth of queries", problem);
    }
    if let RopeScaling::Yarn {
        original_context_length,
        ..
    } = &config.rope.scaling
        && (config.rope.theta <= 1.0 || *original_context_length == 0)
    {
        return bad(
            "rope_theta",
            format!("is {}; with YaRN it must be above 1", config.rope.theta),
        );
    }
    if let RopeScaling::Factors(factors) = &config.rope.scaling
        && (factors.len() != config.rope.rotary_dim / 2
            || factors
                .iter()
                .any(|factor| factor.is_nan() || *factor <= 0.0))
    {
        let problem = format!(
            "has {} factors; a head needs {}, all positive",
            factors.len(),
            config.rope.rotary_dim / 2
        );
        return bad("rope_freqs.weight", problem);
    }
    Ok(())
}

/// The factor of attention scores with heads of width `head_dim`.
pub(crate) fn attention_scale(head_dim: usize) -> f32 {
    root(head_dim).recip()
}

/// The factor of Gemma's embeddings.
pub(crate) fn embedding_scale(hidden_size: usize) -> f32 {
    root(hidden_size)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "sizes of a model, far below the 24 bits that are exact"
)]
fn root(size: usize) -> f32 {
    (size as f32).sqrt()
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "configurations say in f64 what is computed in f32"
)]
pub(crate) fn single(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests;
