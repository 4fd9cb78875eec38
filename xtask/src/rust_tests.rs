//! The step `tests`: everything that `cargo test --workspace` runs, as jobs that can run side by side.

use std::ffi::OsStr;
use std::path::PathBuf;

use anyhow::Context as _;

use crate::artifacts::{Artifacts, TestProgram};
use crate::process::cargo;
use crate::python;
use crate::repo::Repo;
use crate::side_by_side::{self, Job, Jobs};

/// The package whose engine uses all cores and busy-waits. Nothing runs beside its tests; otherwise both take many times longer.
const ALONE: &str = "genset-engine-candle";

/// The programs that take longest, from half a minute to a quarter of an hour on two cores. They start first, so that none runs
/// alone at the end.
const LONGEST: [&str; 15] = [
    "genset-engine-launcher tests/conformance",
    "genset tests/fleet",
    "genset-runtime tests/runtime",
    "genset-frontend tests/http",
    "genset-engine-subprocess tests/process_kill_matrix",
    "genset-conformance tests/kill_matrix",
    "genset-conformance tests/text_kill_matrix",
    "genset-engine-mocker tests/conformance",
    "genset tests/migration",
    "sample-worker tests/binary",
    "genset-engine-subprocess tests/conformance",
    "genset-engine-launcher tests/engine",
    "genset tests/cli",
    "genset-frontend",
    "genset-devtools bin/train-tiny-chat",
];

/// A program, and the name prefix of its tests that wait in real time: four minutes for a few seconds of computing. They get
/// their own process: the program's checks that count process-wide state wait for each other.
const IN_REAL_TIME: (&str, &str) = ("genset-conformance tests/unusual", "real_time::");

/// Builds the tests and returns the jobs to run.
///
/// # Errors
/// When something does not build.
pub(crate) fn jobs(repo: &Repo) -> anyhow::Result<Jobs> {
    let built = Artifacts::build_all(repo)?;
    let (alone, mut others): (Vec<_>, Vec<_>) = built.tests().partition(is_alone);
    others.sort_by_key(|program| rank(&program.name));
    others.iter_mut().for_each(skip_real_time);
    let waiting = built.tests().filter_map(in_real_time);
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
        waiting: waiting.map(job).collect(),
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

/// The folder for the logs of parallel jobs.
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

/// Skips the tests that [`in_real_time`] runs.
fn skip_real_time(program: &mut TestProgram) {
    let (name, tests) = IN_REAL_TIME;
    if program.name == name {
        program.command.args(["--skip", tests]);
    }
}

/// The program with only its real-time tests, all at once; `None` if it has none.
fn in_real_time(mut program: TestProgram) -> Option<TestProgram> {
    let (name, tests) = IN_REAL_TIME;
    if program.name != name {
        return None;
    }
    program.name = format!("{name} {tests}");
    program.repeat = format!("{} {tests}", program.repeat);
    // A flag could not be given a second time when they run again.
    program.command.arg(tests).env("RUST_TEST_THREADS", "8");
    Some(program)
}

fn is_alone(program: &TestProgram) -> bool {
    program.name.split(' ').next() == Some(ALONE)
}

/// The index in [`LONGEST`]; other programs come after.
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
    fn tests_in_real_time_are_a_program_of_their_own() {
        let program = |name: &str| TestProgram {
            name: name.to_owned(),
            repeat: "cargo test".to_owned(),
            command: Command::new("true"),
        };
        let arguments = |program: &TestProgram| -> Vec<_> {
            let words = program.command.get_args();
            words.map(OsStr::to_owned).collect()
        };
        let (name, tests) = IN_REAL_TIME;
        let mut rest = program(name);
        skip_real_time(&mut rest);
        assert_eq!(arguments(&rest), ["--skip", tests]);
        let own = in_real_time(program(name)).unwrap();
        assert_eq!(arguments(&own), [tests]);
        assert_eq!(own.repeat, format!("cargo test {tests}"));
        assert_ne!(own.name, rest.name);
        let mut other = program("b");
        skip_real_time(&mut other);
        assert!(arguments(&other).is_empty() && in_real_time(other).is_none());
    }

    #[test]
    fn the_longest_begin_first_and_others_keep_their_order() {
        let mut names = ["b", "genset tests/fleet", "a", LONGEST[0]];
        names.sort_by_key(|name| rank(name));
        assert_eq!(names, [LONGEST[0], "genset tests/fleet", "b", "a"]);
    }
}
