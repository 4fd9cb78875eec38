//! `cargo xtask test python-package`: checks the Python package `genset`: its types, its tests and its wheel.
//!
//! Also installs what the Rust tests of `engines/subprocess` need: the interpreter of `target/venv-engine`, with `msgpack`.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;

use crate::process::run as run_command;
use crate::python::{self, virtual_environment};
use crate::repo::Repo;
use crate::wheel::only_file;

/// What an installed wheel must offer, including the marker of its types.
const USE_WHEEL: &str = "
import importlib.resources, genset, genset.backend, genset.exceptions, genset.metrics, genset.testing
assert 'site-packages' in genset.__file__, genset.__file__
assert importlib.resources.files('genset').joinpath('py.typed').is_file()
";

/// Prepares the virtual environment, runs mypy and the tests in it, and builds and tries the wheel.
///
/// # Errors
/// When Python cannot be installed, or a check fails.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let package = repo.root().join("python");
    let requirements = package.join("requirements-dev.txt");
    let python = virtual_environment(repo, "venv-engine", &requirements, "msgpack, mypy, pytest")?;
    let module = |arguments: &[&str]| {
        let mut command = python::command(repo, &python);
        command.arg("-m").args(arguments);
        // Also for the mypy that a test starts, which needs the same modules of the standard library.
        command.env("MYPY_CACHE_DIR", repo.target().join("mypy-cache"));
        run_command(command.current_dir(&package))
    };
    module(&["mypy"])?;
    module(&["pytest", "-q", "-p", "no:cacheprovider"])?;
    try_wheel(repo, &python, &package)
}

/// Builds the wheel, installs it into a clean environment, and uses it there.
fn try_wheel(repo: &Repo, python: &Path, package: &Path) -> anyhow::Result<()> {
    let wheels = repo.target().join("wheels");
    if wheels.exists() {
        fs::remove_dir_all(&wheels)
            .with_context(|| format!("cannot remove {}", wheels.display()))?;
    }
    let mut build = Command::new(python);
    build.args(["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]);
    run_command(build.arg(&wheels).arg(package))?;
    let venv = repo.target().join("venv-wheel");
    run_command(
        Command::new(python)
            .args(["-m", "venv", "--clear"])
            .arg(&venv),
    )?;
    let clean = venv.join("bin").join("python");
    let mut install = Command::new(&clean);
    install.args(["-m", "pip", "install", "--quiet"]);
    run_command(install.arg(only_file(&wheels)?))?;
    // Isolated: neither this folder nor the environment says where the package is.
    run_command(Command::new(&clean).args(["-I", "-c", USE_WHEEL]))
}
