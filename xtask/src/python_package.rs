//! `cargo xtask python-package-test`: the Python package `genset`, its types and its tests.
//!
//! Also what the Rust tests of `engines/subprocess` need before them: the interpreter of `target/venv-engine`, with `msgpack`.

use std::process::Command;

use crate::process::run as run_command;
use crate::python::virtual_environment;
use crate::repo::Repo;

/// Prepares the virtual environment, and runs mypy and the tests in it.
///
/// # Errors
/// When Python cannot be had, or a check fails.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let package = repo.root().join("python");
    let requirements = package.join("requirements-dev.txt");
    let python = virtual_environment(repo, "venv-engine", &requirements, "msgpack, mypy, pytest")?;
    let module = |arguments: &[&str]| {
        let mut command = Command::new(&python);
        command.args(["-B", "-m"]).args(arguments);
        run_command(command.current_dir(&package))
    };
    let cache = repo.target().join("mypy-cache");
    module(&["mypy", "--cache-dir", &cache.display().to_string()])?;
    module(&["pytest", "-q", "-p", "no:cacheprovider"])
}
