//! What the Python steps need: a virtual environment with pinned requirements.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::process::{output, run as run_command, succeeds};
use crate::repo::Repo;
use crate::system_packages::install;

/// The Python of `target/NAME`, with exactly the pinned requirements installed, including the modules `imports`.
///
/// Writes the copy of the requirements last: an interrupted installation has no copy and starts again.
///
/// # Errors
/// When Python or a requirement cannot be installed.
pub(crate) fn virtual_environment(
    repo: &Repo,
    name: &str,
    requirements: &Path,
    imports: &str,
) -> anyhow::Result<PathBuf> {
    virtual_environment_built_with(repo, name, requirements, imports, &[])
}

/// As [`virtual_environment`], but builds packages with `variables` in the environment.
///
/// # Errors
/// Those of [`virtual_environment`].
pub(crate) fn virtual_environment_built_with(
    repo: &Repo,
    name: &str,
    requirements: &Path,
    imports: &str,
    variables: &[(&str, &str)],
) -> anyhow::Result<PathBuf> {
    let venv = repo.target().join(name);
    let python = venv.join("bin").join("python");
    let installed = venv.join("requirements.txt");
    let wanted = fs::read_to_string(requirements)
        .with_context(|| format!("cannot read {}", requirements.display()))?;
    let is_current = fs::read_to_string(&installed).is_ok_and(|text| text == wanted);
    let check = format!("import {imports}");
    if is_current && succeeds(command(repo, &python).args(["-c", &check])) {
        return Ok(python);
    }
    ensure_python()?;
    run_command(
        Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(&venv),
    )?;
    run_command(
        Command::new(&python)
            .args(["-m", "pip", "install", "--quiet"])
            // Most modules are never imported; Python compiles the others at their first import.
            .args(["--no-compile", "--requirement"])
            .arg(requirements)
            .envs(variables.iter().copied()),
    )?;
    fs::write(&installed, wanted)
        .with_context(|| format!("cannot write {}", installed.display()))?;
    Ok(python)
}

/// A command that runs Python. What it and its children compile is kept in [`compiled`], even if the environment says to keep
/// nothing: tests start engines by the hundred, and each start would compile again what it imports.
pub(crate) fn command(repo: &Repo, python: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(python);
    keep_compiled(&mut command, &compiled(repo));
    command
}

/// The folder for what Python compiles, so that none of it is beside the sources.
pub(crate) fn compiled(repo: &Repo) -> PathBuf {
    repo.target().join("pycache")
}

fn keep_compiled(command: &mut Command, folder: &Path) {
    command
        .env("PYTHONPYCACHEPREFIX", folder)
        .env_remove("PYTHONDONTWRITEBYTECODE");
}

/// Ensures that `python3` can make virtual environments, through apt-get if that needs no interaction.
///
/// # Errors
/// When it cannot and the packages cannot be installed.
pub(crate) fn ensure_python() -> anyhow::Result<()> {
    if has_python() {
        return Ok(());
    }
    install(&["python3", "python3-venv"]).context("python3 with venv is missing")?;
    if !has_python() {
        bail!(
            "apt-get installed python3 and python3-venv, and `python3 -c 'import ensurepip, venv'` still fails"
        );
    }
    Ok(())
}

/// Whether `python3` exists and can make virtual environments; Debian packages `ensurepip` separately.
fn has_python() -> bool {
    succeeds(Command::new("python3").args(["-c", "import ensurepip, venv"]))
}

/// The `PATH` with which a test that starts `python3` gets the interpreter directly; `None` if the machine's `PATH` does that.
///
/// With pyenv and similar tools, `python3` is a script that first looks for the interpreter. That is half the time of a short
/// program, and tests start `python3` about a hundred times.
///
/// # Errors
/// When its folder cannot be made.
pub(crate) fn path_without_shim(repo: &Repo) -> anyhow::Result<Option<OsString>> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut found = env::split_paths(&path).map(|folder| folder.join("python3"));
    let is_script = |program: PathBuf| {
        let mut begin = [0; 2];
        let file = fs::File::open(program);
        file.and_then(|mut it| it.read_exact(&mut begin)).is_ok() && begin == *b"#!"
    };
    if !found.find(|it| it.is_file()).is_some_and(is_script) {
        return Ok(None);
    }
    let own = output(Command::new("python3").args(["-c", "import sys; print(sys.executable)"]))?;
    let folder = repo.target().join("tools/python");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let link = folder.join("python3");
    let _absent = fs::remove_file(&link);
    symlink(own.trim(), &link).with_context(|| format!("cannot create {}", link.display()))?;
    let folders = std::iter::once(folder).chain(env::split_paths(&path));
    let path = env::join_paths(folders).context("the checkout's path has a colon in it")?;
    Ok(Some(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_python_compiles_is_kept_in_a_folder_of_its_own() {
        let mut command = Command::new("python3");
        keep_compiled(&mut command, Path::new("/t/pycache"));
        let set: Vec<_> = command.get_envs().collect();
        let expected = [
            (OsStr::new("PYTHONDONTWRITEBYTECODE"), None),
            (
                OsStr::new("PYTHONPYCACHEPREFIX"),
                Some(OsStr::new("/t/pycache")),
            ),
        ];
        assert_eq!(set, expected);
    }
}
