//! The step `tests`: everything that `cargo test --workspace` runs, as jobs that can run side by side.

use std::ffi::OsStr;
use std::path::PathBuf;

use anyhow::Context as _;

use crate::artifacts::{Artifacts, TestProgram};
use crate::process::cargo;
use crate::python;
use crate::repo::Repo;
use crate::side_by_side::{self, Job, Jobs};

/// The package whose engine computes on all cores and waits by spinning: nothing runs beside its tests, or both take many times
/// longer.
const ALONE: &str = "genset-engine-candle";

/// The programs that take longest, from half a minute to a quarter of an hour on two cores. They begin first, so that none is left alone
/// at the end.
const LONGEST: [&str; 15] = [
    "genset-engine-launcher tests/conformance",
    "genset tests/fleet",
    "genset-runtime tests/runtime",
    "genset-frontend tests/http",
    "genset-engine-subprocess tests/process_kill_matrix",
    "genset-conformance tests/kill_matrix",
    "genset-conformance tests/text_kill_matrix",
    "genset-conformance tests/unusual",
    "genset-engine-mocker tests/conformance",
    "genset tests/migration",
    "sample-worker tests/binary",
    "genset-engine-subprocess tests/conformance",
    "genset tests/cli",
    "genset-frontend",
    "genset-devtools bin/train-tiny-chat",
];

/// Builds the tests and says what is to be run.
///
/// # Errors
/// When something does not build.
pub(crate) fn jobs(repo: &Repo) -> anyhow::Result<Jobs> {
    let built = Artifacts::build_all(repo)?;
    let (alone, mut others): (Vec<_>, Vec<_>) = built.tests().partition(is_alone);
    others.sort_by_key(|program| rank(&program.name));
    let mut doc_tests = cargo(repo.root());
    let words = ["test", "--workspace", "--doc"];
    doc_tests.args(words);
    let doc_tests = Job {
        name: "doc tests".to_owned(),
        command: doc_tests,
        repeat: format!("cargo {}", words.join(" ")),
        takes_tests: false,
    };
    let path = python::path_without_shim(repo)?;
    let job = |program| job(program, path.as_deref());
    Ok(Jobs {
        alone: alone.into_iter().map(job).collect(),
        builds: vec![doc_tests],
        others: others.into_iter().map(job).collect(),
    })
}

/// Builds and runs the tests.
///
/// # Errors
/// When something does not build, or a test fails.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let jobs = jobs(repo)?;
    let outcome = side_by_side::run(jobs, side_by_side::lanes()?, &logs(repo)).context("tests")?;
    outcome.warnings().for_each(|line| eprintln!("{line}"));
    Ok(())
}

/// The folder of the logs of what runs side by side.
pub(crate) fn logs(repo: &Repo) -> PathBuf {
    repo.target().join("test-logs")
}

fn job(program: TestProgram, path: Option<&OsStr>) -> Job {
    let TestProgram {
        name,
        repeat,
        mut command,
    } = program;
    if let Some(path) = path {
        command.env("PATH", path);
    }
    Job {
        name,
        command,
        repeat,
        takes_tests: true,
    }
}

fn is_alone(program: &TestProgram) -> bool {
    program.name.split(' ').next() == Some(ALONE)
}

/// The place among [`LONGEST`]; those that are not there come after.
fn rank(name: &str) -> usize {
    let place = LONGEST.iter().position(|long| *long == name);
    place.unwrap_or(LONGEST.len())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn only_the_whole_name_of_the_package_is_alone() {
        let program = |name: &str| TestProgram {
            name: name.to_owned(),
            repeat: String::new(),
            command: Command::new("true"),
        };
        assert!(is_alone(&program("genset-engine-candle")));
        assert!(is_alone(&program("genset-engine-candle tests/conformance")));
        assert!(!is_alone(&program("genset-engine-candle-more")));
    }

    #[test]
    fn the_longest_begin_first_and_others_keep_their_order() {
        let mut names = ["b", "genset tests/fleet", "a", LONGEST[0]];
        names.sort_by_key(|name| rank(name));
        assert_eq!(names, [LONGEST[0], "genset tests/fleet", "b", "a"]);
    }
}
