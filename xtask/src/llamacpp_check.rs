//! `cargo xtask llamacpp-check`: a real llama.cpp behind the real `genset` binary. Not part of CI: it is built from source.
//!
//! What is asserted stands in `engines/launcher/tests/llamacpp_check.py`.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use crate::artifacts;
use crate::process::run as run_command;
use crate::python::virtual_environment;
use crate::repo::Repo;

/// Names an interpreter that has `llama_cpp.server` already.
const PYTHON_VARIABLE: &str = "GENSET_LLAMACPP_PYTHON";

/// Prepares an interpreter with `llama_cpp.server`, builds the binary and runs the script.
///
/// # Errors
/// When llama.cpp cannot be had, the binary does not build or an answer is not what it should be.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let tests = tests(repo);
    let python = python_with_llamacpp(repo)?;
    let genset = artifacts::binary(repo, "genset")?;
    let mut check = Command::new(python);
    check
        .arg("-B")
        .arg(tests.join("llamacpp_check.py"))
        .arg(genset)
        .arg(repo.root().join("models/tiny-chat/tiny-chat-q8_0.gguf"));
    run_command(&mut check)
}

/// The interpreter that `GENSET_LLAMACPP_PYTHON` names, or one for which llama.cpp is built from source.
///
/// # Errors
/// When llama.cpp cannot be had.
pub(crate) fn python_with_llamacpp(repo: &Repo) -> anyhow::Result<PathBuf> {
    if let Some(python) = env::var_os(PYTHON_VARIABLE) {
        return Ok(PathBuf::from(python));
    }
    let requirements = tests(repo).join("llamacpp-requirements.txt");
    virtual_environment(repo, "venv-llamacpp", &requirements, "llama_cpp, uvicorn")
}

fn tests(repo: &Repo) -> PathBuf {
    repo.root().join("engines/launcher/tests")
}
