//! Programs that come from the registry in one exact version and live under `target/tools`, so that nothing is installed for
//! the whole machine.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::process::{cargo, run as run_command};
use crate::repo::Repo;

/// A program of crates.io.
pub(crate) struct Tool {
    /// Its package, and the program's name.
    pub(crate) name: &'static str,
    /// The one version that is used.
    pub(crate) version: &'static str,
}

/// The path of a program of the right version: the machine's own, ours, or one built now.
///
/// # Errors
/// When it cannot be installed.
pub(crate) fn installed(repo: &Repo, tool: &Tool) -> anyhow::Result<PathBuf> {
    let Tool { name, version } = *tool;
    let tools = repo.target().join("tools");
    let ours = tools.join("bin").join(name);
    for candidate in [PathBuf::from(name), ours.clone()] {
        if version_of(&candidate).as_deref() == Some(version) {
            return Ok(candidate);
        }
    }
    eprintln!(
        "installing {name} {version} into target/tools; once, under two minutes on two cores"
    );
    let mut install = cargo(repo.root());
    install
        // It runs for a second: to optimize it would take longer.
        .args(["install", name, "--quiet", "--locked", "--debug"])
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .args(["--version", version, "--root"])
        .arg(&tools);
    run_command(&mut install)?;
    Ok(ours)
}

/// What `PROGRAM --version` says after its name, or nothing if it does not run.
fn version_of(program: &Path) -> Option<String> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.split_whitespace().nth(1).map(str::to_owned)
}
