//! Operators' files.

use std::fs;

use genset_backend_common::MetricsRegistry;
use genset_engine_scripted::Script;
use genset_frontend::keys::ApiKeys;

/// The file of `--api-keys`.
pub fn api_keys(file: &[u8]) {
    let folder = tempfile::tempdir().expect("temporary folders can be made");
    let path = folder.path().join("keys.toml");
    fs::write(&path, file).expect("temporary files can be written");
    drop(ApiKeys::load(path, &MetricsRegistry::default()));
}

/// The file of `--script`.
pub fn script(file: &[u8]) {
    drop(String::from_utf8_lossy(file).parse::<Script>());
}
