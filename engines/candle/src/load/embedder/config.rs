//! Reads an embedder's configuration from the `config.json` of its checkout, as `transformers` 4 and 5 write it.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::Purpose;
use super::modules::hidden_activation;
use crate::error::LoadError;
use crate::load::checkout::Naming;
use crate::load::config::{self as decoder, single};
use crate::model::{BackboneConfig, EncoderConfig, EncoderFamily, Nonlinearity, Positions};

/// The supported encoder architectures, without their heads.
const ENCODERS: [(&str, Kind); 5] = [
    ("Bert", Kind::Bert),
    ("Roberta", Kind::Roberta),
    ("XLMRoberta", Kind::Roberta),
    ("Camembert", Kind::Roberta),
    ("ModernBert", Kind::ModernBert),
];

/// The supported heads of an encoder and their purposes. Other heads are rejected, not silently ignored.
const ON_IT: [(&str, Purpose); 3] = [
    ("Model", Purpose::Embed),
    ("ForMaskedLM", Purpose::Embed),
    ("ForSequenceClassification", Purpose::Score),
];

/// The architectures that errors list.
const KNOWN: [&str; 6] = [
    "BertModel",
    "RobertaModel",
    "XLMRobertaModel",
    "CamembertModel",
    "ModernBertModel",
    "Qwen3Model",
];

/// The family of an encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Bert,
    Roberta,
    ModernBert,
}

/// The content of a `config.json`.
pub(super) struct Described {
    pub(super) backbone: BackboneConfig,
    /// The naming of a decoder's tensors in the files.
    pub(super) naming: Naming,
    /// The number of positions that the backbone supports.
    pub(super) max_tokens: usize,
    /// The encoder's kind; `None` for a decoder.
    pub(super) kind: Option<Kind>,
    pub(super) purpose: Purpose,
}

fn architecture(config: &Value) -> &str {
    let named = config.pointer("/architectures/0").and_then(Value::as_str);
    named.unwrap_or_default()
}

/// The encoder of an architecture, and its head.
fn encoder_of(architecture: &str) -> Option<(Kind, Purpose)> {
    ENCODERS.iter().find_map(|(name, kind)| {
        let rest = architecture.strip_prefix(name)?;
        let (_, purpose) = ON_IT.iter().find(|(on_it, _)| *on_it == rest)?;
        Some((*kind, *purpose))
    })
}

/// Whether a `config.json` describes an encoder.
pub(super) fn is_encoder(config: &Value) -> bool {
    encoder_of(architecture(config)).is_some()
}

/// Reads a `config.json`; errors name `path`.
///
/// # Errors
/// A key is missing, out of its range, or requests something that is not supported.
pub(super) fn read(path: &Path, text: &[u8]) -> Result<Described, LoadError> {
    let value: Value =
        serde_json::from_slice(text).map_err(|error| LoadError::broken(path, error))?;
    let named = architecture(&value).to_owned();
    let Some((kind, purpose)) = encoder_of(&named) else {
        return of_decoder(path, value, &named);
    };
    decoder::check_required(path, &value)?;
    // From the text, so that a type error has a line number.
    let raw: Raw = serde_json::from_slice(text)
        .map_err(|error| LoadError::bad_config(path, "a key", error))?;
    let source = Source { path, kind, raw };
    let encoder = source.encoder()?;
    check(path, &encoder)?;
    let positions = encoder.positions_len();
    Ok(Described {
        max_tokens: positions.unwrap_or(source.raw.max_position_embeddings),
        naming: Naming::Usual,
        backbone: BackboneConfig::Encoder(encoder),
        kind: Some(kind),
        purpose,
    })
}

/// A decoder as an embedder: its output matrix is ignored, and its architecture may have the name of a model without one.
fn of_decoder(path: &Path, mut value: Value, named: &str) -> Result<Described, LoadError> {
    if value.get("is_causal") == Some(&Value::Bool(false)) {
        return Err(LoadError::unsupported(
            path,
            "is_causal",
            false,
            "it must be true",
        ));
    }
    if let Some(base) = named.strip_suffix("Model") {
        value["architectures"] = Value::from(vec![format!("{base}ForCausalLM")]);
    }
    // So no output matrix is required.
    value["tie_word_embeddings"] = Value::Bool(true);
    let text = serde_json::to_vec(&value).map_err(|error| LoadError::broken(path, error))?;
    let checkout = decoder::read(path, &text).map_err(|mut error| {
        if let LoadError::UnknownArchitecture {
            architecture,
            known,
            ..
        } = &mut error
        {
            named.clone_into(architecture);
            *known = KNOWN.to_vec();
        }
        error
    })?;
    if checkout.packed.is_some() {
        let fix = "take the model's unquantized weights";
        let field = "quantization_config";
        return Err(LoadError::unsupported(path, field, "(an object)", fix));
    }
    Ok(Described {
        max_tokens: checkout.config.context_length,
        naming: checkout.naming,
        backbone: BackboneConfig::Decoder(Box::new(checkout.config)),
        kind: None,
        purpose: Purpose::Embed,
    })
}

/// The keys that matter; missing ones have the defaults of `transformers`.
#[derive(Debug, Deserialize)]
struct Raw {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    max_position_embeddings: usize,
    type_vocab_size: Option<usize>,
    layer_norm_eps: Option<f64>,
    norm_eps: Option<f64>,
    hidden_act: Option<String>,
    hidden_activation: Option<String>,
    pad_token_id: Option<usize>,
    position_embedding_type: Option<String>,
    is_decoder: Option<bool>,
    norm_bias: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    local_attention: Option<usize>,
    global_attn_every_n_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    global_rope_theta: Option<f64>,
    local_rope_theta: Option<f64>,
    rope_parameters: Option<Value>,
    quantization_config: Option<Value>,
}

struct Source<'a> {
    path: &'a Path,
    kind: Kind,
    raw: Raw,
}

impl Source<'_> {
    fn encoder(&self) -> Result<EncoderConfig, LoadError> {
        self.refuse_variants()?;
        let raw = &self.raw;
        let is_modern = self.kind == Kind::ModernBert;
        let of_modern = |flag: Option<bool>| !is_modern || flag.unwrap_or(false);
        let (eps, activation) = if is_modern {
            let named = raw.hidden_activation.as_deref();
            let named = self.activation("hidden_activation", named.unwrap_or("gelu"))?;
            (raw.norm_eps.unwrap_or(1e-5), named)
        } else {
            let named = raw.hidden_act.as_deref();
            let named = self.activation("hidden_act", named.unwrap_or("gelu"))?;
            (raw.layer_norm_eps.unwrap_or(1e-12), named)
        };
        Ok(EncoderConfig {
            family: if is_modern {
                EncoderFamily::ModernBert
            } else {
                EncoderFamily::Bert
            },
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_layers: raw.num_hidden_layers,
            num_heads: raw.num_attention_heads,
            norm_eps: eps,
            activation,
            positions: self.positions()?,
            num_token_types: if is_modern {
                0
            } else {
                raw.type_vocab_size.unwrap_or(2)
            },
            has_norm_bias: of_modern(raw.norm_bias),
            has_attention_bias: of_modern(raw.attention_bias),
            has_mlp_bias: of_modern(raw.mlp_bias),
        })
    }

    fn unsupported<T>(
        &self,
        field: &str,
        value: impl std::fmt::Display,
        fix: &'static str,
    ) -> Result<T, LoadError> {
        Err(LoadError::unsupported(self.path, field, value, fix))
    }

    fn refuse_variants(&self) -> Result<(), LoadError> {
        if self.raw.quantization_config.is_some() {
            let fix = "take the model's unquantized weights";
            return self.unsupported("quantization_config", "(an object)", fix);
        }
        if self.raw.is_decoder == Some(true) {
            return self.unsupported("is_decoder", true, "it must be false");
        }
        match self.raw.position_embedding_type.as_deref() {
            None | Some("absolute") => Ok(()),
            Some(_) if self.kind == Kind::ModernBert => Ok(()),
            Some(other) => {
                self.unsupported("position_embedding_type", other, "it must be absolute")
            }
        }
    }

    fn activation(&self, field: &str, named: &str) -> Result<Nonlinearity, LoadError> {
        hidden_activation(self.path, field, named)
    }

    fn positions(&self) -> Result<Positions, LoadError> {
        let raw = &self.raw;
        if self.kind != Kind::ModernBert {
            let first = match self.kind {
                Kind::Roberta => raw.pad_token_id.unwrap_or(1).saturating_add(1),
                Kind::Bert | Kind::ModernBert => 0,
            };
            if first >= raw.max_position_embeddings {
                let problem = format!("is {}, too few", raw.max_position_embeddings);
                let field = "max_position_embeddings";
                return Err(LoadError::bad_config(self.path, field, problem));
            }
            return Ok(Positions::Absolute {
                table_len: raw.max_position_embeddings,
                first,
            });
        }
        let theta = self.theta("full_attention", raw.global_rope_theta, 160_000.0)?;
        Ok(Positions::Rotary {
            theta,
            window_theta: self.theta("sliding_attention", raw.local_rope_theta, 10_000.0)?,
            is_windowed: self.windowed_layers()?,
            window_tokens: raw.local_attention.unwrap_or(128) / 2,
        })
    }

    fn theta(&self, kind: &str, old: Option<f64>, by_default: f64) -> Result<f32, LoadError> {
        let object = self.raw.rope_parameters.as_ref();
        let object = object.and_then(|parameters| parameters.get(kind));
        let text = |key: &str| object?.get(key)?.as_str();
        match text("rope_type") {
            None | Some("default") => {}
            Some(other) => {
                return self.unsupported("rope_parameters.rope_type", other, "default is");
            }
        }
        let given = object.and_then(|object| object.get("rope_theta")?.as_f64());
        let theta = given.or(old).unwrap_or(by_default);
        if theta.is_nan() || theta < 1.0 {
            return Err(LoadError::bad_config(
                self.path,
                "rope_theta",
                "is less than 1",
            ));
        }
        Ok(single(theta))
    }

    fn windowed_layers(&self) -> Result<Vec<bool>, LoadError> {
        let raw = &self.raw;
        let Some(types) = &raw.layer_types else {
            let every = raw.global_attn_every_n_layers.unwrap_or(3).max(1);
            let layers = 0..raw.num_hidden_layers.min(1 << 12);
            return Ok(layers.map(|layer| !layer.is_multiple_of(every)).collect());
        };
        let is_windowed = |kind: &String| match kind.as_str() {
            "full_attention" => Ok(false),
            "sliding_attention" => Ok(true),
            other => self.unsupported(
                "layer_types",
                other,
                "full_attention and sliding_attention are",
            ),
        };
        if types.len() != raw.num_hidden_layers {
            let (listed, layers) = (types.len(), raw.num_hidden_layers);
            let problem = format!("lists {listed} layers, and num_hidden_layers is {layers}");
            return Err(LoadError::bad_config(self.path, "layer_types", problem));
        }
        types.iter().map(is_windowed).collect()
    }
}

/// Rejects impossible sizes, so that later code does not divide by zero or allocate without limit.
fn check(path: &Path, config: &EncoderConfig) -> Result<(), LoadError> {
    let bad = |field: &str, problem: String| Err(LoadError::bad_config(path, field, problem));
    let sizes = [
        ("vocab_size", config.vocab_size, 1 << 22),
        ("hidden_size", config.hidden_size, 1 << 17),
        ("intermediate_size", config.intermediate_size, 1 << 20),
        ("num_hidden_layers", config.num_layers, 1 << 12),
        ("num_attention_heads", config.num_heads, 1 << 12),
        (
            "max_position_embeddings",
            config.positions_len().unwrap_or(1),
            1 << 24,
        ),
    ];
    for (field, size, most) in sizes {
        if size == 0 || size > most {
            return bad(field, format!("is {size}; it must be 1 to {most}"));
        }
    }
    if !config.hidden_size.is_multiple_of(2 * config.num_heads) {
        let (hidden, heads) = (config.hidden_size, config.num_heads);
        let problem = format!("{heads} do not divide the width {hidden} into even parts");
        return bad("num_attention_heads", problem);
    }
    if config.num_token_types > 1 << 10 {
        return bad("type_vocab_size", format!("is {}", config.num_token_types));
    }
    if !(f64::MIN_POSITIVE..1.0).contains(&config.norm_eps) {
        return bad("layer_norm_eps", format!("is {}", config.norm_eps));
    }
    Ok(())
}
