//! A model folder of a Llama or a Qwen3: its configuration, the names and shapes of its tensors, and its weights.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use candle_core::{Device, Tensor};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokenizers::Tokenizer;

/// A model architecture: the names of its tensors, and its computation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Llama.
    #[default]
    Llama,
    /// Qwen3: a Llama with norms on queries and keys.
    Qwen3,
}

/// A model's configuration from `config.json`.
#[derive(Debug, Clone, Deserialize)]
#[expect(missing_docs, reason = "the fields are transformers', by their names")]
pub struct Config {
    #[serde(default)]
    pub model_type: Family,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    pub rope_theta: f32,
    pub initializer_range: f32,
    pub tie_word_embeddings: bool,
}

/// Reads the tokenizer of the model in `folder`.
///
/// Parses it by the tokenizers crate's own code: its `from_file` is generic, and an optimized program that calls it compiles ten
/// seconds longer.
///
/// # Errors
/// If `tokenizer.json` cannot be read.
pub fn read_tokenizer(folder: &Path) -> anyhow::Result<Tokenizer> {
    let path = folder.join("tokenizer.json");
    let text = fs::read_to_string(&path).map_err(anyhow::Error::from);
    let tokenizer = text.and_then(|text| text.parse().map_err(anyhow::Error::from_boxed));
    tokenizer.with_context(|| format!("cannot read {}", path.display()))
}

/// The file of the weights.
pub const WEIGHTS: &str = "model.safetensors";

/// Weights by the names of a Hugging Face checkpoint.
pub type NamedTensors = HashMap<String, Tensor>;

/// The embedding, also the output matrix if they are tied.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// The norm before the output.
pub const FINAL_NORM: &str = "model.norm.weight";
/// The output matrix, if it is not tied.
pub const OUTPUT: &str = "lm_head.weight";

impl Config {
    /// Reads the configuration of the model in `folder`.
    ///
    /// # Errors
    /// If the file cannot be read, or describes another architecture.
    pub fn read(folder: &Path) -> anyhow::Result<Self> {
        read_json(&folder.join("config.json"))
    }

    /// Name and shape of every tensor, in the order of creation.
    #[must_use]
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let query = self.num_attention_heads * self.head_dim;
        let kv = self.num_key_value_heads * self.head_dim;
        let mut tensors = vec![(EMBEDDING.to_owned(), vec![self.vocab_size, hidden])];
        for layer in 0..self.num_hidden_layers {
            let parts = [
                ("input_layernorm", vec![hidden]),
                ("self_attn.q_proj", vec![query, hidden]),
                ("self_attn.k_proj", vec![kv, hidden]),
                ("self_attn.v_proj", vec![kv, hidden]),
                ("self_attn.o_proj", vec![hidden, query]),
                ("post_attention_layernorm", vec![hidden]),
                ("mlp.gate_proj", vec![inner, hidden]),
                ("mlp.up_proj", vec![inner, hidden]),
                ("mlp.down_proj", vec![hidden, inner]),
            ];
            let norms = match self.model_type {
                Family::Llama => &[][..],
                Family::Qwen3 => &["self_attn.q_norm", "self_attn.k_norm"],
            };
            let norms = norms.iter().map(|part| (*part, vec![self.head_dim]));
            let parts = parts.into_iter().chain(norms);
            tensors.extend(
                parts.map(|(part, shape)| (format!("model.layers.{layer}.{part}.weight"), shape)),
            );
        }
        tensors.push((FINAL_NORM.to_owned(), vec![hidden]));
        if !self.tie_word_embeddings {
            tensors.push((OUTPUT.to_owned(), vec![self.vocab_size, hidden]));
        }
        tensors
    }
}

/// The content of a JSON file.
///
/// # Errors
/// If the file is missing or has another format.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let context = || format!("cannot read {}", path.display());
    let content = fs::read_to_string(path).with_context(context)?;
    serde_json::from_str(&content).with_context(context)
}

/// Reads the weights of the model in `folder`.
///
/// # Errors
/// If the file is missing or damaged.
pub fn read_weights(folder: &Path) -> anyhow::Result<NamedTensors> {
    let path = folder.join(WEIGHTS);
    candle_core::safetensors::load(&path, &Device::Cpu)
        .with_context(|| format!("cannot read {}", path.display()))
}
