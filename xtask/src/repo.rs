//! Where this repository and its target directory are.
//!
//! Every task takes a [`Repo`] and builds its paths from it, so no task depends on the current directory.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cargo_metadata::MetadataCommand;

use crate::process::{cargo, succeeds};

/// The checkout this command works on.
#[derive(Debug)]
pub(crate) struct Repo {
    root: PathBuf,
    target: PathBuf,
}

impl Repo {
    /// Asks cargo for the workspace that contains the current directory. Without cargo, as on a machine that runs another's
    /// build, finds the nearest folder above with a `Cargo.lock`.
    ///
    /// # Errors
    /// When cargo cannot read the workspace, or neither exists.
    pub(crate) fn locate() -> anyhow::Result<Self> {
        if !succeeds(cargo(&env::current_dir()?).arg("--version")) {
            return Self::around(&env::current_dir()?);
        }
        let metadata = MetadataCommand::new()
            .no_deps()
            .exec()
            .context("cannot read the cargo workspace")?;
        Ok(Self {
            root: metadata.workspace_root.into(),
            target: metadata.target_directory.into(),
        })
    }

    fn around(folder: &Path) -> anyhow::Result<Self> {
        let is_root = |folder: &&Path| folder.join("Cargo.lock").is_file();
        let root = folder.ancestors().find(is_root);
        let root = root.context("no cargo, and no Cargo.lock in this folder or above")?;
        Ok(Self {
            root: root.to_owned(),
            target: root.join("target"),
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
