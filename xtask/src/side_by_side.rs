//! Runs programs in parallel: tests mostly wait, and while one waits another computes.
//!
//! Each program writes to its own log, which is shown if the program fails. There are three queues. Builds run one after another,
//! since cargo allows one build per folder. So do programs that only wait. The others run beside them on several lanes.
//!
//! A program that fails beside others runs once more, alone, when the others are done. If it names its failed tests, only those
//! run, one at a time; otherwise the whole program. If it fails again, the run fails. If it passes, one of its tests does not
//! tolerate load: the run says so at its end, keeps the log, and continues.
//!
//! A program that does not end within [`LIMIT`] is killed, with everything that it began, and has failed: tests of Rust have no
//! time limit of their own.

use std::collections::VecDeque;
use std::fmt::{self, Display, Formatter};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};

use crate::process::{Ended, wait_within};
use crate::stopwatch::{Stopwatch, shown};

/// A program to run.
#[derive(Debug)]
pub(crate) struct Job {
    /// Its name in the output. Its log has the same name, with other characters in place of spaces and slashes.
    pub(crate) name: String,
    pub(crate) command: Command,
    /// The command that a person types to run it alone.
    pub(crate) repeat: String,
    /// Whether it takes names of tests and names those that failed, as programs of Rust's test harness do.
    pub(crate) takes_tests: bool,
}

/// The jobs of a run.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    /// Run one after another, before all others, with nothing beside them.
    pub(crate) alone: Vec<Job>,
    /// Run one after another, beside the others.
    pub(crate) builds: Vec<Job>,
    /// Run one after another, beside the others: they compute next to nothing, so they need no lane.
    pub(crate) waiting: Vec<Job>,
    /// Started in this order, several at a time.
    pub(crate) others: Vec<Job>,
}

/// A program that succeeded, how long it took, and how long it computed on all cores together.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) name: String,
    pub(crate) took: String,
    pub(crate) computed: Duration,
}

impl Display for Done {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            took,
            computed,
        } = self;
        let computed = shown(*computed);
        write!(f, "{took:>14}  {computed:>14}  {name}")
    }
}

/// The outcome of a run.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// In order of completion.
    pub(crate) done: Vec<Done>,
    /// Those of `done` that failed beside others before they passed alone.
    pub(crate) flaky: Vec<Flaky>,
}

impl Outcome {
    /// A line for each program with its times, then the warnings.
    pub(crate) fn lines(&self) -> impl Iterator<Item = String> + '_ {
        let times = self.done.iter().map(Done::to_string);
        times.chain(self.warnings())
    }

    /// A warning for each flaky program.
    pub(crate) fn warnings(&self) -> impl Iterator<Item = String> + '_ {
        self.flaky.iter().map(|Flaky { name, log }| {
            let log = log.display();
            format!("FLAKY: {name} failed beside others and passed alone. Mend it: {log} has the failure")
        })
    }
}

/// A program that failed beside others and passed alone.
#[derive(Debug)]
pub(crate) struct Flaky {
    pub(crate) name: String,
    /// The log of the failure.
    pub(crate) log: PathBuf,
}

/// How many programs may fail beside others before the run gives up: more failures have a lasting cause.
const MOST_FAILURES: usize = 3;

/// How long a program may run: four times as long as the longest takes on two cores, beside others.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// Runs all jobs, `lanes` of the others at a time, with their logs in the folder `logs`. Retries a job that failed beside others
/// at the end, alone. After a failure alone, or more than [`MOST_FAILURES`], starts no more jobs and waits for those that run.
///
/// # Errors
/// A job cannot be started, or does not exit with 0 within [`LIMIT`] when it runs alone. The error names the job, the command that
/// repeats it, and its log, which is also written to stderr. Also if not all tests of a retry were run.
pub(crate) fn run(jobs: Jobs, lanes: usize, logs: &Path) -> anyhow::Result<Outcome> {
    fs::create_dir_all(logs).with_context(|| format!("cannot create {}", logs.display()))?;
    let mut outcome = Outcome::default();
    for mut job in jobs.alone {
        outcome.done.push(perform(&mut job, logs, "log")?);
    }
    let state = State::default();
    let builds = Mutex::new(VecDeque::from(jobs.builds));
    let waiting = Mutex::new(VecDeque::from(jobs.waiting));
    let others = Mutex::new(VecDeque::from(jobs.others));
    thread::scope(|scope| {
        scope.spawn(|| state.work(&[&builds, &others], logs));
        scope.spawn(|| state.work(&[&waiting], logs));
        for _ in 0..lanes {
            scope.spawn(|| state.work(&[&others], logs));
        }
    });
    let State { done, failed } = state;
    outcome
        .done
        .extend(done.into_inner().unwrap_or_else(PoisonError::into_inner));
    let mut failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    if failed.len() > MOST_FAILURES {
        let (_, first) = failed.swap_remove(0);
        return Err(first);
    }
    for (mut job, _) in failed {
        let log = log_of(&job, logs, "beside.log");
        let tests = failed_tests(&fs::read_to_string(&log).unwrap_or_default());
        let is_named = job.takes_tests && !tests.is_empty();
        if is_named {
            job.command.args(["--test-threads=1", "--exact"]);
            job.command.args(&tests);
            eprintln!("once more, alone: {} of {}", tests.join(", "), job.name);
        } else {
            eprintln!("once more, alone: {}", job.name);
        }
        outcome.done.push(perform(&mut job, logs, "log")?);
        if is_named {
            all_passed(&job, logs, tests.len())?;
        }
        let name = job.name;
        outcome.flaky.push(Flaky { name, log });
    }
    Ok(outcome)
}

#[derive(Debug, Default)]
struct State {
    done: Mutex<Vec<Done>>,
    failed: Mutex<Vec<(Job, anyhow::Error)>>,
}

impl State {
    /// Runs jobs until the queues are empty or too many failed. Takes from a queue only if those before it are empty.
    fn work(&self, queues: &[&Mutex<VecDeque<Job>>], logs: &Path) {
        while lock(&self.failed).len() <= MOST_FAILURES {
            let Some(mut job) = queues.iter().find_map(|queue| lock(queue).pop_front()) else {
                return;
            };
            match perform(&mut job, logs, "beside.log") {
                Ok(done) => lock(&self.done).push(done),
                Err(error) => lock(&self.failed).push((job, error)),
            }
        }
    }
}

/// A panic of another thread ends the run; the data under the lock is complete.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a job, with a log of this extension.
fn perform(job: &mut Job, logs: &Path, ending: &str) -> anyhow::Result<Done> {
    let log = log_of(job, logs, ending);
    let file = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
    let watch = Stopwatch::start();
    job.command
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file);
    let name = job.name.clone();
    let ended = job.command.spawn();
    let ended = ended.and_then(|mut program| wait_within(&mut program, LIMIT));
    let Ended { status, computed } = ended.with_context(|| format!("cannot run {name}"))?;
    let took = watch.to_string();
    if status.is_some_and(|status| status.success()) {
        let done = Done {
            name,
            took,
            computed,
        };
        eprintln!("{done}");
        return Ok(done);
    }
    let written = fs::read(&log).unwrap_or_default();
    let written = String::from_utf8_lossy(&written);
    eprintln!("==> what {name} wrote:\n{written}\n<== {name} failed");
    let how = match status {
        Some(status) => status.to_string(),
        None => killed(&unfinished_tests(&written)),
    };
    let repeat = &job.repeat;
    let log = log.display();
    bail!(
        "{name} failed after {took} ({how}); its log is {log}. Repeat it alone with:\n    {repeat}"
    )
}

/// How a program ended that took too long, with the tests that were running.
fn killed(tests: &[String]) -> String {
    match tests {
        [] => "it did not end, and was killed".to_owned(),
        tests => format!("it was killed; what did not end: {}", tests.join(", ")),
    }
}

/// The tests without a result in a log, as far as Rust's test harness names them: those that take longer than a minute, and the
/// one that runs alone.
fn unfinished_tests(log: &str) -> Vec<String> {
    let long = log.lines().filter_map(|line| {
        let (name, _) = (line.strip_prefix("test ")?).split_once(" has been running for over ")?;
        Some(name)
    });
    let has_result = |name: &str| log.contains(&format!("test {name} ... "));
    let long = long.filter(|name| !has_result(name));
    let alone = log.lines().last().and_then(|line| {
        let name = line.strip_prefix("test ")?.strip_suffix(" ... ")?;
        Some(name)
    });
    long.chain(alone).map(str::to_owned).collect()
}

/// The tests in the last list of failures of a log, as Rust's test harness writes it.
fn failed_tests(log: &str) -> Vec<String> {
    let Some((_, list)) = log.rsplit_once("\nfailures:\n") else {
        return Vec::new();
    };
    let names = list.lines().map_while(|line| line.strip_prefix("    "));
    names.map(str::to_owned).collect()
}

/// Fails unless as many tests passed as were named: a program also passes if it has no test of a name.
fn all_passed(job: &Job, logs: &Path, named: usize) -> anyhow::Result<()> {
    let log = log_of(job, logs, "log");
    let written = fs::read(&log).unwrap_or_default();
    let passed = passed_tests(&String::from_utf8_lossy(&written));
    ensure!(
        passed == Some(named),
        "{} did not pass the {named} tests that were to run once more, alone; its log is {}. Repeat it alone with:\n    {}",
        job.name,
        log.display(),
        job.repeat
    );
    Ok(())
}

/// The number of tests that passed, by the last such line of a log, as Rust's test harness writes it.
fn passed_tests(log: &str) -> Option<usize> {
    let (_, count) = log.rsplit_once("test result: ok. ")?;
    count.split(' ').next()?.parse().ok()
}

fn log_of(job: &Job, logs: &Path, ending: &str) -> PathBuf {
    let sign = |sign: char| {
        if sign.is_ascii_alphanumeric() {
            sign
        } else {
            '-'
        }
    };
    let name: String = job.name.chars().map(sign).collect();
    logs.join(format!("{name}.{ending}"))
}

/// How many programs run at a time: one more than there are cores, because tests mostly wait.
///
/// # Errors
/// The system does not say how many cores there are.
pub(crate) fn lanes() -> anyhow::Result<usize> {
    let cores = thread::available_parallelism();
    let cores = cores.map_err(|error| anyhow!("cannot tell the number of cores: {error}"))?;
    Ok(cores.get() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str, script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Job {
            name: name.to_owned(),
            command,
            repeat: format!("again {name}"),
            takes_tests: false,
        }
    }

    fn names(done: &[Done]) -> Vec<&str> {
        done.iter().map(|done| done.name.as_str()).collect()
    }

    #[test]
    fn others_run_beside_each_other_and_beside_what_builds() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = |name: &str| folder.path().join(name).display().to_string();
        // Each end of a named pipe waits for the other: only programs that run in parallel finish.
        let (first, second) = (pipe("first"), pipe("second"));
        let made = Command::new("sh")
            .args(["-c", &format!("mkfifo {first} {second}")])
            .status();
        assert!(made.unwrap().success());
        let jobs = Jobs {
            alone: vec![job("alone", "true")],
            builds: vec![job("build", &format!("echo a > {first}"))],
            others: vec![
                job("one", &format!("read a < {first}; echo b > {second}")),
                job("two", &format!("read b < {second}")),
            ],
            ..Jobs::default()
        };
        let done = run(jobs, 2, folder.path()).unwrap().done;
        assert_eq!(names(&done)[0], "alone");
        assert_eq!(done.len(), 4);
    }

    #[test]
    fn what_only_waits_takes_no_lane() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe").display().to_string();
        assert!(
            Command::new("mkfifo")
                .arg(&pipe)
                .status()
                .unwrap()
                .success()
        );
        let jobs = Jobs {
            builds: vec![job("build", &format!("echo a > {pipe}"))],
            waiting: vec![job("waits", &format!("read a < {pipe}"))],
            ..Jobs::default()
        };
        let outcome = run(jobs, 0, folder.path()).unwrap();
        assert_eq!(outcome.done.len(), 2);
        assert_eq!(outcome.warnings().count(), 0);
    }

    #[test]
    fn builds_run_one_after_another() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark");
        // mkdir fails if the folder exists.
        let build = |name| job(name, &format!("mkdir {0} && rmdir {0}", mark.display()));
        let jobs = Jobs {
            builds: ["a", "b", "c"].map(build).into(),
            ..Jobs::default()
        };
        let outcome = run(jobs, 3, folder.path()).unwrap();
        assert_eq!(names(&outcome.done), ["a", "b", "c"]);
        assert_eq!(outcome.warnings().count(), 0);
    }

    #[test]
    fn a_failure_is_named_with_its_log_and_ends_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let never = folder.path().join("never");
        let jobs = Jobs {
            alone: vec![
                job("some tests/bad", "echo out; echo err >&2; exit 3"),
                job("next", &format!("touch {}", never.display())),
            ],
            others: vec![job("other", &format!("touch {}", never.display()))],
            ..Jobs::default()
        };
        let error = run(jobs, 1, folder.path()).unwrap_err().to_string();
        assert!(error.starts_with("some tests/bad failed after"), "{error}");
        assert!(error.ends_with("    again some tests/bad"), "{error}");
        let log = fs::read_to_string(folder.path().join("some-tests-bad.log")).unwrap();
        assert_eq!(log, "out\nerr\n");
        assert!(!never.exists());
    }

    #[test]
    fn what_fails_beside_others_and_alone_fails_the_run_when_the_others_are_done() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark");
        let jobs = Jobs {
            others: vec![
                job(
                    "bad",
                    "echo a >> $0.runs; exit 3"
                        .replace("$0", &mark.display().to_string())
                        .as_str(),
                ),
                job("other", &format!("touch {}", mark.display())),
            ],
            ..Jobs::default()
        };
        let error = run(jobs, 1, folder.path()).unwrap_err().to_string();
        assert!(error.starts_with("bad failed after"), "{error}");
        assert!(mark.exists());
        let runs = fs::read_to_string(folder.path().join("mark.runs")).unwrap();
        assert_eq!(runs, "a\na\n");
    }

    #[test]
    fn what_passes_alone_is_told_as_flaky_with_the_log_of_its_failure() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark");
        // Only the first of two runs finds no mark.
        let script = format!(
            "test -e {0} || {{ touch {0}; echo why; exit 1; }}",
            mark.display()
        );
        let jobs = Jobs {
            others: vec![job("flaky", &script), job("other", "true")],
            ..Jobs::default()
        };
        let outcome = run(jobs, 1, folder.path()).unwrap();
        assert_eq!(outcome.done.len(), 2);
        let warnings: Vec<_> = outcome.warnings().collect();
        assert!(
            warnings[0].starts_with("FLAKY: flaky failed beside others"),
            "{warnings:?}"
        );
        assert_eq!(fs::read_to_string(&outcome.flaky[0].log).unwrap(), "why\n");
    }

    #[test]
    fn of_a_test_program_only_the_tests_that_failed_run_once_more() {
        let folder = tempfile::tempdir().unwrap();
        let runs = folder.path().join("runs");
        // Without names of tests, two fail; the second run prints its arguments.
        let list = "failures:\n\n---- a::b stdout ----\n    no name\n\nfailures:\n    a::b\n    c\n\ntest result: FAILED.";
        let passed = "test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 7 filtered out";
        let script = format!(
            "test $# -gt 0 || {{ printf '%s\n' '{list}'; exit 101; }}; echo \"$@\" > {}; echo '{passed}'",
            runs.display()
        );
        let mut program = job("program", &script);
        program.command.arg("$0");
        program.takes_tests = true;
        let jobs = Jobs {
            others: vec![program],
            ..Jobs::default()
        };
        let outcome = run(jobs, 1, folder.path()).unwrap();
        assert_eq!(outcome.warnings().count(), 1);
        assert_eq!(
            fs::read_to_string(&runs).unwrap(),
            "--test-threads=1 --exact a::b c\n"
        );
    }

    #[test]
    fn tests_that_do_not_run_once_more_fail_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let mut program = job(
            "program",
            "test $# -gt 0 || { printf 'failures:\n\nfailures:\n    a::b\n'; exit 101; }; \
             echo 'test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out'",
        );
        program.command.arg("$0");
        program.takes_tests = true;
        let jobs = Jobs {
            others: vec![program],
            ..Jobs::default()
        };
        let error = run(jobs, 1, folder.path()).unwrap_err().to_string();
        assert!(
            error.starts_with("program did not pass the 1 tests"),
            "{error}"
        );
    }

    #[test]
    fn tests_without_a_result_are_those_that_did_not_end() {
        let beside = "running 3 tests\ntest a::ends ... ok\ntest a::b has been running for over 60 seconds\n\
                      test c has been running for over 60 seconds\ntest c ... FAILED\n";
        assert_eq!(unfinished_tests(beside), ["a::b"]);
        let alone = "running 2 tests\ntest a ... ok\ntest b ... ";
        assert_eq!(unfinished_tests(alone), ["b"]);
        assert_eq!(
            killed(&unfinished_tests(alone)),
            "it was killed; what did not end: b"
        );
        assert_eq!(unfinished_tests("test a ... ok\n"), [""; 0]);
    }

    #[test]
    fn many_failures_end_the_run_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let never = folder.path().join("never");
        let mut others: Vec<_> = (0..=MOST_FAILURES)
            .map(|index| job(&format!("bad {index}"), "exit 1"))
            .collect();
        others.push(job("next", &format!("touch {}", never.display())));
        let jobs = Jobs {
            others,
            ..Jobs::default()
        };
        // Only the lane of the builds is left: one job at a time.
        let error = run(jobs, 0, folder.path()).unwrap_err().to_string();
        assert!(error.starts_with("bad 0 failed after"), "{error}");
        assert!(!never.exists());
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let mut missing = job("missing", "");
        missing.command = Command::new("no-program-has-this-name");
        let jobs = Jobs {
            others: vec![missing],
            ..Jobs::default()
        };
        let error = run(jobs, 1, folder.path()).unwrap_err().to_string();
        assert_eq!(error, "cannot run missing");
    }
}
