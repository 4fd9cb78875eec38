//! The artifacts that `cargo test --workspace` builds, by name. Later steps run these programs, so nothing is built twice.
//!
//! Cargo unifies the features of dependencies over the requested packages. A step that requests one package alone would rebuild
//! most dependencies.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use cargo_metadata::{Artifact, Message, Target, TargetKind};

use crate::process::{cargo, output, run as run_command};
use crate::repo::Repo;

/// Set for steps that run beside builds: the artifacts of `cargo test --workspace` exist. Such a step does not call cargo, which
/// would wait for those builds.
pub(crate) const IS_BUILT: &str = "GENSET_XTASK_IS_BUILT";

/// The artifacts of a build.
pub(crate) struct Artifacts(Vec<Artifact>);

/// A program that runs tests.
#[derive(Debug)]
pub(crate) struct TestProgram {
    /// The package and the target, such as `genset-runtime tests/runtime` and `genset bin/genset`; the package alone for the unit
    /// tests of its library.
    pub(crate) name: String,
    /// The command that a person types to run it.
    pub(crate) repeat: String,
    /// Runs it as cargo does: in the package's folder, with the cargo environment variables that tests read.
    pub(crate) command: Command,
}

/// The path of a binary that `cargo test --workspace` builds. Builds it if needed.
///
/// # Errors
/// When it does not build, or no package with tests has such a binary.
pub(crate) fn binary(repo: &Repo, name: &str) -> anyhow::Result<PathBuf> {
    let built = repo.target().join("debug").join(name);
    if env::var_os(IS_BUILT).is_some() && built.is_file() {
        return Ok(built);
    }
    Artifacts::build(repo, &[])?.binary(name)
}

/// The file name of the library that cargo builds from the package `genset-python`, in the folder of its profile.
pub(crate) const NATIVE_MODULE: &str = "libgenset_native.so";

/// The path of the Python package's native module. Builds it if needed.
///
/// # Errors
/// When it does not build.
pub(crate) fn native_module(repo: &Repo) -> anyhow::Result<PathBuf> {
    let built = repo.target().join("debug").join(NATIVE_MODULE);
    if env::var_os(IS_BUILT).is_none() || !built.is_file() {
        build_native_module(repo)?;
    }
    Ok(built)
}

/// Builds the native module, with the dependency features of `cargo test --workspace`. That command leaves it out because it has
/// no tests in Rust.
///
/// # Errors
/// When it does not build.
fn build_native_module(repo: &Repo) -> anyhow::Result<()> {
    // Without targets that have tests, cargo would choose other features of dependencies.
    run_command(cargo(repo.root()).args(["build", "--workspace", "--lib", "--tests"]))
}

impl Artifacts {
    /// Builds everything that later steps run: the artifacts of `cargo test --workspace`, and the native module.
    ///
    /// # Errors
    /// When something does not build.
    pub(crate) fn build_all(repo: &Repo) -> anyhow::Result<Self> {
        let built = Self::build(repo, &[])?;
        build_native_module(repo)?;
        Ok(built)
    }

    /// Builds the artifacts of `cargo test --workspace`, or only those that `selection` selects, such as `--lib`.
    ///
    /// # Errors
    /// When something does not build.
    pub(crate) fn build(repo: &Repo, selection: &[&str]) -> anyhow::Result<Self> {
        let mut command = cargo(repo.root());
        command.args(["test", "--workspace", "--no-run"]);
        command.args(selection);
        eprintln!("$ cargo test --workspace --no-run {}", selection.join(" "));
        Self::of(&mut command)
    }

    /// Runs a cargo command that builds; returns what it built.
    ///
    /// # Errors
    /// When something does not build.
    pub(crate) fn of(command: &mut Command) -> anyhow::Result<Self> {
        let messages = output(command.arg("--message-format=json-render-diagnostics"))?;
        let mut artifacts = Vec::new();
        for message in Message::parse_stream(messages.as_bytes()) {
            if let Message::CompilerArtifact(artifact) = message? {
                artifacts.push(artifact);
            }
        }
        Ok(Self(artifacts))
    }

    /// The binary of this name.
    ///
    /// # Errors
    /// When there is none: cargo builds a package's binary only if the package has tests of its own.
    fn binary(&self, name: &str) -> anyhow::Result<PathBuf> {
        let found = self.0.iter().find(|artifact| {
            let target = &artifact.target;
            target.name == name && target.kind.contains(&TargetKind::Bin) && !artifact.profile.test
        });
        let executable = found.and_then(|artifact| artifact.executable.clone());
        let executable = executable.with_context(|| format!("cargo built no binary {name}"))?;
        Ok(executable.into())
    }

    /// The programs that run the tests of the package in this folder.
    pub(crate) fn tests_of(&self, folder: &Path) -> impl Iterator<Item = TestProgram> {
        let is_of = move |artifact: &&Artifact| folder_of(artifact) == Some(folder);
        self.0.iter().filter(is_of).filter_map(TestProgram::of)
    }

    /// The programs that run the tests of all packages.
    pub(crate) fn tests(&self) -> impl Iterator<Item = TestProgram> {
        self.0.iter().filter_map(TestProgram::of)
    }
}

fn folder_of(artifact: &Artifact) -> Option<&Path> {
    Some(artifact.manifest_path.parent()?.as_std_path())
}

impl TestProgram {
    /// `None` if the artifact runs no tests.
    fn of(artifact: &Artifact) -> Option<Self> {
        let executable = artifact.executable.as_ref()?;
        if !artifact.profile.test {
            return None;
        }
        let folder = folder_of(artifact)?;
        let package = package_name(artifact)?;
        let mut command = Command::new(executable);
        command
            .current_dir(folder)
            .env("CARGO_MANIFEST_DIR", folder)
            .env("CARGO_MANIFEST_PATH", &artifact.manifest_path)
            .env("CARGO_PKG_NAME", package);
        let (target, selection) = target_words(&artifact.target);
        Some(Self {
            name: format!("{package}{target}"),
            repeat: format!("cargo test -p {package} {selection}"),
            command,
        })
    }
}

/// The name of the package: `path+file:///DIR/runtime#genset-runtime@0.1.0`, or `path+file:///DIR/xtask#0.1.0` if the folder has
/// the same name.
fn package_name(artifact: &Artifact) -> Option<&str> {
    let (place, version) = artifact.package_id.repr.rsplit_once('#')?;
    match version.split_once('@') {
        Some((name, _)) => Some(name),
        None => place.rsplit('/').next(),
    }
}

/// The suffix of the package's name, and the cargo flags that select the target.
fn target_words(target: &Target) -> (String, String) {
    let name = &target.name;
    if target.kind.contains(&TargetKind::Test) {
        (format!(" tests/{name}"), format!("--test {name}"))
    } else if target.kind.contains(&TargetKind::Bin) {
        (format!(" bin/{name}"), format!("--bin {name}"))
    } else {
        (String::new(), "--lib".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_program_of_a_package_has_a_name_of_its_own() {
        let name = |kind: &str, target: &str| {
            let target = json!({"kind": [kind], "name": target, "src_path": "source.rs"});
            target_words(&serde_json::from_value(target).unwrap()).0
        };
        assert_eq!(name("lib", "genset_devtools"), "");
        assert_eq!(name("bin", "make-model"), " bin/make-model");
        assert_eq!(name("bin", "train-tiny-chat"), " bin/train-tiny-chat");
        assert_eq!(name("test", "fleet"), " tests/fleet");
    }
}
