//! `cargo xtask test python-kit`: runs the conformance kit from pytest on two Python engines: the sample engine and one around a
//! real library.
//!
//! The assertions are in `python/conformance_tests/` and `examples/python/`.

use std::path::Path;

use crate::artifacts;
use crate::process::run as run_command;
use crate::python::{self, virtual_environment};
use crate::repo::Repo;

/// Prepares the virtual environments, builds the binary and runs pytest.
///
/// # Errors
/// When Python cannot be installed, the binary does not build or a test fails.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let package = repo.root().join("python");
    let example = repo.root().join("examples/python/ctranslate2-engine");
    let genset = artifacts::binary(repo, "genset")?;
    let pytest = |python: &Path, folder: &Path| {
        let mut pytest = python::command(repo, python);
        pytest
            .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "."])
            .env("GENSET_BIN", &genset)
            .env("PYTHONPATH", package.join("src"))
            .current_dir(folder);
        run_command(&mut pytest)
    };
    let requirements = package.join("requirements-dev.txt");
    let python = virtual_environment(repo, "venv-engine", &requirements, "msgpack, mypy, pytest")?;
    pytest(&python, &package.join("conformance_tests"))?;
    let requirements = example.join("requirements.txt");
    let imports = "ctranslate2, msgpack, pytest";
    let python = virtual_environment(repo, "venv-ctranslate2", &requirements, imports)?;
    pytest(&python, &example)
}
