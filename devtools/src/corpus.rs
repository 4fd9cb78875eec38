//! The corpus of tiny-chat: text files in a folder.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// The folder's text files (`.txt`), by name.
///
/// # Errors
/// If the folder cannot be read.
pub fn text_files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let context = || format!("cannot read {}", folder.display());
    let entries = fs::read_dir(folder).with_context(context)?;
    let mut paths = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<Vec<_>>>()
        .with_context(context)?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "txt"));
    paths.sort();
    Ok(paths)
}
