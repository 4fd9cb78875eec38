//! `cargo xtask test openai-client`: the official Python client, and agents, against the real `genset` binary.
//!
//! The assertions are in `python-tests/`: our own tests, the client's test suite, the agents of four frameworks (one in
//! JavaScript), the programs of the guides, and chat templates against `transformers`.

use crate::artifacts;
use crate::node;
use crate::process::run as run_command;
use crate::python::{self, virtual_environment};
use crate::repo::Repo;

/// Prepares a virtual environment and an npm folder, builds the binary and runs pytest.
///
/// # Errors
/// When Python or Node.js cannot be installed, the binary does not build or a test fails.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let requirements = repo.root().join("python-tests/requirements.txt");
    let python = virtual_environment(repo, "venv", &requirements, "openai, pytest, transformers")?;
    let ai_sdk = node::ai_sdk(repo)?;
    let genset = artifacts::binary(repo, "genset")?;
    let mut pytest = python::command(repo, python);
    pytest
        .args(["-m", "pytest", "python-tests"])
        .env("GENSET_BIN", genset)
        .env("AI_SDK_DIR", ai_sdk)
        .env("OPENAI_SUITE_DIR", repo.target().join("openai-suite"))
        .current_dir(repo.root());
    run_command(&mut pytest)
}
