//! Writes a model as a GGUF file, without its tokenizer: the inverse of `gguf`, so that tests have files of every supported
//! architecture.
//!
//! # Source
//! `docs/gguf.md` of ggml, version 3. What llama.cpp's converter changes (rows of queries and keys in pairs, Gemma's norms
//! plus one) is changed here too.

use std::path::Path;

use candle_core::quantized::GgmlDType;

use crate::error::LoadError;
use crate::load::config::rope::yarn_amplitude;
use crate::load::gguf::config::{self, usual_full_every, usual_still_every};
use crate::load::gguf::header::MAGIC;
use crate::load::gguf::place;
use crate::load::place::Place;
use crate::load::plan::Role;
use crate::load::quantize::{Part, floats};
use crate::load::tensors::{RawTensor, RowOrder, bytes_of};
use crate::load::weights::to_u64;
use crate::load::{OpenModel, PlannedTensor, TensorFiles, plan};
use crate::model::config::{ModelConfig, Rope, RopeScaling};

const VERSION: u32 = 3;
const ALIGNMENT: usize = 32;

/// The type of the matrices in a written file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatType {
    F32,
    F16,
    Bf16,
}

impl FloatType {
    fn dtype(self) -> GgmlDType {
        match self {
            Self::F32 => GgmlDType::F32,
            Self::F16 => GgmlDType::F16,
            Self::Bf16 => GgmlDType::BF16,
        }
    }
}

/// Writes `model`, whose weights must be floats, to `path`.
///
/// # Errors
/// The model has something that GGUF files cannot express.
pub(crate) fn write_gguf(model: &OpenModel, path: &Path, kind: FloatType) -> Result<(), LoadError> {
    let tensors = Output::all(model, kind)?;
    let mut bytes = header(model, &tensors);
    for tensor in &tensors {
        tensor.write(model, &mut bytes)?;
        bytes.resize(padded(bytes.len()), 0);
    }
    std::fs::write(path, bytes).map_err(|error| LoadError::read(path, error))
}

/// A tensor of the file.
struct Output {
    /// The name in the file.
    name: String,
    dtype: GgmlDType,
    shape: Vec<usize>,
    bytes: usize,
    content: Content,
}

enum Content {
    /// Tensors of the model, with `offset` added to each number.
    Planned {
        /// More than one if the file concatenates them in one tensor; each has its own order of rows.
        parts: Vec<(PlannedTensor, RowOrder)>,
        offset: f32,
    },
    Made(Vec<f32>),
}

impl Output {
    fn all(model: &OpenModel, kind: FloatType) -> Result<Vec<Self>, LoadError> {
        refuse_variants(model)?;
        let mut all: Vec<Self> = Vec::new();
        if let Some(factors) = frequency_factors(&model.config) {
            all.push(Self {
                name: frequencies_tensor(&model.architecture).to_owned(),
                dtype: GgmlDType::F32,
                shape: vec![factors.len()],
                bytes: factors.len() * 4,
                content: Content::Made(factors),
            });
        }
        for planned in plan(&model.config) {
            let output = Self::planned(model, kind, planned)?;
            let known = all.iter_mut().rev().find(|known| known.name == output.name);
            match known {
                Some(known) => known.add(output),
                None => all.push(output),
            }
        }
        Ok(all)
    }

    fn planned(
        model: &OpenModel,
        kind: FloatType,
        planned: PlannedTensor,
    ) -> Result<Self, LoadError> {
        let config = &model.config;
        let raw = model.required(&planned.name, &planned.shape)?;
        if !raw.dtype.is_float() {
            return Err(LoadError::UnsupportedDtype {
                path: model.path.clone(),
                name: raw.name.to_owned(),
                found: raw.dtype.to_string(),
                supported: "F32, F16 or BF16, to be written in another type",
            });
        }
        let dtype = match planned.role {
            Role::Matrix(Part::Router) | Role::Norm | Role::Bias => GgmlDType::F32,
            Role::Matrix(_) => kind.dtype(),
        };
        let place = place(&model.architecture, &planned.name, config)
            .unwrap_or_else(|| Place::whole(planned.name.clone()));
        let shape = place.part.map(|part| part.whole);
        Ok(Self {
            name: place.name,
            dtype,
            bytes: bytes_of(dtype.into(), raw.elements()).unwrap_or(0),
            shape: shape.unwrap_or_else(|| planned.shape.clone()),
            content: Content::Planned {
                offset: match planned.role {
                    Role::Norm => config.norm_weight_offset,
                    Role::Matrix(_) | Role::Bias => 0.0,
                },
                parts: vec![(planned, place.rows)],
            },
        })
    }

    /// Appends the next part of the same tensor.
    fn add(&mut self, next: Self) {
        if let (Content::Planned { parts, .. }, Content::Planned { parts: more, .. }) =
            (&mut self.content, next.content)
        {
            parts.extend(more);
            self.bytes += next.bytes;
        }
    }

    fn write(&self, model: &OpenModel, out: &mut Vec<u8>) -> Result<(), LoadError> {
        match &self.content {
            Content::Made(values) => write_floats(out, values.iter().copied(), self.dtype),
            Content::Planned { parts, offset } => {
                for (part, rows) in parts {
                    let raw = model.required(&part.name, &part.shape)?;
                    let values = reordered(&raw, *rows);
                    write_floats(out, values.iter().map(|value| value + offset), self.dtype);
                }
            }
        }
        Ok(())
    }
}

/// Rejects what files cannot express.
fn refuse_variants(model: &OpenModel) -> Result<(), LoadError> {
    let config = &model.config;
    if config.has_sinks {
        let fix = "GGUF files of gpt-oss are not written";
        let field = "model_type";
        return Err(LoadError::unsupported(&model.path, field, "gpt_oss", fix));
    }
    if config.experts.is_some_and(|experts| !experts.is_normalized) {
        let fix = "readers of GGUF files take true for granted";
        let field = "norm_topk_prob";
        return Err(LoadError::unsupported(&model.path, field, false, fix));
    }
    if let RopeScaling::Yarn {
        is_rounded: false, ..
    } = config.rope.scaling
    {
        let fix = "readers of GGUF files take true for granted";
        let field = "rope_scaling.truncate";
        return Err(LoadError::unsupported(&model.path, field, false, fix));
    }
    let usual = usual_still_every(&model.architecture);
    if config.rope.still_every != usual {
        let fix = "readers of GGUF files take every fourth layer for granted";
        let found = format!("{:?}", config.rope.still_every);
        let field = "no_rope_layers";
        return Err(LoadError::unsupported(&model.path, field, found, fix));
    }
    Ok(())
}

/// A tensor's numbers with rows in the file's order.
fn reordered(raw: &RawTensor<'_>, order: RowOrder) -> Vec<f32> {
    let values = floats(raw);
    if order == RowOrder::Halves {
        return values;
    }
    let row_len = raw.row_len().max(1);
    let mut stored = vec![0.0; values.len()];
    for (row, values) in values.chunks_exact(row_len).enumerate() {
        let start = order.source(row) * row_len;
        stored[start..start + row_len].copy_from_slice(values);
    }
    stored
}

fn write_floats(out: &mut Vec<u8>, values: impl Iterator<Item = f32>, dtype: GgmlDType) {
    for value in values {
        if dtype == GgmlDType::F16 {
            out.extend(half::f16::from_f32(value).to_le_bytes());
        } else if dtype == GgmlDType::BF16 {
            out.extend(half::bf16::from_f32(value).to_le_bytes());
        } else {
            out.extend(value.to_le_bytes());
        }
    }
}

fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// The tensor in which readers look for frequency factors; the model has those of only one context.
fn frequencies_tensor(architecture: &str) -> &'static str {
    match architecture {
        "phi3" => config::SHORT_FREQUENCIES,
        _ => config::FREQUENCIES,
    }
}

/// The divisor of each pair's frequency, if no key can express it.
fn frequency_factors(config: &ModelConfig) -> Option<Vec<f32>> {
    match &config.rope.scaling {
        RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Yarn { .. } => None,
        RopeScaling::Factors(factors) => Some(factors.clone()),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context_length,
        } => {
            let context = single(*original_context_length);
            let of_pair = |pair: usize| {
                let exponent = single(2 * pair) / single(config.rope.rotary_dim);
                let wavelength = std::f32::consts::TAU * config.rope.theta.powf(exponent);
                if wavelength < context / high_freq_factor {
                    1.0
                } else if wavelength > context / low_freq_factor {
                    *factor
                } else {
                    let smooth = (context / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    1.0 / ((1.0 - smooth) / factor + smooth)
                }
            };
            Some((0..config.rope.rotary_dim / 2).map(of_pair).collect())
        }
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "sizes of a model, of which the leading digits matter"
)]
fn single(size: usize) -> f32 {
    size as f32
}

/// A metadata value, with the width that readers expect.
pub(crate) enum Entry {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

impl Entry {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::U32(value) => number(out, 4, value.to_le_bytes()),
            Self::F32(value) => number(out, 6, value.to_le_bytes()),
            Self::Bool(value) => number(out, 7, [u8::from(*value)]),
            Self::Text(value) => {
                number(out, 8, []);
                text(out, value);
            }
            Self::Texts(values) => {
                array(out, 8, values.len());
                values.iter().for_each(|value| text(out, value));
            }
            Self::I32s(values) => {
                array(out, 5, values.len());
                values
                    .iter()
                    .for_each(|value| out.extend(value.to_le_bytes()));
            }
            Self::F32s(values) => {
                array(out, 6, values.len());
                values
                    .iter()
                    .for_each(|value| out.extend(value.to_le_bytes()));
            }
        }
    }
}

fn number<const N: usize>(out: &mut Vec<u8>, kind: u32, bytes: [u8; N]) {
    out.extend(kind.to_le_bytes());
    out.extend(bytes);
}

fn array(out: &mut Vec<u8>, kind: u32, length: usize) {
    out.extend(9u32.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend(to_u64(length).to_le_bytes());
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend(to_u64(text.len()).to_le_bytes());
    out.extend(text.as_bytes());
}

fn header(model: &OpenModel, tensors: &[Output]) -> Vec<u8> {
    let mut entries = entries(model);
    entries.push((
        "tokenizer.ggml.model".into(),
        Entry::Text("no_vocab".into()),
    ));
    let tensors: Vec<Info<'_>> = tensors
        .iter()
        .map(|tensor| Info {
            name: &tensor.name,
            dtype: number_of(tensor.dtype),
            shape: &tensor.shape,
            bytes: tensor.bytes,
        })
        .collect();
    encode(&entries, &tensors)
}

/// ggml's number of a type.
fn number_of(dtype: GgmlDType) -> u32 {
    if dtype == GgmlDType::F16 {
        1
    } else if dtype == GgmlDType::BF16 {
        30
    } else {
        0
    }
}

/// The entry of a tensor in the header.
pub(crate) struct Info<'a> {
    pub(crate) name: &'a str,
    /// ggml's number of its type.
    pub(crate) dtype: u32,
    pub(crate) shape: &'a [usize],
    pub(crate) bytes: usize,
}

/// A header, padded so that tensors can follow; each tensor is padded too.
pub(crate) fn encode(entries: &[(String, Entry)], tensors: &[Info<'_>]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend(to_u64(tensors.len()).to_le_bytes());
    out.extend(to_u64(entries.len()).to_le_bytes());
    for (key, entry) in entries {
        text(&mut out, key);
        entry.write(&mut out);
    }
    let mut offset = 0;
    for tensor in tensors {
        text(&mut out, tensor.name);
        let dims = u32::try_from(tensor.shape.len()).unwrap_or(0);
        out.extend(dims.to_le_bytes());
        for dim in tensor.shape.iter().rev() {
            out.extend(to_u64(*dim).to_le_bytes());
        }
        out.extend(tensor.dtype.to_le_bytes());
        out.extend(to_u64(offset).to_le_bytes());
        offset += padded(tensor.bytes);
    }
    out.resize(padded(out.len()), 0);
    out
}

/// The metadata about the scaling of frequencies.
fn rotary(rope: &Rope) -> Vec<(&'static str, Entry)> {
    let size = |value: usize| Entry::U32(u32::try_from(value).unwrap_or(u32::MAX));
    let mut own = Vec::new();
    let mut usual = 1.0;
    match rope.scaling {
        RopeScaling::Linear { factor } => {
            own.push(("rope.scaling.type", Entry::Text("linear".into())));
            own.push(("rope.scaling.factor", Entry::F32(factor)));
        }
        RopeScaling::Yarn {
            factor,
            fast_turns,
            slow_turns,
            original_context_length,
            ..
        } => {
            usual = yarn_amplitude(factor, 1.0);
            if rope.amplitude == 1.0 {
                own.push(("rope.scaling.yarn_log_multiplier", Entry::F32(1.0)));
                usual = 1.0;
            }
            let original = size(original_context_length);
            own.push(("rope.scaling.type", Entry::Text("yarn".into())));
            own.push(("rope.scaling.factor", Entry::F32(factor)));
            own.push(("rope.scaling.original_context_length", original));
            own.push(("rope.scaling.yarn_beta_fast", Entry::F32(fast_turns)));
            own.push(("rope.scaling.yarn_beta_slow", Entry::F32(slow_turns)));
        }
        RopeScaling::None | RopeScaling::Llama3 { .. } | RopeScaling::Factors(_) => {}
    }
    if rope.amplitude != usual {
        let factor = Entry::F32(rope.amplitude / usual);
        own.push(("rope.scaling.attn_factor", factor));
    }
    own
}

/// The model's metadata, without its vocabulary.
pub(crate) fn entries(model: &OpenModel) -> Vec<(String, Entry)> {
    let config = &model.config;
    let architecture = model.architecture.as_str();
    let size = |value: usize| Entry::U32(u32::try_from(value).unwrap_or(u32::MAX));
    let mut own = vec![
        ("context_length", size(config.context_length)),
        ("embedding_length", size(config.hidden_size)),
        ("block_count", size(config.num_layers)),
        ("feed_forward_length", size(config.intermediate_size)),
        ("attention.head_count", size(config.num_heads)),
        ("attention.head_count_kv", size(config.num_kv_heads)),
        ("attention.key_length", size(config.head_dim)),
        ("attention.value_length", size(config.head_dim)),
        ("rope.dimension_count", size(config.rope.rotary_dim)),
        ("rope.freq_base", Entry::F32(config.rope.theta)),
        (
            "attention.layer_norm_rms_epsilon",
            Entry::F32(crate::load::config::single(config.rms_norm_eps)),
        ),
        ("vocab_size", size(config.vocab_size)),
    ];
    own.extend(rotary(&config.rope));
    if let Some(experts) = config.experts {
        own.push(("expert_count", size(experts.count)));
        own.push(("expert_used_count", size(experts.per_token)));
        own.push(("expert_feed_forward_length", size(config.intermediate_size)));
    }
    if let Some(theta) = config.rope.window_theta {
        own.push(("rope.freq_base_swa", Entry::F32(theta)));
    }
    if let Some(cap) = config.attention_softcap {
        own.push(("attn_logit_softcapping", Entry::F32(cap)));
    }
    if let Some(cap) = config.logit_softcap {
        own.push(("final_logit_softcapping", Entry::F32(cap)));
    }
    let usual = crate::load::config::attention_scale(config.head_dim);
    if (config.attention_scale - usual).abs() > usual * 1e-5 {
        own.push(("attention.scale", Entry::F32(config.attention_scale)));
    }
    if let Some(window) = config.window {
        own.push(("attention.sliding_window", size(window.size_tokens)));
        if window.full_every != usual_full_every(architecture) {
            let period = size(window.full_every.unwrap_or(0));
            own.push(("attention.sliding_window_pattern", period));
        }
    }
    let general = [
        ("general.architecture", Entry::Text(architecture.into())),
        ("general.name", Entry::Text(model.name.clone())),
        ("general.quantization_version", Entry::U32(2)),
    ];
    let general = general.map(|(key, entry)| (key.to_owned(), entry));
    let own = own
        .into_iter()
        .map(|(key, entry)| (format!("{architecture}.{key}"), entry));
    general.into_iter().chain(own).collect()
}
