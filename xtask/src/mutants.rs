//! `cargo xtask mutants`: mutates an engine's code in one place after another, and lists the mutations that no check of the
//! conformance kit detects.
//!
//! The kit is the only test. It tests the scheduler through the mocker, and token selection through an engine in that crate's own
//! tests. `docs/guide/conformance-survivors.md` lists the mutations that survive, and why they may.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::bail;
use clap::builder::PossibleValuesParser;

use crate::process::{cargo, run as run_command};
use crate::repo::Repo;
use crate::tools::{self, Tool};

const CARGO_MUTANTS: Tool = Tool {
    name: "cargo-mutants",
    version: "27.1.0",
    built: None,
};

/// A crate to mutate.
struct Subject {
    name: &'static str,
    /// The package whose `tests/conformance.rs` runs the kit.
    engine: &'static str,
    /// The libtest filters that select the kit's tests; none for all.
    tests: &'static [&'static str],
    /// The time limit of one trial. Only a mutation that hangs reaches it.
    seconds: u32,
}

const SUBJECTS: [Subject; 4] = [
    Subject {
        name: "genset-engine-sample",
        engine: "genset-engine-sample",
        tests: &[],
        seconds: 60,
    },
    Subject {
        name: "genset-engine-echo",
        engine: "genset-engine-echo",
        tests: &["tokens::", "text::"],
        seconds: 60,
    },
    Subject {
        name: "genset-scheduler",
        engine: "genset-engine-mocker",
        tests: &["each_check::", "with_little_memory::"],
        seconds: 100,
    },
    Subject {
        name: "genset-sampling",
        engine: "genset-sampling",
        tests: &[],
        seconds: 100,
    },
];

/// The packages that can be selected.
pub(crate) fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(SUBJECTS.iter().map(|subject| subject.name))
}

/// Runs cargo-mutants on each package, with the arguments `args`.
///
/// # Errors
/// When cargo-mutants cannot be installed, the kit fails the unchanged engine, or mutations survive.
pub(crate) fn run(repo: &Repo, packages: &[String], args: &[OsString]) -> anyhow::Result<()> {
    let program = tools::installed(repo, &CARGO_MUTANTS)?;
    let is_wanted = |subject: &&Subject| {
        packages.is_empty() || packages.iter().any(|name| name == subject.name)
    };
    let is_list = args.iter().any(|arg| arg == "--list");
    let mut seen = Vec::new();
    for subject in SUBJECTS.iter().filter(is_wanted) {
        if !is_list {
            run_command(&mut subject.kit(repo))?;
        }
        if run_command(&mut subject.changes(repo, &program, args)).is_err() {
            seen.push(subject.name);
        }
    }
    if !seen.is_empty() {
        bail!(
            "changes of {} survive, or cargo-mutants failed; {}/PACKAGE/mutants.out says which",
            seen.join(", "),
            folder(repo).display()
        );
    }
    Ok(())
}

fn folder(repo: &Repo) -> PathBuf {
    repo.target().join("mutants")
}

/// Kept between runs, so that only the first run builds unchanged code.
fn build(repo: &Repo) -> PathBuf {
    folder(repo).join("build")
}

impl Subject {
    /// Runs the kit on the unchanged engine; also builds what no mutation touches.
    fn kit(&self, repo: &Repo) -> Command {
        let mut command = cargo(repo.root());
        command
            .args(["test", "--package", self.engine])
            .args(["--test", "conformance", "--"])
            .args(self.tests)
            .env("CARGO_TARGET_DIR", build(repo));
        command
    }

    fn changes(&self, repo: &Repo, program: &Path, args: &[OsString]) -> Command {
        let mut command = Command::new(program);
        command
            .args(["mutants", "--package", self.name, "--no-shuffle"])
            .args(["--test-package", self.engine, "--baseline", "skip"])
            .args(["--timeout", &self.seconds.to_string(), "--output"])
            .arg(folder(repo).join(self.name))
            .args(args)
            .args(["--", "--test", "conformance", "--"])
            .args(self.tests)
            .env("CARGO_TARGET_DIR", build(repo))
            .current_dir(repo.root());
        command
    }
}
