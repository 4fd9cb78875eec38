//! Writes a model as a GGUF file, without its tokenizer: the inverse of `gguf`, so that tests have files of every supported
//! architecture. The bytes are those of candle's writer.
//!
//! # Source
//! `docs/gguf.md` of ggml. What llama.cpp's converter changes (rows of queries and keys in pairs, Gemma's norms plus one) is
//! changed here too.

use std::io::Cursor;

use candle_core::Tensor;
use candle_core::quantized::gguf_file;
pub(super) use candle_core::quantized::gguf_file::Value as Entry;
pub(super) use candle_core::quantized::{GgmlDType, QTensor};

use super::*;
use crate::load::config::rope::yarn_amplitude;
use crate::load::gguf::config::{self, usual_full_every};
use crate::load::gguf::place;
use crate::load::quantize::{Part, floats};
use crate::load::tensors::RowOrder;
use crate::model::config::{NormKind, Rope, RopeScaling};

/// Writes `model`, whose weights must be floats, to `path`, with matrices of this type.
pub(super) fn write_gguf(model: &OpenModel, path: &Path, matrices: GgmlDType) {
    fs::write(path, encode(&entries(model), &tensors(model, matrices))).unwrap();
}

/// A file of these entries and tensors.
pub(super) fn encode(entries: &[(String, Entry)], tensors: &[(String, QTensor)]) -> Vec<u8> {
    let entries = entries.iter().map(|(key, entry)| (key.as_str(), entry));
    let tensors = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    let (entries, tensors): (Vec<_>, Vec<_>) = (entries.collect(), tensors.collect());
    let mut bytes = Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &entries, &tensors).unwrap();
    bytes.into_inner()
}

pub(super) fn text(text: &str) -> Entry {
    Entry::String(text.to_owned())
}

pub(super) fn texts(texts: &[&str]) -> Entry {
    Entry::Array(texts.iter().copied().map(text).collect())
}

pub(super) fn i32s(numbers: &[i32]) -> Entry {
    Entry::Array(numbers.iter().copied().map(Entry::I32).collect())
}

pub(super) fn f32s(numbers: &[f32]) -> Entry {
    Entry::Array(numbers.iter().copied().map(Entry::F32).collect())
}

/// A tensor of the file.
struct Output {
    name: String,
    dtype: GgmlDType,
    shape: Vec<usize>,
    numbers: Vec<f32>,
}

/// The tensors of a model's file, by name.
pub(super) fn tensors(model: &OpenModel, matrices: GgmlDType) -> Vec<(String, QTensor)> {
    let config = &model.config;
    let mut all: Vec<Output> = Vec::new();
    if let Some(numbers) = frequency_factors(config) {
        all.push(Output {
            name: frequencies_tensor(&model.architecture).to_owned(),
            dtype: GgmlDType::F32,
            shape: vec![numbers.len()],
            numbers,
        });
    }
    for planned in plan(config) {
        let place = place(&model.architecture, &planned.name, config)
            .unwrap_or_else(|| Place::whole(planned.name.clone()));
        let raw = model.required(&planned.name, &planned.shape).unwrap();
        let dtype = match planned.matrix {
            None | Some(Part::Router) => GgmlDType::F32,
            Some(Part::Layer | Part::Vocabulary) => matrices,
        };
        let mut numbers = reordered(&raw, place.rows);
        if planned.name.contains("norm") {
            let offset = config.norm_weight_offset;
            numbers.iter_mut().for_each(|number| *number += offset);
        }
        // The file may have the next part of the same tensor.
        let known = all.iter_mut().rev().find(|known| known.name == place.name);
        match known {
            Some(known) => known.numbers.extend(numbers),
            None => all.push(Output {
                name: place.name,
                dtype,
                shape: place.part.map_or(planned.shape, |part| part.whole),
                numbers,
            }),
        }
    }
    let made = all.into_iter().map(|output| {
        let tensor = Tensor::from_vec(output.numbers, output.shape, &Device::Cpu).unwrap();
        let quantized = QTensor::quantize(&tensor, output.dtype).unwrap();
        (output.name, quantized)
    });
    made.collect()
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

/// The metadata about the scaling of frequencies.
fn rotary(rope: &Rope) -> Vec<(&'static str, Entry)> {
    let size = |value: usize| Entry::U32(u32::try_from(value).unwrap_or(u32::MAX));
    let mut own = Vec::new();
    let mut usual = 1.0;
    match rope.scaling {
        RopeScaling::Linear { factor } => {
            own.push(("rope.scaling.type", text("linear")));
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
            own.push(("rope.scaling.type", text("yarn")));
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
pub(super) fn entries(model: &OpenModel) -> Vec<(String, Entry)> {
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
            match config.norm_kind {
                NormKind::RootMeanSquare => "attention.layer_norm_rms_epsilon",
                NormKind::Layer { .. } => "attention.layer_norm_epsilon",
            },
            Entry::F32(crate::load::config::single(config.norm_eps)),
        ),
        ("vocab_size", size(config.vocab_size)),
    ];
    own.extend(rotary(&config.rope));
    if let Some(experts) = config.experts {
        own.push(("expert_count", size(experts.count)));
        own.push(("expert_used_count", size(experts.per_token)));
        if let Some(shared) = experts.shared_size {
            own.push(("expert_shared_feed_forward_length", size(shared)));
        }
        own.push(("expert_feed_forward_length", size(config.intermediate_size)));
    }
    if let Some(theta) = config.rope.window_theta {
        own.push(("rope.freq_base_swa", Entry::F32(theta)));
    }
    if architecture == "cohere2" {
        own.push(("logit_scale", Entry::F32(config.logit_scale)));
    }
    if architecture.starts_with("granite") {
        let divisor = Entry::F32(config.logit_scale.recip());
        own.push(("logit_scale", divisor));
        own.push(("residual_scale", Entry::F32(config.residual_scale)));
        own.push(("embedding_scale", Entry::F32(config.embedding_scale)));
    }
    if let Some(growth) = config.query_growth {
        own.push(("attention.temperature_scale", Entry::F32(growth.slope)));
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
        if matches!(architecture, "olmo2" | "exaone4") {
            let is_windowed = |layer: usize| {
                let full_every = window.full_every;
                full_every.is_none_or(|every| !(layer + 1).is_multiple_of(every))
            };
            let layers = (0..config.num_layers).map(|layer| Entry::Bool(is_windowed(layer)));
            let list = Entry::Array(layers.collect());
            own.push(("attention.sliding_window_pattern", list));
        } else if window.full_every != usual_full_every(architecture) {
            let period = size(window.full_every.unwrap_or(0));
            own.push(("attention.sliding_window_pattern", period));
        }
    }
    let general = [
        ("general.architecture", text(architecture)),
        ("general.name", text(&model.name)),
        ("general.quantization_version", Entry::U32(2)),
        ("tokenizer.ggml.model", text("no_vocab")),
    ];
    let general = general.map(|(key, entry)| (key.to_owned(), entry));
    let own = own
        .into_iter()
        .map(|(key, entry)| (format!("{architecture}.{key}"), entry));
    general.into_iter().chain(own).collect()
}
