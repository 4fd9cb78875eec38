//! The file of API keys.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use genset_backend_common::text_file::read_text;
use serde::Deserialize;

/// The largest file of keys, in bytes: about a hundred thousand keys.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// The BLAKE3 hash of a key, which the file holds. Keys are long and random, so a fast hash is safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash(blake3::Hash);

impl KeyHash {
    /// The hash of a key.
    #[must_use]
    pub fn of(key: &str) -> Self {
        Self(blake3::hash(key.as_bytes()))
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "blake3:{}", self.0)
    }
}

impl<'de> Deserialize<'de> for KeyHash {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let hex = text.strip_prefix("blake3:");
        let hash = hex.and_then(|hex| blake3::Hash::from_hex(hex).ok());
        hash.map(Self).ok_or_else(|| {
            serde::de::Error::custom(
                "expected \"blake3:\" and 64 hex digits, as `genset key` prints them",
            )
        })
    }
}

/// One key in the file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyEntry {
    /// Its name in metrics and logs.
    pub name: String,
    /// The key's hash.
    pub hash: KeyHash,
    /// The most requests a minute; `None` for no limit.
    pub requests_per_minute: Option<NonZeroU64>,
    /// The most prompt and completion tokens a minute; `None` for no limit.
    pub tokens_per_minute: Option<NonZeroU64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyFile {
    #[serde(default)]
    key: Vec<KeyEntry>,
}

/// Why a file of keys cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyFileError {
    /// It cannot be read.
    #[error("the file of API keys {path:?} cannot be read: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Its content is invalid.
    #[error("the file of API keys {path:?} is not valid: {problem}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Where and what.
        problem: String,
    },
}

/// Reads the file, and returns its hash too. It has at least one key, and names are unique.
pub(super) fn read(path: &Path) -> Result<(blake3::Hash, Vec<KeyEntry>), KeyFileError> {
    let text = read_text(path, MAX_FILE_BYTES).map_err(|source| KeyFileError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    let hash = blake3::hash(text.as_bytes());
    let invalid = |problem: String| KeyFileError::Invalid {
        path: path.to_owned(),
        problem,
    };
    let file: KeyFile = toml::from_str(&text).map_err(|error| invalid(error.to_string()))?;
    if file.key.is_empty() {
        return Err(invalid(
            "it lists no [[key]]; `genset key NAME` prints one".into(),
        ));
    }
    let (mut names, mut hashes) = (HashSet::new(), HashSet::new());
    for entry in &file.key {
        if entry.name.is_empty() {
            return Err(invalid("a key has an empty name".into()));
        }
        if !names.insert(&entry.name) || !hashes.insert(entry.hash) {
            return Err(invalid(format!("the key {:?} is there twice", entry.name)));
        }
    }
    Ok((hash, file.key))
}

/// As [`read`], of a file that may have been replaced. It opens regular files only: opening a named pipe waits for
/// somebody who writes to it.
pub(super) fn read_again(path: &Path) -> Result<(blake3::Hash, Vec<KeyEntry>), KeyFileError> {
    let unreadable = |source| KeyFileError::Unreadable {
        path: path.to_owned(),
        source,
    };
    if !fs::metadata(path).map_err(unreadable)?.is_file() {
        let problem = "it is not a regular file, and only such a file is read again";
        return Err(unreadable(io::Error::other(problem)));
    }
    read(path)
}

/// A new key, and the lines for the file.
#[must_use]
pub fn new_key(name: &str) -> (String, String) {
    let key = format!(
        "sk-genset-{:032x}{:032x}",
        rand::random::<u128>(),
        rand::random::<u128>()
    );
    // For names, TOML's basic strings are the same as JSON's.
    let name = serde_json::Value::from(name);
    let hash = KeyHash::of(&key);
    let lines = format!("[[key]]\nname = {name}\nhash = \"{hash}\"\n");
    (key, lines)
}
