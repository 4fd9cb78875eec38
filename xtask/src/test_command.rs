//! `cargo xtask test`: what CI runs, as a table of steps.
//!
//! The steps stand in order of how soon they can fail. The first failure ends the run and says which command shows it
//! again, because a later step rarely says anything new about code that does not build.

use anyhow::anyhow;

use crate::deny::{self, Advisories};
use crate::process::{cargo, run as run_command};
use crate::repo::Repo;
use crate::stopwatch::Stopwatch;
use crate::{author_crate, openai_client};

/// One line of the run: its headline, the command that repeats it alone, and what it does.
struct Step {
    title: &'static str,
    repeat: &'static str,
    perform: fn(&Repo, Advisories) -> anyhow::Result<()>,
}

const STEPS: [Step; 9] = [
    Step {
        title: "format",
        repeat: "cargo fmt --all --check",
        perform: |repo, _| run_command(cargo(repo.root()).args(["fmt", "--all", "--check"])),
    },
    Step {
        title: "lints",
        repeat: "cargo clippy --workspace --all-targets -- -D warnings",
        perform: |repo, _| {
            let arguments = [
                "clippy",
                "--workspace",
                "--all-targets",
                "--",
                "-D",
                "warnings",
            ];
            run_command(cargo(repo.root()).args(arguments))
        },
    },
    Step {
        title: "tests and doc tests",
        repeat: "cargo test --workspace",
        perform: |repo, _| run_command(cargo(repo.root()).args(["test", "--workspace"])),
    },
    Step {
        title: "runtime without its command line",
        repeat: "cargo check -p genset-runtime --no-default-features",
        perform: |repo, _| {
            let arguments = ["check", "-p", "genset-runtime", "--no-default-features"];
            run_command(cargo(repo.root()).args(arguments))
        },
    },
    Step {
        title: "an author's crate, outside the workspace",
        repeat: "cargo test --manifest-path examples/author-engine/Cargo.toml --target-dir target/author-engine",
        perform: |repo, _| {
            let target = repo.root().join("target/author-engine");
            let mut command = cargo(repo.root());
            command.args([
                "test",
                "--manifest-path",
                "examples/author-engine/Cargo.toml",
            ]);
            run_command(command.arg("--target-dir").arg(target))
        },
    },
    Step {
        title: "docs",
        repeat: "RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps",
        perform: |repo, _| {
            let mut command = cargo(repo.root());
            run_command(
                command
                    .args(["doc", "--workspace", "--no-deps"])
                    .env("RUSTDOCFLAGS", "-D warnings"),
            )
        },
    },
    Step {
        title: "licences, bans and sources",
        repeat: "cargo xtask deny",
        perform: deny::run,
    },
    Step {
        title: "engine author's packages",
        repeat: "cargo xtask author-crate",
        perform: |repo, _| author_crate::check_package_count(repo),
    },
    Step {
        title: "Python OpenAI client",
        repeat: "cargo xtask openai-client-test",
        perform: |repo, _| openai_client::run(repo),
    },
];

/// Performs every step, or stops at the first that fails.
///
/// # Errors
/// The failed step's error, with the step's name and the command that repeats it.
pub(crate) fn run(repo: &Repo, advisories: Advisories) -> anyhow::Result<()> {
    let whole = Stopwatch::start();
    for (index, step) in STEPS.iter().enumerate() {
        let headline = format!("[{}/{}] {}", index + 1, STEPS.len(), step.title);
        eprintln!("\n==> {headline}");
        let watch = Stopwatch::start();
        (step.perform)(repo, advisories).map_err(|error| {
            let repeat = step.repeat;
            anyhow!(
                "{headline} failed after {watch}: {error:#}\n\
                 The steps after it did not run. Repeat it alone with:\n    {repeat}"
            )
        })?;
        eprintln!("<== {headline}: ok, {watch}");
    }
    eprintln!("\nall {} steps passed in {whole}", STEPS.len());
    Ok(())
}
