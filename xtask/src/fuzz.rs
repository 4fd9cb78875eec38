//! `cargo xtask fuzz`: builds the fuzz targets as libFuzzer programs, runs each for a while, and shows the results.
//!
//! Needs a C++ compiler but no nightly Rust: plain compiler options provide the instrumentation for libFuzzer. New inputs stay in
//! `target/fuzz/corpus`. `--keep` copies as many of them to `fuzz/corpus` as the repository has room for; ordinary tests replay
//! them.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use clap::Args;

use crate::process::{cargo, output, run as run_command};
use crate::repo::Repo;

/// The instrumentation for libFuzzer: edges, their targets, and comparisons.
const INSTRUMENTS: &str = "-Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";
/// The longest input. Short inputs let libFuzzer try thousands a second.
const MAX_INPUT_BYTES: u32 = 20_000;
/// The time limit for one input. Exceeding it is a finding.
const INPUT_SECONDS: u32 = 20;
/// The memory limit of a target. Exceeding it is a finding.
const MEMORY_MIB: u32 = 3_000;
/// Limits of a corpus in the repository: number of files, bytes in total, and bytes per file.
const KEPT_FILES: usize = 50;
const KEPT_BYTES: u64 = 150_000;
const KEPT_FILE_BYTES: u64 = 8_000;

// No doc comment: it would replace the help of the task.
#[derive(Debug, Args)]
pub(crate) struct FuzzOptions {
    /// Seconds for each target
    #[arg(long, default_value_t = 60, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) seconds: u32,
    /// Take new inputs into fuzz/corpus, as far as there is room
    #[arg(long)]
    pub(crate) keep: bool,
    /// Targets, such as chat; all without one
    pub(crate) targets: Vec<String>,
}

/// The outcome of a target.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcome {
    name: String,
    executions: u64,
    new_inputs: u64,
    findings: Vec<PathBuf>,
}

/// Builds and runs the targets, and shows the results.
///
/// # Errors
/// A target does not exist or does not build, or a run found something.
pub(crate) fn run(repo: &Repo, options: &FuzzOptions) -> anyhow::Result<()> {
    let names = names(repo, &options.targets)?;
    let folder = repo.target().join("fuzz");
    let programs = build(repo, &folder)?;
    let mut outcomes = Vec::new();
    for name in &names {
        let place = Place {
            program: programs.join(name),
            work: folder.join("corpus").join(name),
            kept: repo.root().join("fuzz/corpus").join(name),
            findings: folder.join("findings"),
        };
        eprintln!("{name}: {} s", options.seconds);
        outcomes.push(place.fuzz(name, options.seconds)?);
        if options.keep {
            place.keep()?;
        }
    }
    std::io::stdout().write_all(table(&outcomes).as_bytes())?;
    let findings: usize = outcomes.iter().map(|outcome| outcome.findings.len()).sum();
    if findings > 0 {
        bail!(
            "{findings} inputs were found that should not be; each target's program takes them as arguments"
        );
    }
    Ok(())
}

fn names(repo: &Repo, wanted: &[String]) -> anyhow::Result<BTreeSet<String>> {
    let programs = repo.root().join("fuzz/libfuzzer/src/bin");
    let mut all = BTreeSet::new();
    for entry in fs::read_dir(&programs).context("there are no targets")? {
        let path = entry?.path();
        all.extend(
            path.file_stem()
                .map(|name| name.to_string_lossy().into_owned()),
        );
    }
    if let Some(name) = wanted.iter().find(|name| !all.contains(*name)) {
        let all: Vec<String> = all.into_iter().collect();
        bail!("there is no target {name:?}; there are {}", all.join(", "));
    }
    Ok(if wanted.is_empty() {
        all
    } else {
        wanted.iter().cloned().collect()
    })
}

/// Builds all programs; returns their folder.
fn build(repo: &Repo, folder: &Path) -> anyhow::Result<PathBuf> {
    let version = output(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.context("rustc does not say what it compiles for")?;
    let manifest = repo.root().join("fuzz/libfuzzer/Cargo.toml");
    let mut command = cargo(repo.root());
    // With an explicit target, cargo does not instrument build scripts.
    command
        .args(["build", "--release", "--bins", "--target", host])
        .arg("--manifest-path")
        .arg(manifest)
        .arg("--target-dir")
        .arg(folder)
        .env("RUSTFLAGS", INSTRUMENTS);
    run_command(&mut command)?;
    Ok(folder.join(host).join("release"))
}

/// The paths of a target and its files.
#[derive(Debug)]
struct Place {
    program: PathBuf,
    /// Interesting inputs found on this machine.
    work: PathBuf,
    /// Interesting inputs kept in the repository.
    kept: PathBuf,
    findings: PathBuf,
}

impl Place {
    fn program(&self) -> Command {
        let mut command = Command::new("nice");
        command.args(["-n", "19"]).arg(&self.program);
        command.stdin(Stdio::null()).env("RUST_BACKTRACE", "1");
        command
    }

    fn fuzz(&self, name: &str, seconds: u32) -> anyhow::Result<Outcome> {
        fs::create_dir_all(&self.work)?;
        fs::create_dir_all(&self.findings)?;
        let prefix = format!("{}/{name}-", self.findings.display());
        let ran = self
            .program()
            .args([&self.work, &self.kept])
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-max_len={MAX_INPUT_BYTES}"))
            .arg(format!("-timeout={INPUT_SECONDS}"))
            .arg(format!("-rss_limit_mb={MEMORY_MIB}"))
            .arg(format!("-artifact_prefix={prefix}"))
            .arg("-print_final_stats=1")
            .output()
            .with_context(|| format!("cannot run {}", self.program.display()))?;
        let log = String::from_utf8_lossy(&ran.stderr);
        let outcome = outcome(name, &log);
        if !ran.status.success() {
            let lines: Vec<&str> = log.lines().rev().take(60).collect();
            let end: Vec<&str> = lines.into_iter().rev().collect();
            eprintln!("{}", end.join("\n"));
            if outcome.findings.is_empty() {
                bail!("{name} ended with {} and no finding", ran.status);
            }
        }
        Ok(outcome)
    }

    /// Copies new inputs into the repository: those that reach new code, as many as there is room for.
    fn keep(&self) -> anyhow::Result<()> {
        let merged = self.work.with_extension("merged");
        drop(fs::remove_dir_all(&merged));
        fs::create_dir_all(&merged)?;
        let status = self
            .program()
            .arg("-merge=1")
            .args([&merged, &self.kept, &self.work])
            .stderr(Stdio::null())
            .status()?;
        anyhow::ensure!(status.success(), "inputs cannot be merged: {status}");
        let kept = sizes(&self.kept)?;
        let mut room = KEPT_BYTES.saturating_sub(kept.iter().map(|(size, _)| size).sum());
        let new = sizes(&merged)?;
        let new: Vec<_> = new
            .into_iter()
            .filter(|(size, _)| *size <= KEPT_FILE_BYTES)
            .collect();
        for index in spread(new.len(), KEPT_FILES.saturating_sub(kept.len())) {
            let (size, path) = &new[index];
            if let (Some(left), Some(name)) = (room.checked_sub(*size), path.file_name()) {
                room = left;
                fs::copy(path, self.kept.join(name))?;
            }
        }
        fs::remove_dir_all(&merged)?;
        Ok(())
    }
}

/// The files of a folder, smallest first.
fn sizes(folder: &Path) -> anyhow::Result<Vec<(u64, PathBuf)>> {
    let mut sizes = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        sizes.push((entry.metadata()?.len(), entry.path()));
    }
    sizes.sort();
    Ok(sizes)
}

/// At most `wanted` indices of a list of this length, evenly spread.
fn spread(length: usize, wanted: usize) -> Vec<usize> {
    let count = wanted.min(length);
    (0..count).map(|index| index * length / count).collect()
}

/// Parses a program's log. libFuzzer reports a known finding again.
fn outcome(name: &str, log: &str) -> Outcome {
    let figure = |name: &str| {
        let line = log.lines().rev().find_map(|line| line.strip_prefix(name));
        line.and_then(|figure| figure.trim().parse().ok())
            .unwrap_or(0)
    };
    let findings = log
        .lines()
        .filter_map(|line| line.split_once("Test unit written to "))
        .map(|(_, path)| PathBuf::from(path));
    Outcome {
        name: name.to_owned(),
        executions: figure("stat::number_of_executed_units:"),
        new_inputs: figure("stat::new_units_added:"),
        findings: findings.collect(),
    }
}

fn table(outcomes: &[Outcome]) -> String {
    let mut text =
        "| target | executions | new inputs | findings |\n|---|---|---|---|\n".to_owned();
    for outcome in outcomes {
        let findings: Vec<_> = outcome
            .findings
            .iter()
            .map(|it| it.display().to_string())
            .collect();
        let findings = if findings.is_empty() {
            "none".to_owned()
        } else {
            findings.join(", ")
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| {} | {} | {} | {findings} |",
            outcome.name, outcome.executions, outcome.new_inputs
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_log() {
        let log = "#1 INITED\nstat::number_of_executed_units: 1234\nstat::average_exec_per_sec:     7\n\
            stat::new_units_added:          56\n";
        let outcome = outcome("frames", log);
        assert_eq!((outcome.executions, outcome.new_inputs), (1234, 56));
        assert_eq!(
            table(&[outcome]).lines().nth(2),
            Some("| frames | 1234 | 56 | none |")
        );
    }

    #[test]
    fn a_finding_counts_whether_its_file_was_there_or_not() {
        let log = "==7== ERROR: libFuzzer: deadly signal\nartifact_prefix='findings/frames-'; \
            Test unit written to findings/frames-crash-ab\nstat::new_units_added:          0\n";
        let findings = outcome("frames", log).findings;
        assert_eq!(findings, [PathBuf::from("findings/frames-crash-ab")]);
    }

    #[test]
    fn places_are_spread_over_the_list() {
        assert_eq!(spread(10, 5), [0, 2, 4, 6, 8]);
        assert_eq!(spread(2, 5), [0, 1]);
        assert_eq!(spread(0, 5), [0_usize; 0]);
    }
}
