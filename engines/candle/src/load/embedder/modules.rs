//! Reads the files of `sentence-transformers`: `modules.json`, the modules' configurations, and the longest input.
//!
//! # Source
//! `sentence_transformers.models` of `sentence-transformers` 2 to 5.

use std::path::{Component, Path};

use serde::Deserialize;
use serde_json::Value;

use super::MODULES;
use crate::error::LoadError;
use crate::load::read_file;
use crate::model::{HeadConfig, HeadStep, Nonlinearity, Pooling};

/// The file with the maximum length of inputs.
const SENTENCE_CONFIG: &str = "sentence_bert_config.json";

#[derive(Deserialize)]
pub(super) struct Module {
    #[serde(default)]
    pub(super) path: String,
    #[serde(rename = "type")]
    kind: String,
}

impl Module {
    /// The module's class, without its Python path.
    pub(super) fn name(&self) -> &str {
        self.kind.rsplit('.').next().unwrap_or_default()
    }
}

/// The modules in the file at `path`, if it exists.
pub(super) fn listed_modules(path: &Path) -> Result<Option<Vec<Module>>, LoadError> {
    read_json(path)
}

/// The head that the checkout at `path` describes. Without `modules.json` it is mean pooling, as in `sentence-transformers`.
///
/// # Errors
/// A module is not supported, or a file is broken.
pub(super) fn head(path: &Path, hidden_size: usize) -> Result<HeadConfig, LoadError> {
    let listed = path.join(MODULES);
    let Some(modules) = listed_modules(&listed)? else {
        tracing::warn!("there is no {MODULES}: embeddings are the mean of the tokens' vectors");
        return Ok(HeadConfig {
            pooling: vec![Pooling::Mean],
            steps: Vec::new(),
        });
    };
    let mut head = HeadConfig {
        pooling: Vec::new(),
        steps: Vec::new(),
    };
    for (index, module) in modules.iter().enumerate() {
        let mut parts = Path::new(&module.path).components();
        if !parts.all(|part| matches!(part, Component::Normal(_))) {
            let problem = format!(
                "it names {:?}, which is no folder of the checkout",
                module.path
            );
            return Err(LoadError::broken(&listed, problem));
        }
        let kind = module.name();
        match kind {
            "Transformer" if index == 0 && module.path.is_empty() => {}
            "Pooling" if head.pooling.is_empty() => {
                head.pooling = pooling(&path.join(&module.path).join("config.json"))?;
            }
            "Dense" if !head.pooling.is_empty() => {
                let width = head.width(hidden_size);
                head.steps.push(dense(path, &module.path, width)?);
            }
            "Normalize" if !head.pooling.is_empty() => head.steps.push(HeadStep::Normalize),
            _ => {
                let fix = "a Transformer in the checkout's own folder, then one Pooling, then Dense and Normalize are";
                return Err(LoadError::unsupported(
                    &listed,
                    &format!("module {index}"),
                    kind,
                    fix,
                ));
            }
        }
    }
    if head.pooling.is_empty() {
        return Err(LoadError::bad_config(&listed, "modules", "have no Pooling"));
    }
    Ok(head)
}

/// The names of each mode: the current name, and the older flag.
const MODES: [(Pooling, &str, &str); 6] = [
    (Pooling::Cls, "cls", "pooling_mode_cls_token"),
    (Pooling::Max, "max", "pooling_mode_max_tokens"),
    (Pooling::Mean, "mean", "pooling_mode_mean_tokens"),
    (
        Pooling::MeanSqrtLen,
        "mean_sqrt_len_tokens",
        "pooling_mode_mean_sqrt_len_tokens",
    ),
    (
        Pooling::WeightedMean,
        "weightedmean",
        "pooling_mode_weightedmean_tokens",
    ),
    (Pooling::LastToken, "lasttoken", "pooling_mode_lasttoken"),
];

fn pooling(path: &Path) -> Result<Vec<Pooling>, LoadError> {
    let config = read_json::<Value>(path)?;
    let config = config.ok_or_else(|| LoadError::incomplete(path, "it is not there"))?;
    if config.get("include_prompt") == Some(&Value::Bool(false)) {
        let fix = "it must be true: embeddings include the prompt before a text";
        return Err(LoadError::unsupported(path, "include_prompt", false, fix));
    }
    let named: Vec<&str> = match config.get("pooling_mode") {
        Some(Value::String(mode)) => vec![mode],
        Some(Value::Array(modes)) => modes.iter().filter_map(Value::as_str).collect(),
        Some(_) | None => Vec::new(),
    };
    let names = MODES.map(|(_, name, _)| name);
    if let Some(unknown) = named.iter().find(|name| !names.contains(name)) {
        let fix = "cls, max, mean, mean_sqrt_len_tokens, weightedmean and lasttoken are";
        return Err(LoadError::unsupported(path, "pooling_mode", unknown, fix));
    }
    let is_on = |(_, name, flag): &(Pooling, &str, &str)| {
        named.contains(name) || config.get(*flag) == Some(&Value::Bool(true))
    };
    let modes: Vec<Pooling> = MODES.into_iter().filter(is_on).map(|mode| mode.0).collect();
    if modes.is_empty() {
        return Err(LoadError::bad_config(path, "pooling_mode", "names no mode"));
    }
    Ok(modes)
}

#[derive(Deserialize)]
struct Dense {
    in_features: usize,
    out_features: usize,
    #[serde(default = "yes")]
    bias: bool,
    #[serde(default)]
    activation_function: Option<String>,
}

fn yes() -> bool {
    true
}

fn dense(checkout: &Path, folder: &str, width: usize) -> Result<HeadStep, LoadError> {
    let path = checkout.join(folder).join("config.json");
    let config = read_json::<Dense>(&path)?;
    let config = config.ok_or_else(|| LoadError::incomplete(&path, "it is not there"))?;
    if config.in_features != width {
        let problem = format!("is {}, but its input has {width}", config.in_features);
        return Err(LoadError::bad_config(&path, "in_features", problem));
    }
    if config.out_features == 0 || config.out_features > 1 << 17 {
        let problem = format!("is {}", config.out_features);
        return Err(LoadError::bad_config(&path, "out_features", problem));
    }
    let named = config.activation_function.as_deref();
    Ok(HeadStep::Dense {
        name: "linear".to_owned(),
        folder: folder.to_owned(),
        in_features: config.in_features,
        out_features: config.out_features,
        has_bias: config.bias,
        activation: torch_activation(&path, "activation_function", named.unwrap_or("Tanh"))?,
    })
}

/// An activation by its class name in PyTorch, with or without the module's path.
pub(super) fn torch_activation(
    path: &Path,
    field: &str,
    named: &str,
) -> Result<Nonlinearity, LoadError> {
    match named.rsplit('.').next().unwrap_or_default() {
        "Identity" => Ok(Nonlinearity::Identity),
        "Tanh" => Ok(Nonlinearity::Tanh),
        "ReLU" => Ok(Nonlinearity::Relu),
        "GELU" => Ok(Nonlinearity::Gelu),
        "SiLU" => Ok(Nonlinearity::Silu),
        "Sigmoid" => Ok(Nonlinearity::Sigmoid),
        _ => {
            let fix = "Identity, Tanh, ReLU, GELU, SiLU and Sigmoid are";
            Err(LoadError::unsupported(path, field, named, fix))
        }
    }
}

/// An activation by its name in `transformers`.
pub(super) fn hidden_activation(
    path: &Path,
    field: &str,
    named: &str,
) -> Result<Nonlinearity, LoadError> {
    match named {
        "gelu" => Ok(Nonlinearity::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Nonlinearity::GeluTanh),
        "relu" => Ok(Nonlinearity::Relu),
        "silu" | "swish" => Ok(Nonlinearity::Silu),
        "tanh" => Ok(Nonlinearity::Tanh),
        other => {
            let fix = "gelu, gelu_new, gelu_pytorch_tanh, relu, silu and tanh are";
            Err(LoadError::unsupported(path, field, other, fix))
        }
    }
}

/// Rejects a checkout that lowercases texts before the tokenizer, unless the tokenizer does it too.
pub(super) fn check_case(path: &Path) -> Result<(), LoadError> {
    let listed = path.join(SENTENCE_CONFIG);
    let config = read_json::<Value>(&listed)?.unwrap_or_default();
    if config.get("do_lower_case") != Some(&Value::Bool(true)) {
        return Ok(());
    }
    let tokenizer = read_json::<Value>(&path.join("tokenizer.json"))?.unwrap_or_default();
    if lowers(&tokenizer["normalizer"]) {
        return Ok(());
    }
    let fix = "the normalizer of tokenizer.json must lower case, or this be false";
    Err(LoadError::unsupported(&listed, "do_lower_case", true, fix))
}

/// Whether a normalizer of `tokenizers` lowercases.
fn lowers(normalizer: &Value) -> bool {
    match normalizer["type"].as_str() {
        Some("Lowercase") => true,
        Some("BertNormalizer") => normalizer["lowercase"] == Value::Bool(true),
        Some("Sequence") => {
            (normalizer["normalizers"].as_array()).is_some_and(|parts| parts.iter().any(lowers))
        }
        Some(_) | None => false,
    }
}

/// The longest input in tokens that the checkout asks for: from `sentence_bert_config.json`, else from the tokenizer.
pub(super) fn max_tokens(path: &Path) -> Result<Option<usize>, LoadError> {
    /// `transformers` writes a value far above this for a tokenizer without a limit.
    const MOST: f64 = 1e9;
    for (file, key) in [
        (SENTENCE_CONFIG, "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ] {
        let path = path.join(file);
        let config = read_json::<Value>(&path)?;
        let Some(number) = config.as_ref().and_then(|config| config.get(key)?.as_f64()) else {
            continue;
        };
        if number < 1.0 {
            let problem = format!("is {number}; it must be at least 1");
            return Err(LoadError::bad_config(&path, key, problem));
        }
        if number < MOST {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "1 to a thousand million"
            )]
            return Ok(Some(number as usize));
        }
    }
    Ok(None)
}

/// Reads a JSON file, if it exists.
pub(super) fn read_json<T: serde::de::DeserializeOwned>(
    path: &Path,
) -> Result<Option<T>, LoadError> {
    if !path.exists() {
        return Ok(None);
    }
    let text = read_file(path)?;
    let value = serde_json::from_slice(&text).map_err(|error| LoadError::broken(path, error))?;
    Ok(Some(value))
}
