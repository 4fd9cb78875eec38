//! `cargo xtask test`: the steps of CI, as a table.
//!
//! Steps are ordered by how soon they can fail. The first failure ends the run and names the command that repeats it, because a
//! later step rarely says anything new about code that does not build. Programs and packages are downloaded while the lints
//! compute. From the tests on, steps run in parallel: tests mostly wait, and the others build meanwhile. A step that fails beside
//! others is retried, alone.

use std::env;
use std::fs;
use std::panic;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context as _, anyhow};

use crate::artifacts::{self, Artifacts};
use crate::deny::{self, Advisories};
use crate::process::{cargo, run as run_command};
use crate::repo::Repo;
use crate::rust_tests;
use crate::side_by_side::{self, Job, Jobs};
use crate::stopwatch::Stopwatch;
use crate::{
    author_crate, browser, disk_space, openai_client, package, python_kit, python_package,
    system_packages, wheel, wire_client,
};

/// A step: its name on the command line, its headline, the command that repeats it alone if that is not `cargo xtask test NAME`,
/// and what it does.
struct Step {
    name: &'static str,
    title: &'static str,
    repeat: Option<&'static str>,
    beside: Beside,
    perform: fn(&Repo, Advisories) -> anyhow::Result<()>,
}

impl Step {
    /// The command that repeats it alone.
    fn repeat(&self) -> String {
        match self.repeat {
            Some(command) => command.to_owned(),
            None => format!("cargo xtask test {}", self.name),
        }
    }
}

/// What may run beside a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// Only downloads: the step comes before the parallel ones.
    Downloads,
    /// The lints and what comes before them: the step downloads more than it computes.
    Lints,
    /// The tests: they are built first, then each of their programs is a job.
    Tests,
    /// Anything except another build.
    OtherBuilds,
    /// Anything. The step runs what the tests built.
    All,
}

/// What is built before the parallel steps start, so that no step asks cargo for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FirstBuild {
    Nothing,
    /// The programs that steps run.
    Programs,
    /// Those programs, and the tests.
    Tests,
}

impl FirstBuild {
    fn of(steps: &[&Step]) -> Self {
        let has = |beside| steps.iter().any(|step| step.beside == beside);
        if has(Beside::Tests) {
            Self::Tests
        } else if has(Beside::All) {
            Self::Programs
        } else {
            Self::Nothing
        }
    }
}

/// The runtime's features. Each must compile without the others.
const RUNTIME_FEATURES: [&str; 5] = ["etcd", "nats", "otlp", "tls", "tokio-console"];

const STEPS: [Step; 17] = [
    Step {
        name: "format",
        title: "format",
        repeat: Some("cargo fmt --all --check"),
        beside: Beside::Downloads,
        perform: |repo, _| run_command(cargo(repo.root()).args(["fmt", "--all", "--check"])),
    },
    Step {
        name: "programs",
        title: "programs of the system",
        repeat: None,
        beside: Beside::Lints,
        perform: |_, _| system_packages::ensure_programs(),
    },
    Step {
        name: "lints",
        title: "lints",
        repeat: Some("cargo clippy --workspace --all-targets -- -D warnings"),
        beside: Beside::Downloads,
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
    // Before the Rust tests: tests of Python engines use its virtual environment.
    Step {
        name: "python-package",
        title: "Python package",
        repeat: None,
        beside: Beside::Lints,
        perform: |repo, _| python_package::run(repo),
    },
    Step {
        name: "tests",
        title: "tests and doc tests",
        repeat: None,
        beside: Beside::Tests,
        perform: |repo, _| rust_tests::run(repo),
    },
    Step {
        name: "runtime-bare",
        title: "runtime with no feature",
        repeat: Some(
            "cargo clippy -p genset-runtime --no-deps --no-default-features -- -D warnings",
        ),
        beside: Beside::OtherBuilds,
        perform: |repo, _| check_runtime(repo, &[]),
    },
    Step {
        name: "runtime-features",
        title: "runtime with each of the features alone",
        repeat: Some(
            "cargo clippy -p genset-runtime --no-deps --no-default-features --features etcd -- -D warnings",
        ),
        beside: Beside::OtherBuilds,
        perform: |repo, _| {
            RUNTIME_FEATURES
                .into_iter()
                .try_for_each(|feature| check_runtime(repo, &["--features", feature]))
        },
    },
    Step {
        name: "author-engine",
        title: "an author's crate, outside the workspace",
        repeat: Some(
            "cargo test --locked --manifest-path examples/author-engine/Cargo.toml --target-dir target/author-engine",
        ),
        beside: Beside::OtherBuilds,
        perform: |repo, _| {
            let target = repo.target().join("author-engine");
            let mut command = cargo(repo.root());
            command.args([
                "test",
                "--locked",
                "--manifest-path",
                "examples/author-engine/Cargo.toml",
            ]);
            // Debug info is not worth its build time: nobody debugs this build.
            command.env("CARGO_PROFILE_DEV_DEBUG", "0");
            run_command(command.arg("--target-dir").arg(target))
        },
    },
    Step {
        name: "docs",
        title: "docs",
        repeat: Some(
            "RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --lib --bins --examples",
        ),
        beside: Beside::OtherBuilds,
        perform: |repo, _| {
            let mut command = cargo(repo.root());
            command.args(["doc", "--workspace", "--no-deps", "--lib", "--bins"]);
            // There are no examples. But with them, cargo chooses the features of dependencies that the lints have. Without, it
            // would check some 60 of these once more.
            command.arg("--examples");
            run_command(command.env("RUSTDOCFLAGS", "-D warnings"))
        },
    },
    Step {
        name: "deny",
        title: "licences, bans and sources",
        repeat: None,
        beside: Beside::OtherBuilds,
        perform: deny::run,
    },
    Step {
        name: "author-crate",
        title: "engine author's packages",
        repeat: Some("cargo xtask author-crate"),
        beside: Beside::OtherBuilds,
        perform: |repo, _| author_crate::check_package_count(repo),
    },
    Step {
        name: "openai-client",
        title: "Python OpenAI client",
        repeat: None,
        beside: Beside::All,
        perform: |repo, _| openai_client::run(repo),
    },
    Step {
        name: "browser",
        title: "web pages in a browser",
        repeat: None,
        beside: Beside::All,
        perform: |repo, _| browser::run(repo),
    },
    Step {
        name: "python-kit",
        title: "engines in Python",
        repeat: None,
        beside: Beside::All,
        perform: |repo, _| python_kit::run(repo),
    },
    Step {
        name: "python-runtime",
        title: "Python wheel: runtime, services and clients",
        repeat: None,
        beside: Beside::All,
        perform: |repo, _| wheel::test(repo),
    },
    Step {
        name: "package",
        title: "Debian package and tarball",
        repeat: None,
        beside: Beside::All,
        perform: |repo, _| package::test(repo),
    },
    Step {
        name: "wire-client",
        title: "Python client of the wire protocol",
        repeat: None,
        beside: Beside::All,
        perform: |repo, _| wire_client::run(repo),
    },
];

/// Lints the runtime as a dependent crate gets it: with some features and without the default ones. Our crates below it have no
/// features, so the lints have seen all of them.
fn check_runtime(repo: &Repo, features: &[&str]) -> anyhow::Result<()> {
    let mut command = cargo(repo.root());
    command.args(["clippy", "-p", "genset-runtime", "--no-deps"]);
    command.arg("--no-default-features");
    run_command(command.args(features).args(["--", "-D", "warnings"]))
}

/// The names of all steps.
pub(crate) fn names() -> Vec<&'static str> {
    STEPS.iter().map(|step| step.name).collect()
}

/// Runs the named steps, or every step if none is named, in CI's order. Stops at the first failure. Shows how long each took.
///
/// # Errors
/// There is too little disk space, or a step failed; that error has the step's name and the command that repeats it.
pub(crate) fn run(repo: &Repo, names: &[String], advisories: Advisories) -> anyhow::Result<()> {
    let whole = Stopwatch::start();
    // The run that started a parallel step has already checked.
    if env::var_os(artifacts::IS_BUILT).is_none() {
        disk_space::ensure(repo)?;
    }
    let is_chosen = |step: &&Step| names.is_empty() || names.iter().any(|name| name == step.name);
    let steps: Vec<&Step> = STEPS.iter().filter(is_chosen).collect();
    let mut times = Vec::new();
    if let [step] = steps.as_slice() {
        // Its output is live.
        times.push(perform(step, "[1/1]", repo, advisories)?);
    } else {
        let (first, beside): (Vec<&Step>, Vec<&Step>) = steps
            .iter()
            .copied()
            .partition(|step| matches!(step.beside, Beside::Downloads | Beside::Lints));
        let program = copy_of_this_program(repo)?;
        times.extend(run_first(&program, repo, &first, advisories)?);
        if !beside.is_empty() {
            times.extend(run_beside(&program, repo, &beside, advisories)?);
        }
    }
    let count = steps.len();
    eprintln!(
        "\n{}\n\nall {count} steps passed in {whole}",
        times.join("\n")
    );
    Ok(())
}

/// A copy of this program, for steps that are processes: building the tests replaces its file.
fn copy_of_this_program(repo: &Repo) -> anyhow::Result<PathBuf> {
    let logs = rust_tests::logs(repo);
    fs::create_dir_all(&logs).with_context(|| format!("cannot create {}", logs.display()))?;
    let program = logs.join("xtask");
    fs::copy(env::current_exe()?, &program).context("cannot copy this program")?;
    Ok(program)
}

/// Runs a step with live output. Returns the line with its time.
fn perform(
    step: &Step,
    index: &str,
    repo: &Repo,
    advisories: Advisories,
) -> anyhow::Result<String> {
    let perform = || {
        (step.perform)(repo, advisories).map_err(|error| {
            let repeat = step.repeat();
            anyhow!("{error:#}\nRepeat it alone with:\n    {repeat}")
        })
    };
    let headline = format!("{index} {}", step.title);
    Ok(timed(&headline, step.name, perform)?.0)
}

/// Runs the steps before the parallel ones, those that download in a second thread. Returns the lines with their times.
fn run_first(
    program: &Path,
    repo: &Repo,
    steps: &[&Step],
    advisories: Advisories,
) -> anyhow::Result<Vec<String>> {
    let (downloads, steps): (Vec<&Step>, Vec<&Step>) =
        steps.iter().partition(|step| step.beside == Beside::Lints);
    if !downloads.is_empty() && !steps.is_empty() {
        // The lints run build scripts, which need it.
        system_packages::ensure_compiler()?;
    }
    let builds = downloads.iter();
    let jobs = Jobs {
        builds: builds
            .map(|step| step_job(program, repo, step, advisories))
            .collect(),
        ..Jobs::default()
    };
    let logs = rust_tests::logs(repo);
    thread::scope(|scope| {
        let downloads = scope.spawn(|| side_by_side::run(jobs, 0, &logs));
        let mut times = Vec::new();
        for (index, step) in steps.iter().enumerate() {
            let index = format!("[{}/{}]", index + 1, steps.len());
            times.push(perform(step, &index, repo, advisories)?);
        }
        let outcome = downloads
            .join()
            .unwrap_or_else(|panic| panic::resume_unwind(panic))?;
        times.extend(outcome.lines());
        Ok(times)
    })
}

/// Runs steps in parallel where they may. Returns the lines with their times.
fn run_beside(
    program: &Path,
    repo: &Repo,
    steps: &[&Step],
    advisories: Advisories,
) -> anyhow::Result<Vec<String>> {
    let mut times = Vec::new();
    let mut jobs = Jobs::default();
    match FirstBuild::of(steps) {
        FirstBuild::Nothing => {}
        FirstBuild::Programs => {
            let build = || Artifacts::build_all(repo);
            let (line, _) = timed("building what the steps run", "building", build)?;
            times.push(line);
        }
        FirstBuild::Tests => {
            let build = || rust_tests::jobs(repo);
            let (line, tests) = timed("building the tests", "tests, building", build)?;
            times.push(line);
            jobs = tests;
        }
    }
    // These wait more than they compute; at the end they would wait alone.
    let mut waiting = Vec::new();
    for step in steps {
        let job = || step_job(program, repo, step, advisories);
        match step.beside {
            Beside::Downloads | Beside::Lints | Beside::Tests => {}
            Beside::OtherBuilds => jobs.builds.push(job()),
            Beside::All => waiting.push(job()),
        }
    }
    jobs.others.splice(0..0, waiting);
    let names: Vec<_> = steps.iter().map(|step| step.name).collect();
    let headline = format!("side by side: {}", names.join(", "));
    let logs = rust_tests::logs(repo);
    let run = || side_by_side::run(jobs, side_by_side::lanes()?, &logs);
    let (line, outcome) = timed(&headline, "side by side:", run)?;
    times.push(line);
    times.extend(outcome.lines());
    Ok(times)
}

/// A step as its own process, so that its output stays together.
fn step_job(program: &Path, repo: &Repo, step: &Step, advisories: Advisories) -> Job {
    let mut command = Command::new(program);
    command
        .current_dir(repo.root())
        .env(artifacts::IS_BUILT, "1");
    command.args(["test", step.name]);
    if advisories == Advisories::Check {
        command.arg("--advisories");
    }
    Job {
        name: step.name.to_owned(),
        command,
        repeat: step.repeat(),
        takes_tests: false,
    }
}

/// Prints the headline, runs, and prints the time. Also returns a line for the table of times.
fn timed<T>(
    headline: &str,
    name: &str,
    perform: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<(String, T)> {
    eprintln!("\n==> {headline}");
    let watch = Stopwatch::start();
    let done = perform().map_err(|error| {
        anyhow!("{headline} failed after {watch}, and the steps after it did not run: {error:#}")
    })?;
    let took = watch.to_string();
    eprintln!("<== {headline}: ok, {took}");
    Ok((format!("{took:>14}  {:>14}  {name}", ""), done))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_repeat_a_step_name_its_features() {
        let mut named = 0;
        for step in &STEPS {
            let repeat = step.repeat();
            let Some((_, rest)) = repeat.split_once("--features ") else {
                continue;
            };
            let features = rest.split(' ').next().unwrap_or_default();
            assert!(RUNTIME_FEATURES.contains(&features), "{repeat}");
            named += 1;
        }
        assert_eq!(named, 1);
    }

    #[test]
    fn what_runs_beside_others_stands_at_the_end() {
        let is_first = |step: &Step| matches!(step.beside, Beside::Downloads | Beside::Lints);
        let first = STEPS.iter().take_while(|step| is_first(step)).count();
        assert!(first > 0);
        assert!(!STEPS[first..].iter().any(is_first));
    }

    #[test]
    fn what_steps_run_is_built_before_them() {
        let first = |names: &[&str]| {
            let steps = STEPS.iter().filter(|step| names.contains(&step.name));
            FirstBuild::of(&steps.collect::<Vec<_>>())
        };
        assert_eq!(first(&["openai-client", "browser"]), FirstBuild::Programs);
        assert_eq!(first(&["docs", "package"]), FirstBuild::Programs);
        assert_eq!(first(&["tests", "package"]), FirstBuild::Tests);
        assert_eq!(first(&["docs", "deny"]), FirstBuild::Nothing);
    }
}
