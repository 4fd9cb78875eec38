//! Where this repository and its target directory are.
//!
//! Every task takes a [`Repo`] and builds its paths from it, so no task depends on the current directory.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cargo_metadata::MetadataCommand;

/// The checkout this command works on.
#[derive(Debug)]
pub(crate) struct Repo {
    root: PathBuf,
    target: PathBuf,
}

impl Repo {
    /// Asks cargo for the workspace that contains the current directory.
    ///
    /// # Errors
    /// When cargo cannot read the workspace.
    pub(crate) fn locate() -> anyhow::Result<Self> {
        let metadata = MetadataCommand::new()
            .no_deps()
            .exec()
            .context("cannot read the cargo workspace")?;
        Ok(Self {
            root: metadata.workspace_root.into(),
            target: metadata.target_directory.into(),
        })
    }

    /// The folder of the workspace's `Cargo.toml`.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The folder for everything that is built or installed.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }
}
