//! [`ExtraArgs`]: the server's own settings, from a JSON or YAML file.

use std::path::{Path, PathBuf};

use genset_backend_common::{EngineError, text_file::read_text};
use serde_json::{Map, Value};

use crate::command::extra_args;
use crate::dialect::ExtraStyle;

/// The flag that names the file.
const FLAG: &str = "--extra-engine-args";

/// The maximum file size, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Settings that are passed to the server unchanged: as flags, or for TensorRT-LLM as the file itself.
#[derive(Debug, Clone, PartialEq)]
pub struct ExtraArgs {
    path: PathBuf,
    entries: Map<String, Value>,
}

impl ExtraArgs {
    /// Reads a file that contains one JSON object or one YAML mapping.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag and the file.
    pub fn load(path: &Path) -> Result<Self, EngineError> {
        let bad = |problem: String| {
            EngineError::invalid_argument(FLAG, format!("{}: {problem}", path.display()))
        };
        let text = read_text(path, MAX_FILE_BYTES).map_err(|error| bad(error.to_string()))?;
        // A JSON file is usually valid YAML too, but the JSON parser reports its errors better.
        let is_json = path
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
        let value: Value = if is_json {
            serde_json::from_str(&text).map_err(|error| bad(format!("is no JSON: {error}")))?
        } else {
            serde_norway::from_str(&text).map_err(|error| bad(format!("is no YAML: {error}")))?
        };
        let entries = match value {
            Value::Object(entries) => entries,
            Value::Null => Map::new(),
            Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                let problem = "must hold one object, a name and a value for each setting";
                return Err(bad(problem.into()));
            }
        };
        let path = path.to_owned();
        Ok(Self { path, entries })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The settings as flags in the common form: `--some-name value`, and true as `--some-name`.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the file, if a name is not valid.
    pub fn flags(&self) -> Result<Vec<String>, EngineError> {
        extra_args(self, ExtraStyle::Dashes)
    }

    /// The settings.
    pub(crate) fn entries(&self) -> &Map<String, Value> {
        &self.entries
    }

    /// A setting, with its words joined by dashes or underscores.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        let name = joined(name);
        self.entries
            .iter()
            .find(|(key, _)| joined(key) == name)
            .map(|(_, value)| value)
    }

    /// Whether it has a setting or its opposite, `no-NAME`.
    pub(crate) fn says(&self, name: &str) -> bool {
        let opposite = format!("no-{}", joined(name));
        self.get(name).is_some() || self.get(&opposite).is_some()
    }

    pub(crate) fn invalid(&self, key: &str, problem: impl std::fmt::Display) -> EngineError {
        EngineError::invalid_argument(FLAG, format!("{}: {key}: {problem}", self.path.display()))
    }
}

/// A name with its words joined by dashes.
pub(crate) fn joined(name: &str) -> String {
    name.trim_start_matches('-').replace('_', "-")
}

/// A name as a flag; a name with a single dash keeps it.
pub(crate) fn spelled(name: &str) -> String {
    let dashes = if name.starts_with('-') && !name.starts_with("--") {
        "-"
    } else {
        "--"
    };
    format!("{dashes}{}", joined(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    impl ExtraArgs {
        /// The settings in a YAML text, as from the file `extra.yaml`.
        pub(crate) fn in_test(text: &str) -> Self {
            let entries: Value = serde_norway::from_str(text).unwrap();
            Self {
                path: "extra.yaml".into(),
                entries: entries.as_object().cloned().unwrap_or_default(),
            }
        }
    }
}
