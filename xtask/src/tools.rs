//! Programs from the registry in one exact version, under `target/tools`: nothing is installed for the whole machine.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::process::{cargo, run as run_command};
use crate::repo::Repo;

/// A program on crates.io.
pub(crate) struct Tool {
    /// The name of its package and of the program.
    pub(crate) name: &'static str,
    /// The only version in use.
    pub(crate) version: &'static str,
}

/// The path of a program in the right version: the machine's, ours, or one built now.
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
        // It runs for a second: optimizing it would take longer.
        .args(["install", name, "--quiet", "--locked", "--debug"])
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .args(["--version", version, "--root"])
        .arg(&tools);
    run_command(&mut install)?;
    Ok(ours)
}

/// The version that `PROGRAM --version` prints; `None` if it does not run.
fn version_of(program: &Path) -> Option<String> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.split_whitespace().nth(1).map(str::to_owned)
}
