//! [`Saved`]: a conversation in a file.

use std::io::Write;
use std::path::{Path, PathBuf};

use genset_backend_common::text_file::read_text;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The longest file, in bytes.
const MAX_BYTES: u64 = 32 << 20;

/// A conversation as `/save` writes it, in JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Saved {
    /// The model that answered last. Any other model can continue.
    pub(super) model: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) system: Option<String>,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub(super) settings: Map<String, Value>,
    /// Messages of a chat request.
    pub(super) messages: Vec<Value>,
}

impl Saved {
    /// Writes the file atomically. Overwrites only a saved conversation.
    ///
    /// # Errors
    /// A sentence that names the file.
    pub(super) fn write(&self, path: &Path) -> Result<(), String> {
        if path.exists() && Self::read(path).is_err() {
            let path = path.display();
            return Err(format!(
                "{path} exists and is no saved conversation; choose another name"
            ));
        }
        let folder = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty());
        let write = || {
            let mut file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
            serde_json::to_writer_pretty(&mut file, self)?;
            file.write_all(b"\n")?;
            file.persist(path).map_err(|error| error.error)?;
            Ok(())
        };
        write().map_err(|error: std::io::Error| {
            format!("{} cannot be written: {error}", path.display())
        })
    }

    /// Reads a file.
    ///
    /// # Errors
    /// A sentence that names the file.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let text = read_text(path, MAX_BYTES)
            .map_err(|error| format!("{shown} cannot be read: {error}"))?;
        serde_json::from_str(&text)
            .map_err(|error| format!("{shown} is no saved conversation: {error}"))
    }
}

/// Expands a typed path: `~/` is the home folder.
pub(super) fn path(typed: &str) -> PathBuf {
    let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
    match (typed.strip_prefix("~/"), home) {
        (Some(rest), Some(home)) => PathBuf::from(home).join(rest),
        _ => typed.into(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_file_has_the_conversation_and_others_are_not_written_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("talk.json");
        let saved = Saved {
            model: "m".into(),
            system: Some("Be brief.".into()),
            settings: json!({"temperature": 0.2}).as_object().unwrap().clone(),
            messages: vec![json!({"role": "user", "content": "Hi"})],
        };
        for _ in 0..2 {
            saved.write(&path).unwrap();
            assert_eq!(Saved::read(&path).unwrap(), saved);
        }
        let other = folder.path().join("other.json");
        std::fs::write(&other, "{}").unwrap();
        let error = saved.write(&other).unwrap_err();
        assert!(error.ends_with("choose another name"), "{error}");
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "{}");
        let error = Saved::read(&folder.path().join("none")).unwrap_err();
        assert!(error.contains("cannot be read"), "{error}");
        let error = saved.write(&folder.path().join("no/such")).unwrap_err();
        assert!(error.contains("cannot be written"), "{error}");
    }
}
