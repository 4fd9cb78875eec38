//! `cargo xtask test deny`: licences, banned crates and sources, as `deny.toml` has them.
//!
//! It runs offline once every crate is there, since only the advisory database needs GitHub; that check is asked for by name.

use std::process::Command;

use crate::process::{cargo, run as run_command};
use crate::repo::Repo;
use crate::tools::{self, Tool};

/// The one that reads our `deny.toml`.
const CARGO_DENY: Tool = Tool {
    name: "cargo-deny",
    version: "0.20.2",
};

/// Whether the advisory database is fetched and checked too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Advisories {
    /// Not checked: the machine may be offline.
    Skip,
    /// Checked, which fetches the database from GitHub.
    Check,
}

impl Advisories {
    pub(crate) fn from_flag(given: bool) -> Self {
        if given { Self::Check } else { Self::Skip }
    }
}

/// Installs cargo-deny if it is missing and runs its checks.
///
/// # Errors
/// When the installation or a check fails.
pub(crate) fn run(repo: &Repo, advisories: Advisories) -> anyhow::Result<()> {
    let program = tools::installed(repo, &CARGO_DENY)?;
    // Crates for other platforms count as well, and no build here downloads them.
    run_command(cargo(repo.root()).arg("fetch"))?;
    let mut offline = Command::new(&program);
    offline.args(["--offline", "check", "licenses", "bans", "sources"]);
    run_command(offline.current_dir(repo.root()))?;
    match advisories {
        Advisories::Skip => Ok(()),
        Advisories::Check => run_command(
            Command::new(&program)
                .args(["check", "advisories"])
                .current_dir(repo.root()),
        ),
    }
}
