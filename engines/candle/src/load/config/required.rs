//! The keys of a `config.json` that every model needs.

use std::path::Path;

use serde_json::Value;

use crate::error::LoadError;

/// Keys that have no default.
const REQUIRED: [&str; 6] = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
];

/// Checks the keys that have no default.
///
/// # Errors
/// One of them is missing, or is not a valid size.
pub(crate) fn check_required(path: &Path, value: &Value) -> Result<(), LoadError> {
    for key in REQUIRED {
        if value.get(key).and_then(Value::as_u64).is_none() {
            let has_it = value.get(key).is_some();
            let problem = if has_it { "is no size" } else { "missing" };
            return Err(LoadError::bad_config(path, key, problem));
        }
    }
    Ok(())
}
