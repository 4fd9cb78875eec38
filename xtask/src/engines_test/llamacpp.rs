//! What building llama.cpp for `engines/llamacpp` needs: cmake, libclang, and a C++ compiler.

use std::env;
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::process::{output, succeeds};
use crate::python::virtual_environment;
use crate::repo::Repo;

/// Adds cmake and libclang to the environment of `cargo`: the machine's own, or those of a virtual environment under `target/`.
///
/// # Errors
/// When there is no C++ compiler, or the others cannot be installed.
pub(super) fn add_build_tools(repo: &Repo, cargo: &mut Command) -> anyhow::Result<()> {
    let is_there = |program: &str| succeeds(Command::new(program).arg("--version"));
    if !is_there("c++") {
        bail!("llama.cpp needs a C++ compiler; run: sudo apt-get install --yes g++");
    }
    if is_there("cmake") && is_there("clang") {
        return Ok(());
    }
    let requirements = repo.root().join("engines/llamacpp/build-requirements.txt");
    let python = virtual_environment(repo, "venv-llamacpp-build", &requirements, "clang.cindex")?;
    let programs = python.parent().context("a virtual environment has bin")?;
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = [programs.to_owned()].into_iter();
    let path = env::join_paths(folders.chain(env::split_paths(&path)))?;
    let find = "import clang, os; print(os.path.join(os.path.dirname(clang.__file__), 'native'))";
    let libclang = output(Command::new(&python).args(["-c", find]))?;
    // The package has no headers of its own.
    let headers = output(Command::new("c++").arg("-print-file-name=include"))?;
    cargo
        .env("PATH", path)
        .env("LIBCLANG_PATH", libclang.trim())
        .env(
            "BINDGEN_EXTRA_CLANG_ARGS",
            format!("-isystem {}", headers.trim()),
        );
    Ok(())
}
