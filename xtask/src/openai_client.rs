//! `cargo xtask openai-client-test`: the official Python client against the real `genset` binary.
//!
//! This module prepares Python and the binary; what is asserted stands in `python-tests/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use cargo_metadata::Message;

use crate::process::{cargo, output, run as run_command, succeeds};
use crate::repo::Repo;

/// What a Debian machine without Python has to run, and what we run ourselves where we may.
const INSTALL_PYTHON: [&str; 4] = ["install", "--yes", "python3", "python3-venv"];

/// Prepares a virtual environment, builds the binary and runs pytest.
///
/// # Errors
/// When Python cannot be had, the binary does not build or a test fails.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let tests = repo.root().join("python-tests");
    let python = virtual_environment(repo, &tests.join("requirements.txt"))?;
    let genset = build_genset(repo)?;
    let mut pytest = Command::new(python);
    pytest
        .args(["-B", "-m", "pytest", "python-tests"])
        .env("GENSET_BIN", genset)
        .current_dir(repo.root());
    run_command(&mut pytest)
}

/// The Python of `target/venv`, with exactly the pinned requirements installed.
///
/// The copy of the requirements inside is written last: an interrupted installation leaves none and starts again.
fn virtual_environment(repo: &Repo, requirements: &Path) -> anyhow::Result<PathBuf> {
    let venv = repo.target().join("venv");
    let python = venv.join("bin").join("python");
    let installed = venv.join("requirements.txt");
    let wanted = fs::read_to_string(requirements)
        .with_context(|| format!("cannot read {}", requirements.display()))?;
    let is_current = fs::read_to_string(&installed).is_ok_and(|text| text == wanted);
    if is_current && succeeds(Command::new(&python).args(["-c", "import openai, pytest"])) {
        return Ok(python);
    }
    ensure_python()?;
    run_command(
        Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(&venv),
    )?;
    run_command(
        Command::new(&python)
            .args(["-m", "pip", "install", "--quiet", "--requirement"])
            .arg(requirements),
    )?;
    fs::write(&installed, wanted)
        .with_context(|| format!("cannot write {}", installed.display()))?;
    Ok(python)
}

/// Makes sure that `python3` can make virtual environments, through apt-get where that needs no question.
fn ensure_python() -> anyhow::Result<()> {
    if has_python() {
        return Ok(());
    }
    let may_install = succeeds(Command::new("apt-get").arg("--version")) && is_root();
    if !may_install {
        bail!(
            "python3 with venv is missing; run: sudo apt-get {}",
            INSTALL_PYTHON.join(" ")
        );
    }
    run_command(Command::new("apt-get").arg("update"))?;
    run_command(
        Command::new("apt-get")
            .args(INSTALL_PYTHON)
            .env("DEBIAN_FRONTEND", "noninteractive"),
    )?;
    if !has_python() {
        bail!(
            "apt-get installed python3 and python3-venv, and `python3 -c 'import ensurepip, venv'` still fails"
        );
    }
    Ok(())
}

/// Whether there is a `python3` that can make virtual environments; Debian ships `ensurepip` apart.
fn has_python() -> bool {
    succeeds(Command::new("python3").args(["-c", "import ensurepip, venv"]))
}

fn is_root() -> bool {
    output(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0")
}

/// Builds the binary and asks cargo where it put it.
fn build_genset(repo: &Repo) -> anyhow::Result<PathBuf> {
    eprintln!("$ cargo build --package genset");
    let mut command = cargo(repo.root());
    command.args([
        "build",
        "--package",
        "genset",
        "--message-format",
        "json-render-diagnostics",
    ]);
    let messages = output(&mut command)?;
    for message in Message::parse_stream(messages.as_bytes()) {
        if let Message::CompilerArtifact(artifact) = message?
            && artifact.target.name == "genset"
            && let Some(executable) = artifact.executable
        {
            return Ok(executable.into());
        }
    }
    bail!("cargo built package genset and named no executable of that name")
}
