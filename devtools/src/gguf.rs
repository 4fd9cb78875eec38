//! Writes a Llama's or Qwen3's weights as a GGUF file for llama.cpp and compatible programs, including the tokenizer.
//!
//! Norms are f32. The file depends only on `model.safetensors` and the tokenizer's files.
//!
//! # Source
//! The names of tensors and metadata are from the GGUF specification. llama.cpp's converter interleaves the two halves of
//! each query and key head for Llama, because its rotation pairs adjacent values; so does this file. Qwen3's halves stay
//! separate.

use std::collections::HashMap;
use std::io::{Cursor, Read, Seek};
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context as _, ensure};
use candle_core::quantized::gguf_file::{self, Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;

use crate::checkout::{Config, EMBEDDING, Family, NamedTensors, OUTPUT, read_json};

/// `tokenizer.ggml.token_type` of a text token, of a control token, and of an id without a token.
const NORMAL_TOKEN: i32 = 1;
const CONTROL_TOKEN: i32 = 3;
const UNUSED_TOKEN: i32 = 5;

/// The type of a file's matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GgufType {
    name: &'static str,
    dtype: GgmlDType,
    /// llama.cpp's number of a file's type, only for display.
    file_type: u32,
}

impl GgufType {
    /// 8.5 bits per weight.
    pub const Q8_0: Self = Self::new("q8_0", GgmlDType::Q8_0, 7);

    /// Every type.
    pub const ALL: [Self; 8] = [
        Self::new("f32", GgmlDType::F32, 0),
        Self::new("f16", GgmlDType::F16, 1),
        Self::new("bf16", GgmlDType::BF16, 32),
        Self::Q8_0,
        Self::new("q6_k", GgmlDType::Q6K, 18),
        Self::new("q5_k", GgmlDType::Q5K, 17),
        Self::new("q4_k", GgmlDType::Q4K, 15),
        Self::new("q4_0", GgmlDType::Q4_0, 2),
    ];

    const fn new(name: &'static str, dtype: GgmlDType, file_type: u32) -> Self {
        Self {
            name,
            dtype,
            file_type,
        }
    }

    /// The type of a tensor, as in the candle engine's own conversion. Embedding and output matrix, whose errors matter most,
    /// get at least six bits with `q5_k` and `q4_k`. Rows that its blocks do not divide get smaller blocks, or f32.
    fn dtype_of(self, name: &str, tensor: &Tensor) -> GgmlDType {
        let [_, row_len] = *tensor.dims() else {
            return GgmlDType::F32;
        };
        let is_vocabulary = name == EMBEDDING || name == OUTPUT;
        let wanted = if is_vocabulary && matches!(self.dtype, GgmlDType::Q5K | GgmlDType::Q4K) {
            GgmlDType::Q6K
        } else {
            self.dtype
        };
        let mut fitting = [wanted, GgmlDType::Q8_0].into_iter();
        let fitting = fitting.find(|dtype| row_len.is_multiple_of(dtype.block_size()));
        fitting.unwrap_or(GgmlDType::F32)
    }
}

impl FromStr for GgufType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kind| kind.name == text);
        found.ok_or_else(|| {
            let names = Self::ALL.map(|kind| kind.name).join(", ");
            format!("{text:?} is none of {names}")
        })
    }
}

/// The used fields of `tokenizer.json`.
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

/// The used fields of `tokenizer_config.json`.
#[derive(Debug, Deserialize)]
struct TokenizerConfig {
    chat_template: String,
    eos_token: String,
    pad_token: String,
}

/// The content of the file. `model` is the folder with the tokenizer's files; its name becomes the model's.
///
/// # Errors
/// If the tokenizer's files cannot be read, or a tensor has the wrong shape.
pub fn to_bytes(
    config: &Config,
    weights: &NamedTensors,
    model: &Path,
    kind: GgufType,
) -> anyhow::Result<Vec<u8>> {
    let name = model.canonicalize()?;
    let name = name.file_name().unwrap_or_default().to_string_lossy();
    let mut metadata = shape_metadata(config, &name, kind)?;
    metadata.extend(tokenizer_metadata(config, model)?);
    let mut tensors = Vec::new();
    for (name, tensor) in weights {
        let dtype = kind.dtype_of(name, tensor);
        let (name, rows) = gguf_name(name)?;
        let tensor = rows.interleave(&tensor.to_dtype(DType::F32)?, config)?;
        tensors.push((name, QTensor::quantize(&tensor, dtype)?));
    }
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    let metadata: Vec<_> = metadata
        .iter()
        .map(|(name, value)| (name.as_str(), value))
        .collect();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| (name.as_str(), tensor))
        .collect();
    let mut bytes = Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &metadata, &tensors)?;
    Ok(bytes.into_inner())
}

/// Reads the weights of such a file, by their names in a Hugging Face checkpoint.
///
/// # Errors
/// If the file is damaged, or has tensors that this model does not have.
pub fn read(config: &Config, mut file: impl Read + Seek) -> anyhow::Result<NamedTensors> {
    let content = Content::read(&mut file)?;
    let mut weights = NamedTensors::new();
    for name in content.tensor_infos.keys() {
        let tensor = content.tensor(&mut file, name, &Device::Cpu)?;
        let (hugging_face_name, kind) = hugging_face_name(name)?;
        let tensor = kind.separate(&tensor.dequantize(&Device::Cpu)?, config)?;
        weights.insert(hugging_face_name, tensor);
    }
    Ok(weights)
}

/// Whether a matrix produces queries or keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Query,
    Key,
    Other,
}

impl Kind {
    /// The number of heads, if their rows have another order in GGUF.
    fn heads(self, config: &Config) -> Option<usize> {
        match (config.model_type, self) {
            (Family::Llama, Self::Query) => Some(config.num_attention_heads),
            (Family::Llama, Self::Key) => Some(config.num_key_value_heads),
            (Family::Llama, Self::Other) | (Family::Qwen3, _) => None,
        }
    }

    /// Converts the rows of each head from separate halves to interleaved ones.
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

/// The names of a layer's parts, in a Hugging Face checkpoint and in GGUF.
const LAYER_PARTS: [(&str, &str, Kind); 11] = [
    ("input_layernorm", "attn_norm", Kind::Other),
    ("self_attn.q_proj", "attn_q", Kind::Query),
    ("self_attn.k_proj", "attn_k", Kind::Key),
    ("self_attn.v_proj", "attn_v", Kind::Other),
    ("self_attn.o_proj", "attn_output", Kind::Other),
    ("self_attn.q_norm", "attn_q_norm", Kind::Other),
    ("self_attn.k_norm", "attn_k_norm", Kind::Other),
    ("post_attention_layernorm", "ffn_norm", Kind::Other),
    ("mlp.gate_proj", "ffn_gate", Kind::Other),
    ("mlp.up_proj", "ffn_up", Kind::Other),
    ("mlp.down_proj", "ffn_down", Kind::Other),
];

/// The names of the other tensors, likewise.
const OTHER_PARTS: [(&str, &str); 3] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
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

type Metadata = Vec<(String, Value)>;

fn string(text: &str) -> Value {
    Value::String(text.to_owned())
}

fn shape_metadata(config: &Config, name: &str, kind: GgufType) -> anyhow::Result<Metadata> {
    let architecture = match config.model_type {
        Family::Llama => "llama",
        Family::Qwen3 => "qwen3",
    };
    let general = [
        ("architecture", string(architecture)),
        ("type", string("model")),
        ("name", string(name)),
        ("license", string("apache-2.0")),
        ("file_type", Value::U32(kind.file_type)),
        ("quantization_version", Value::U32(2)),
    ];
    let number = |number: usize| Ok::<_, anyhow::Error>(Value::U32(u32::try_from(number)?));
    let shape = [
        ("block_count", number(config.num_hidden_layers)?),
        ("context_length", number(config.max_position_embeddings)?),
        ("embedding_length", number(config.hidden_size)?),
        ("feed_forward_length", number(config.intermediate_size)?),
        ("attention.head_count", number(config.num_attention_heads)?),
        (
            "attention.head_count_kv",
            number(config.num_key_value_heads)?,
        ),
        ("attention.key_length", number(config.head_dim)?),
        ("attention.value_length", number(config.head_dim)?),
        (
            "attention.layer_norm_rms_epsilon",
            Value::F32(config.rms_norm_eps),
        ),
        ("rope.dimension_count", number(config.head_dim)?),
        ("rope.freq_base", Value::F32(config.rope_theta)),
        ("vocab_size", number(config.vocab_size)?),
    ];
    let general = general.map(|(key, value)| (format!("general.{key}"), value));
    let shape = shape.map(|(key, value)| (format!("{architecture}.{key}"), value));
    Ok(general.into_iter().chain(shape).collect())
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
    let token_type = |token: &String| {
        Value::I32(if special.contains_key(token.as_str()) {
            CONTROL_TOKEN
        } else if file.model.vocab.contains_key(token) {
            NORMAL_TOKEN
        } else {
            UNUSED_TOKEN
        })
    };
    let merges = file.model.merges.iter();
    let metadata = [
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
    ];
    Ok(metadata.map(|(key, value)| (key.to_owned(), value)).into())
}

/// The tokens in the order of their ids, which must be contiguous, and a placeholder for each further id of the model.
fn tokens_by_id(file: &TokenizerFile, vocab_size: usize) -> anyhow::Result<Vec<String>> {
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
        without_gap && tokens.len() <= vocab_size,
        "tokenizer.json has {} tokens, config.json says {vocab_size}",
        tokens.len()
    );
    let unused = (tokens.len()..vocab_size).map(|id| format!("[PAD{id}]"));
    let tokens = tokens.iter().map(|(_, token)| (*token).to_owned());
    Ok(tokens.chain(unused).collect())
}

#[cfg(test)]
mod tests;
