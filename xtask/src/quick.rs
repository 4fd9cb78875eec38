//! `cargo xtask test --quick`: what to run before a commit: the format, and lints and unit tests of the changed crates.
//!
//! Asks cargo for the whole workspace, so that dependencies keep their features, but runs only the tests of the changed crates.
//! This proves less than the full run: a change may break tests of other crates.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use cargo_metadata::MetadataCommand;

use crate::artifacts::Artifacts;
use crate::process::{cargo, output, run as run_command};
use crate::repo::Repo;
use crate::stopwatch::Stopwatch;

/// Checks the format, and lints and tests what changed.
///
/// # Errors
/// When a check fails, or git cannot say what changed.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let watch = Stopwatch::start();
    run_command(cargo(repo.root()).args(["fmt", "--all", "--check"]))?;
    let files = changed_files(repo)?;
    let folders = folders_of(&package_folders(repo)?, &files);
    if folders.is_empty() {
        eprintln!("no crate changed; passed in {watch}");
        return Ok(());
    }
    for folder in &folders {
        eprintln!("changed: {}", folder.display());
    }
    let lints = ["clippy", "--workspace", "--all-targets"];
    run_command(
        cargo(repo.root())
            .args(lints)
            .args(["--", "-D", "warnings"]),
    )?;
    let built = Artifacts::build(repo, &["--lib", "--bins"])?;
    for folder in &folders {
        let folder = repo.root().join(folder);
        for mut program in built.tests_of(&folder) {
            run_command(program.command.arg("--quiet"))?;
        }
    }
    eprintln!("passed in {watch}; `cargo xtask test` proves the rest");
    Ok(())
}

/// The uncommitted files; without any, the files that the last commit changed. Relative to the root.
fn changed_files(repo: &Repo) -> anyhow::Result<Vec<PathBuf>> {
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        output(command.args(arguments).current_dir(repo.root()))
            .context("git cannot say what changed")
    };
    let mut files = git(&["diff", "--name-only", "--relative", "HEAD"])?;
    files += &git(&["ls-files", "--others", "--exclude-standard"])?;
    if files.is_empty() {
        files = git(&["diff", "--name-only", "--relative", "HEAD~1"])?;
    }
    Ok(files.lines().map(PathBuf::from).collect())
}

/// The folders of all crates, relative to the root.
fn package_folders(repo: &Repo) -> anyhow::Result<Vec<PathBuf>> {
    let metadata = MetadataCommand::new().no_deps().exec()?;
    let folders = metadata.packages.iter().filter_map(|package| {
        let folder = package.manifest_path.parent()?;
        Some(folder.strip_prefix(repo.root()).ok()?.into())
    });
    Ok(folders.collect())
}

/// The folders that hold one of the files; all folders if the workspace's manifest or lock file is among the files.
fn folders_of(folders: &[PathBuf], files: &[PathBuf]) -> BTreeSet<PathBuf> {
    let of_all = ["Cargo.toml", "Cargo.lock"].map(Path::new);
    if files.iter().any(|file| of_all.contains(&file.as_path())) {
        return folders.iter().cloned().collect();
    }
    let holds = |folder: &&PathBuf| files.iter().any(|file| file.starts_with(folder));
    folders.iter().filter(holds).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_changed_when_one_of_its_files_did() {
        let folders = ["runtime", "engines/echo", "engines/sample"].map(PathBuf::from);
        let changed = |files: &[&str]| {
            let files: Vec<_> = files.iter().map(PathBuf::from).collect();
            folders_of(&folders, &files).len()
        };
        assert_eq!(changed(&["README.md", "docs/adr/0001-msrv.md"]), 0);
        assert_eq!(
            changed(&["engines/echo/src/lib.rs", "engines/echo/Cargo.toml"]),
            1
        );
        assert_eq!(
            changed(&["runtime/src/lib.rs", "engines/sample/tests/a.rs"]),
            2
        );
        assert_eq!(changed(&["Cargo.lock"]), 3);
    }
}
