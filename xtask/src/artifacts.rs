//! What `cargo test --workspace` builds, by name: the programs that later steps run, so that nothing is built twice.
//!
//! Cargo chooses the features of dependencies by the packages that are asked for. A step that asks for one package alone would
//! build most of them again.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use cargo_metadata::{Artifact, Message, Target, TargetKind};

use crate::process::{cargo, output, run as run_command};
use crate::repo::Repo;

/// Set for steps that run beside builds: what `cargo test --workspace` builds is there, and cargo need not be asked, which would
/// wait for those builds.
pub(crate) const IS_BUILT: &str = "GENSET_XTASK_IS_BUILT";

/// What is built.
pub(crate) struct Artifacts(Vec<Artifact>);

/// A program that runs tests.
#[derive(Debug)]
pub(crate) struct TestProgram {
    /// The package and the target, such as `genset-runtime tests/runtime` and `genset bin/genset`; the package alone for the unit
    /// tests of its library.
    pub(crate) name: String,
    /// What a person types to run it.
    pub(crate) repeat: String,
    /// Runs it as cargo does: in the package's folder, with what tests read of cargo's environment.
    pub(crate) command: Command,
}

/// A binary that `cargo test --workspace` builds, built now unless it has been.
///
/// # Errors
/// When it does not build, or no package with tests has it.
pub(crate) fn binary(repo: &Repo, name: &str) -> anyhow::Result<PathBuf> {
    let built = repo.target().join("debug").join(name);
    if env::var_os(IS_BUILT).is_some() && built.is_file() {
        return Ok(built);
    }
    Artifacts::build(repo, &[])?.binary(name)
}

/// The file that the package `genset-python` is built to, in the folder of its profile.
pub(crate) const NATIVE_MODULE: &str = "libgenset_native.so";

/// The native module of the Python package, built now unless it has been.
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

/// Builds the native module with the features that dependencies have in `cargo test --workspace`, which leaves it out: it has no
/// tests in Rust.
///
/// # Errors
/// When it does not build.
fn build_native_module(repo: &Repo) -> anyhow::Result<()> {
    // Without targets that have tests, features of dependencies would be others.
    run_command(cargo(repo.root()).args(["build", "--workspace", "--lib", "--tests"]))
}

impl Artifacts {
    /// Builds all that later steps run: what `cargo test --workspace` builds, and the native module.
    ///
    /// # Errors
    /// When something does not build.
    pub(crate) fn build_all(repo: &Repo) -> anyhow::Result<Self> {
        let built = Self::build(repo, &[])?;
        build_native_module(repo)?;
        Ok(built)
    }

    /// Builds what `cargo test --workspace` builds, or only what is behind `selection`, such as `--lib`.
    ///
    /// # Errors
    /// When something does not build.
    pub(crate) fn build(repo: &Repo, selection: &[&str]) -> anyhow::Result<Self> {
        let mut command = cargo(repo.root());
        command.args(["test", "--workspace", "--no-run"]);
        command.args(selection);
        eprintln!("$ cargo test --workspace --no-run {}", selection.join(" "));
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
    /// When there is none: a package's binary is built where the package has tests of its own.
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
    /// `None` where the artifact runs no tests.
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

/// The name of the package: `path+file:///DIR/runtime#genset-runtime@0.1.0`, or `path+file:///DIR/xtask#0.1.0` where the folder
/// has the name.
fn package_name(artifact: &Artifact) -> Option<&str> {
    let (place, version) = artifact.package_id.repr.rsplit_once('#')?;
    match version.split_once('@') {
        Some((name, _)) => Some(name),
        None => place.rsplit('/').next(),
    }
}

/// What is added to the package's name, and what selects the target on cargo's command line.
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
