//! `tiny-chat-q8_0.gguf`: the same weights for llama.cpp and its kin, with the tokenizer inside.
//!
//! Matrices are Q8_0, norms f32. The file is made from `model.safetensors` and the tokenizer's files and nothing else.
//!
//! # Source
//! The names of tensors and metadata are those of the GGUF specification. llama.cpp's converter for Llama lets the two
//! halves of each query and key head alternate, because its rotation pairs neighbours; so does this file.

use std::collections::HashMap;
use std::io::{Cursor, Read, Seek};
use std::path::Path;

use anyhow::{Context as _, ensure};
use candle_core::quantized::gguf_file::{self, Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;

use crate::model::Config;
use crate::weights::Weights;

/// The file's name in the model's folder.
pub(crate) const FILE: &str = "tiny-chat-q8_0.gguf";

/// `general.file_type` of a file whose matrices are Q8_0.
const MOSTLY_Q8_0: u32 = 7;
/// `tokenizer.ggml.token_type` of a token of text, and of one that steers.
const NORMAL_TOKEN: i32 = 1;
const CONTROL_TOKEN: i32 = 3;

/// What the file takes from `tokenizer.json`.
#[derive(Debug, Deserialize)]
struct TokenizerFile {
    model: BpeModel,
    added_tokens: Vec<AddedToken>,
}

#[derive(Debug, Deserialize)]
struct BpeModel {
    vocab: HashMap<String, u32>,
    merges: Vec<(String, String)>,
}

#[derive(Debug, Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

/// What the file takes from `tokenizer_config.json`.
#[derive(Debug, Deserialize)]
struct TokenizerConfig {
    chat_template: String,
    eos_token: String,
    pad_token: String,
}

fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> anyhow::Result<T> {
    let context = || format!("cannot read {}", path.display());
    let content = std::fs::read_to_string(path).with_context(context)?;
    serde_json::from_str(&content).with_context(context)
}

/// The content of the file. `model` is the folder with the tokenizer's files.
///
/// # Errors
/// When the tokenizer's files cannot be read, or a tensor does not fit.
pub(crate) fn to_bytes(
    config: &Config,
    weights: &Weights,
    model: &Path,
) -> anyhow::Result<Vec<u8>> {
    let mut metadata = shape_metadata(config)?;
    metadata.extend(tokenizer_metadata(config, model)?);
    let mut tensors = Vec::new();
    for (name, tensor) in weights {
        let (name, kind) = gguf_name(name)?;
        let tensor = kind.interleave(&tensor.to_dtype(DType::F32)?, config)?;
        let dtype = if tensor.dims().len() == 1 {
            GgmlDType::F32
        } else {
            GgmlDType::Q8_0
        };
        tensors.push((name, QTensor::quantize(&tensor, dtype)?));
    }
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    let metadata: Vec<_> = metadata
        .iter()
        .map(|(name, value)| (*name, value))
        .collect();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| (name.as_str(), tensor))
        .collect();
    let mut bytes = Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &metadata, &tensors)?;
    Ok(bytes.into_inner())
}

/// The weights of such a file, by their names in a Hugging Face checkpoint.
///
/// # Errors
/// When the file is damaged or has tensors that this model has not.
pub(crate) fn read(config: &Config, mut file: impl Read + Seek) -> anyhow::Result<Weights> {
    let content = Content::read(&mut file)?;
    let mut weights = Weights::new();
    for name in content.tensor_infos.keys() {
        let tensor = content.tensor(&mut file, name, &Device::Cpu)?;
        let (hugging_face_name, kind) = hugging_face_name(name)?;
        let tensor = kind.separate(&tensor.dequantize(&Device::Cpu)?, config)?;
        weights.insert(hugging_face_name, tensor);
    }
    Ok(weights)
}

/// Whether a matrix makes queries or keys, whose rows have another order in GGUF.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Query,
    Key,
    Other,
}

impl Kind {
    fn heads(self, config: &Config) -> Option<usize> {
        match self {
            Self::Query => Some(config.num_attention_heads),
            Self::Key => Some(config.num_key_value_heads),
            Self::Other => None,
        }
    }

    /// Rows of a head from halves that lie apart to halves that alternate.
    fn interleave(self, tensor: &Tensor, config: &Config) -> candle_core::Result<Tensor> {
        self.reorder(tensor, config, |half| [2, half])
    }

    /// The reverse of [`Kind::interleave`].
    fn separate(self, tensor: &Tensor, config: &Config) -> candle_core::Result<Tensor> {
        self.reorder(tensor, config, |half| [half, 2])
    }

    fn reorder(
        self,
        tensor: &Tensor,
        config: &Config,
        head: impl Fn(usize) -> [usize; 2],
    ) -> candle_core::Result<Tensor> {
        let Some(heads) = self.heads(config) else {
            return Ok(tensor.clone());
        };
        let [rows, columns] = head(config.head_dim / 2);
        let inputs = tensor.dim(1)?;
        tensor
            .reshape((heads, rows, columns, inputs))?
            .transpose(1, 2)?
            .contiguous()?
            .reshape(tensor.shape())
    }
}

/// The names of the parts of a layer, in a Hugging Face checkpoint and in GGUF.
const LAYER_PARTS: [(&str, &str, Kind); 9] = [
    ("input_layernorm", "attn_norm", Kind::Other),
    ("self_attn.q_proj", "attn_q", Kind::Query),
    ("self_attn.k_proj", "attn_k", Kind::Key),
    ("self_attn.v_proj", "attn_v", Kind::Other),
    ("self_attn.o_proj", "attn_output", Kind::Other),
    ("post_attention_layernorm", "ffn_norm", Kind::Other),
    ("mlp.gate_proj", "ffn_gate", Kind::Other),
    ("mlp.up_proj", "ffn_up", Kind::Other),
    ("mlp.down_proj", "ffn_down", Kind::Other),
];

/// The names of the other tensors, likewise.
const OTHER_PARTS: [(&str, &str); 2] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
];

fn gguf_name(name: &str) -> anyhow::Result<(String, Kind)> {
    let other = || format!("{name} has no name in GGUF");
    let stem = name.strip_suffix(".weight").with_context(other)?;
    if let Some((_, gguf)) = OTHER_PARTS.iter().find(|(hf, _)| *hf == stem) {
        return Ok((format!("{gguf}.weight"), Kind::Other));
    }
    let (layer, part) = stem
        .strip_prefix("model.layers.")
        .and_then(|rest| rest.split_once('.'))
        .with_context(other)?;
    let known = LAYER_PARTS.iter().find(|(hf, _, _)| *hf == part);
    let (_, gguf, kind) = known.with_context(other)?;
    Ok((format!("blk.{layer}.{gguf}.weight"), *kind))
}

fn hugging_face_name(name: &str) -> anyhow::Result<(String, Kind)> {
    let other = || format!("{name} is not a tensor of this model");
    let stem = name.strip_suffix(".weight").with_context(other)?;
    if let Some((hf, _)) = OTHER_PARTS.iter().find(|(_, gguf)| *gguf == stem) {
        return Ok((format!("{hf}.weight"), Kind::Other));
    }
    let (layer, part) = stem
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'))
        .with_context(other)?;
    let known = LAYER_PARTS.iter().find(|(_, gguf, _)| *gguf == part);
    let (hf, _, kind) = known.with_context(other)?;
    Ok((format!("model.layers.{layer}.{hf}.weight"), *kind))
}

type Metadata = Vec<(&'static str, Value)>;

fn string(text: &str) -> Value {
    Value::String(text.to_owned())
}

fn shape_metadata(config: &Config) -> anyhow::Result<Metadata> {
    let number = |number: usize| Ok::<_, anyhow::Error>(Value::U32(u32::try_from(number)?));
    Ok(vec![
        ("general.architecture", string("llama")),
        ("general.type", string("model")),
        ("general.name", string("tiny-chat")),
        ("general.license", string("apache-2.0")),
        ("general.file_type", Value::U32(MOSTLY_Q8_0)),
        ("general.quantization_version", Value::U32(2)),
        ("llama.block_count", number(config.num_hidden_layers)?),
        (
            "llama.context_length",
            number(config.max_position_embeddings)?,
        ),
        ("llama.embedding_length", number(config.hidden_size)?),
        (
            "llama.feed_forward_length",
            number(config.intermediate_size)?,
        ),
        (
            "llama.attention.head_count",
            number(config.num_attention_heads)?,
        ),
        (
            "llama.attention.head_count_kv",
            number(config.num_key_value_heads)?,
        ),
        ("llama.attention.key_length", number(config.head_dim)?),
        ("llama.attention.value_length", number(config.head_dim)?),
        (
            "llama.attention.layer_norm_rms_epsilon",
            Value::F32(config.rms_norm_eps),
        ),
        ("llama.rope.dimension_count", number(config.head_dim)?),
        ("llama.rope.freq_base", Value::F32(config.rope_theta)),
        ("llama.vocab_size", number(config.vocab_size)?),
    ])
}

fn tokenizer_metadata(config: &Config, model: &Path) -> anyhow::Result<Metadata> {
    let file: TokenizerFile = read_json(&model.join("tokenizer.json"))?;
    let tokenizer_config: TokenizerConfig = read_json(&model.join("tokenizer_config.json"))?;
    let special: HashMap<&str, u32> = file
        .added_tokens
        .iter()
        .map(|token| (token.content.as_str(), token.id))
        .collect();
    let id_of = |token: &str| {
        let id = special.get(token).copied();
        id.with_context(|| format!("tokenizer.json has no special token {token}"))
    };
    let tokens = tokens_by_id(&file, config.vocab_size)?;
    let token_type = |token: &&str| {
        Value::I32(if special.contains_key(token) {
            CONTROL_TOKEN
        } else {
            NORMAL_TOKEN
        })
    };
    let merges = file.model.merges.iter();
    Ok(vec![
        ("tokenizer.ggml.model", string("gpt2")),
        ("tokenizer.ggml.pre", string("gpt-2")),
        (
            "tokenizer.ggml.token_type",
            Value::Array(tokens.iter().map(token_type).collect()),
        ),
        (
            "tokenizer.ggml.tokens",
            Value::Array(tokens.iter().map(|token| string(token)).collect()),
        ),
        (
            "tokenizer.ggml.merges",
            Value::Array(
                merges
                    .map(|(a, b)| Value::String(format!("{a} {b}")))
                    .collect(),
            ),
        ),
        (
            "tokenizer.ggml.eos_token_id",
            Value::U32(id_of(&tokenizer_config.eos_token)?),
        ),
        (
            "tokenizer.ggml.padding_token_id",
            Value::U32(id_of(&tokenizer_config.pad_token)?),
        ),
        ("tokenizer.ggml.add_bos_token", Value::Bool(false)),
        ("tokenizer.ggml.add_eos_token", Value::Bool(false)),
        (
            "tokenizer.chat_template",
            Value::String(tokenizer_config.chat_template),
        ),
    ])
}

/// The tokens in the order of their ids, which have no gap.
fn tokens_by_id(file: &TokenizerFile, vocab_size: usize) -> anyhow::Result<Vec<&str>> {
    let mut tokens: Vec<(u32, &str)> = file
        .model
        .vocab
        .iter()
        .map(|(token, &id)| (id, token.as_str()))
        .chain(
            file.added_tokens
                .iter()
                .map(|it| (it.id, it.content.as_str())),
        )
        .collect();
    tokens.sort_unstable();
    tokens.dedup();
    let without_gap = tokens.iter().zip(0u32..).all(|(&(id, _), at)| id == at);
    ensure!(
        without_gap && tokens.len() == vocab_size,
        "tokenizer.json has {} tokens, config.json says {vocab_size}",
        tokens.len()
    );
    Ok(tokens.into_iter().map(|(_, token)| token).collect())
}

#[cfg(test)]
mod tests;
