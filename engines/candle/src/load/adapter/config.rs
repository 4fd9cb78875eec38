//! [`PeftConfig`]: the supported part of `adapter_config.json`; other fields are rejected by name.

use std::path::Path;

use serde_json::{Map, Value};

use super::{AdapterError, Result};
use crate::error::LoadError;
use crate::model::AdapterTarget;

/// The rank of an adapter, and the scale of its products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PeftConfig {
    /// At least 1.
    pub(super) rank: usize,
    pub(super) scale: f64,
}

/// The largest `r`.
const MAX_RANK: u64 = 4096;

/// Initializations of an adapter that change the base model's weights too.
const CHANGED_BASES: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

/// Fields that must be off: false, null or empty.
const ABSENT: [&str; 12] = [
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
];

impl PeftConfig {
    /// Reads the content of the file `path`.
    pub(super) fn read(path: &Path, content: &[u8]) -> Result<Self> {
        let bad = |field, problem: String| LoadError::bad_config(path, field, problem);
        let fields: Map<String, Value> =
            serde_json::from_slice(content).map_err(|error| bad("JSON", error.to_string()))?;
        refuse(path, &fields)?;
        let rank = fields.get("r").and_then(Value::as_u64);
        let rank = rank
            .filter(|rank| (1..=MAX_RANK).contains(rank))
            .ok_or_else(|| bad("r", format!("must be a whole number from 1 to {MAX_RANK}")))?;
        let alpha = fields.get("lora_alpha").and_then(Value::as_f64);
        let alpha = alpha.ok_or_else(|| bad("lora_alpha", "must be a number".to_owned()))?;
        let width = f64::from(u32::try_from(rank).unwrap_or(u32::MAX));
        let is_rank_stabilized = match fields.get("use_rslora") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(value)) => *value,
            Some(_) => return Err(bad("use_rslora", "must be true or false".to_owned()).into()),
        };
        let scale = if is_rank_stabilized {
            alpha / width.sqrt()
        } else {
            alpha / width
        };
        Ok(Self {
            rank: usize::try_from(rank).unwrap_or(usize::MAX),
            scale,
        })
    }
}

/// Rejects unsupported fields that would change answers.
fn refuse(path: &Path, fields: &Map<String, Value>) -> Result<()> {
    let unsupported = |field, value: &Value| {
        AdapterError::from(LoadError::unsupported(path, field, shown(value), ""))
    };
    let null = Value::Null;
    let kind = fields.get("peft_type").unwrap_or(&null);
    if kind.as_str() != Some("LORA") {
        return Err(unsupported("peft_type", kind));
    }
    for field in ABSENT {
        match fields.get(field) {
            Some(value) if !is_off(value) => return Err(unsupported(field, value)),
            Some(_) | None => {}
        }
    }
    match fields.get("bias") {
        None | Some(Value::Null) => {}
        Some(bias) if bias.as_str() == Some("none") => {}
        Some(bias) => return Err(unsupported("bias", bias)),
    }
    if let Some(begun @ Value::String(name)) = fields.get("init_lora_weights") {
        let name = name.to_ascii_lowercase();
        if CHANGED_BASES.iter().any(|way| name.starts_with(way)) {
            return Err(unsupported("init_lora_weights", begun));
        }
    }
    // A string is an expression over names. The tensors then tell which modules are changed.
    let targets = fields.get("target_modules").and_then(Value::as_array);
    for target in targets.into_iter().flatten() {
        let name = target.as_str().unwrap_or_default();
        let module = name.rsplit('.').next().unwrap_or_default();
        if !AdapterTarget::MODULES.contains(&module) {
            return Err(unsupported("target_modules", target));
        }
    }
    Ok(())
}

/// Whether a field's value means that the feature is off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(true) | Value::Number(_) | Value::String(_) => false,
    }
}

/// A short form of any value.
fn shown(value: &Value) -> String {
    const MOST: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{} ...", &text[..end]),
        None => text,
    }
}
