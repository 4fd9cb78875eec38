//! `cargo xtask openai-client-test`: the official Python client against the real `genset` binary.
//!
//! What is asserted stands in `python-tests/`: our own tests, the client's test suite, and chat templates against
//! `transformers`.

use std::process::Command;

use crate::artifacts;
use crate::process::run as run_command;
use crate::python::virtual_environment;
use crate::repo::Repo;

/// Prepares a virtual environment, builds the binary and runs pytest.
///
/// # Errors
/// When Python cannot be had, the binary does not build or a test fails.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let requirements = repo.root().join("python-tests/requirements.txt");
    let python = virtual_environment(repo, "venv", &requirements, "openai, pytest, transformers")?;
    let genset = artifacts::binary(repo, "genset")?;
    let mut pytest = Command::new(python);
    pytest
        .args(["-B", "-m", "pytest", "python-tests"])
        .env("GENSET_BIN", genset)
        .env("OPENAI_SUITE_DIR", repo.target().join("openai-suite"))
        .current_dir(repo.root());
    run_command(&mut pytest)
}
