//! `cargo xtask test`: what CI runs, as a table of steps.
//!
//! The steps stand in order of how soon they can fail. The first failure ends the run and says which command shows it
//! again, because a later step rarely says anything new about code that does not build.

use anyhow::anyhow;

use crate::deny::{self, Advisories};
use crate::process::{cargo, run as run_command};
use crate::repo::Repo;
use crate::stopwatch::Stopwatch;
use crate::{
    author_crate, cuda_check, disk_space, openai_client, python_kit, python_package,
    system_packages, wire_client,
};

/// One line of the run: its headline, the command that repeats it alone, and what it does.
struct Step {
    title: &'static str,
    repeat: &'static str,
    perform: fn(&Repo, Advisories) -> anyhow::Result<()>,
}

/// The cargo features that lints, tests and docs are built with: those that are no default because of what they need.
pub(crate) const FEATURES: &str = "genset/etcd,genset/nats,genset/otlp";

/// The runtime's features, each of which must do without the others.
const RUNTIME_FEATURES: [&str; 4] = ["etcd", "nats", "otlp", "tls"];

const STEPS: [Step; 15] = [
    Step {
        title: "format",
        repeat: "cargo fmt --all --check",
        perform: |repo, _| run_command(cargo(repo.root()).args(["fmt", "--all", "--check"])),
    },
    Step {
        title: "programs of the system",
        repeat: "cargo xtask install-programs",
        perform: |_, _| system_packages::ensure_programs(),
    },
    Step {
        title: "lints",
        repeat: "cargo clippy --workspace --all-targets --features genset/etcd,genset/nats,genset/otlp -- -D warnings",
        perform: |repo, _| {
            let arguments = [
                "clippy",
                "--workspace",
                "--all-targets",
                "--features",
                FEATURES,
                "--",
                "-D",
                "warnings",
            ];
            run_command(cargo(repo.root()).args(arguments))
        },
    },
    // Before the Rust tests: those of engines in Python use its virtual environment.
    Step {
        title: "Python package",
        repeat: "cargo xtask python-package-test",
        perform: |repo, _| python_package::run(repo),
    },
    Step {
        title: "tests and doc tests",
        repeat: "cargo test --workspace --features genset/etcd,genset/nats,genset/otlp",
        perform: |repo, _| {
            let arguments = ["test", "--workspace", "--features", FEATURES];
            run_command(cargo(repo.root()).args(arguments))
        },
    },
    Step {
        title: "kernels for GPUs, run on the host",
        repeat: "cargo xtask kernel-test",
        perform: |repo, _| cuda_check::test_kernels(repo),
    },
    Step {
        title: "runtime with no feature",
        repeat: "cargo clippy -p genset-runtime --no-default-features -- -D warnings",
        perform: |repo, _| check_runtime(repo, &[]),
    },
    Step {
        title: "runtime with each of the features alone",
        repeat: "cargo clippy -p genset-runtime --no-default-features --features etcd -- -D warnings",
        perform: |repo, _| {
            RUNTIME_FEATURES
                .into_iter()
                .try_for_each(|feature| check_runtime(repo, &["--features", feature]))
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
        repeat: "RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --features genset/etcd,genset/nats,genset/otlp",
        perform: |repo, _| {
            let mut command = cargo(repo.root());
            run_command(
                command
                    .args(["doc", "--workspace", "--no-deps", "--features", FEATURES])
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
    Step {
        title: "engines in Python",
        repeat: "cargo xtask python-kit-test",
        perform: |repo, _| python_kit::run(repo),
    },
    Step {
        title: "Python client of the wire protocol",
        repeat: "cargo xtask wire-client-test",
        perform: |repo, _| wire_client::run(repo),
    },
];

/// Lints the runtime as somebody gets it who depends on it alone, with some features and not the default ones.
fn check_runtime(repo: &Repo, features: &[&str]) -> anyhow::Result<()> {
    let mut command = cargo(repo.root());
    command.args(["clippy", "-p", "genset-runtime", "--no-default-features"]);
    run_command(command.args(features).args(["--", "-D", "warnings"]))
}

/// Performs every step, or stops at the first that fails.
///
/// # Errors
/// There is no room on the disk; or the failed step's error, with the step's name and the command that repeats it.
pub(crate) fn run(repo: &Repo, advisories: Advisories) -> anyhow::Result<()> {
    let whole = Stopwatch::start();
    disk_space::ensure(repo)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_repeat_a_step_name_its_features() {
        let mut named = 0;
        for step in &STEPS {
            let Some((_, rest)) = step.repeat.split_once("--features ") else {
                continue;
            };
            let features = rest.split(' ').next().unwrap_or_default();
            let is_one = RUNTIME_FEATURES.contains(&features);
            assert!(features == FEATURES || is_one, "{}", step.repeat);
            named += 1;
        }
        assert_eq!(named, 4);
    }
}
