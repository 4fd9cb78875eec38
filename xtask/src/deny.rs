//! `cargo xtask deny`: licences, banned crates and sources, as `deny.toml` has them.
//!
//! cargo-deny comes from the registry in one exact version and lives under `target/tools`, so nothing is installed for the
//! whole machine. It runs offline once every crate is there, since only the advisory database needs GitHub; that check is asked for by name.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::process::{cargo, run as run_command};
use crate::repo::Repo;

/// The version of cargo-deny that reads our `deny.toml`.
const VERSION: &str = "0.20.2";

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
    let program = installed(repo)?;
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

/// The path of a cargo-deny of the right version: the machine's own, ours, or one built now.
fn installed(repo: &Repo) -> anyhow::Result<PathBuf> {
    let tools = repo.target().join("tools");
    let ours = tools.join("bin").join("cargo-deny");
    for candidate in [PathBuf::from("cargo-deny"), ours.clone()] {
        if version(&candidate).as_deref() == Some(VERSION) {
            return Ok(candidate);
        }
    }
    eprintln!(
        "installing cargo-deny {VERSION} into target/tools; once, about two minutes on two cores"
    );
    let mut install = cargo(repo.root());
    install
        .args([
            "install",
            "cargo-deny",
            "--quiet",
            "--locked",
            "--version",
            VERSION,
            "--root",
        ])
        .arg(&tools);
    run_command(&mut install)?;
    Ok(ours)
}

/// What `PROGRAM --version` says after its name, or nothing if it does not run.
fn version(program: &PathBuf) -> Option<String> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.split_whitespace().nth(1).map(str::to_owned)
}
