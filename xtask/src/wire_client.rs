//! `cargo xtask test wire-client`: a Python client, written from `docs/wire-protocol.md`, against a real worker.
//!
//! The assertions are in `examples/python-wire-client/`.

use crate::artifacts;
use crate::process::run as run_command;
use crate::python::{self, virtual_environment};
use crate::repo::Repo;

/// Prepares a virtual environment, builds the worker and runs the client's tests.
///
/// # Errors
/// When Python cannot be installed, the worker does not build or a test fails.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let client = repo.root().join("examples/python-wire-client");
    let requirements = client.join("requirements.txt");
    let python = virtual_environment(repo, "venv-wire", &requirements, "msgpack")?;
    let worker = artifacts::binary(repo, "sample-worker")?;
    let mut tests = python::command(repo, python);
    tests
        .args(["-m", "unittest", "-v"])
        .env("SAMPLE_WORKER_BIN", worker)
        .current_dir(client);
    run_command(&mut tests)
}
