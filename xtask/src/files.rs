//! Writes build outputs into folders.

use std::fs;
use std::path::Path;

use anyhow::Context as _;

/// Makes an empty folder.
///
/// # Errors
/// When what is there cannot be removed, or the folder cannot be made.
pub(crate) fn fresh(folder: &Path) -> anyhow::Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

/// Writes a file; creates its folder if needed.
///
/// # Errors
/// When it cannot.
pub(crate) fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    make_folder_of(path)?;
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Copies a file; creates the destination's folder if needed.
///
/// # Errors
/// When it cannot.
pub(crate) fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    make_folder_of(to)?;
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

fn make_folder_of(path: &Path) -> anyhow::Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}
