//! `cargo xtask chaos`: a long run of the chaos test of fleets, `cli/tests/fleet/cases/chaos.rs`.

use anyhow::ensure;
use clap::Args;

use crate::process::{cargo, output, run as run_command};
use crate::repo::Repo;

/// The fleets of `cli/tests/fleet/main.rs`.
const FLEETS: [&str; 3] = ["file_and_tcp", "etcd_and_tcp", "etcd_and_nats"];

// No doc comment: it would replace the help of the task.
#[derive(Debug, Args)]
pub(crate) struct ChaosOptions {
    /// Requests to each fleet
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) requests: u64,
    /// Faults in each fleet, as long as there are requests
    #[arg(long, default_value_t = 100)]
    pub(crate) faults: u64,
    /// Requests at once
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=256))]
    pub(crate) clients: u64,
    /// What decides requests and faults [default: another one each time]
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// One fleet; all without one
    #[arg(long, value_parser = FLEETS)]
    pub(crate) fleet: Option<String>,
}

/// How long discovery is down.
const AWAY_SECONDS: u64 = 20;

/// Builds the test and runs it for one fleet after another.
///
/// # Errors
/// When it does not build, no test has the fleet's name, or a request was lost.
pub(crate) fn run(repo: &Repo, options: &ChaosOptions) -> anyhow::Result<()> {
    let fleet = options.fleet.as_deref().unwrap_or_default();
    let name = format!("{fleet}::chaos_loses_nothing");
    let name = name.trim_start_matches(':');
    let tests = || {
        let mut tests = cargo(repo.root());
        tests.args(["test", "-p", "genset", "--test", "fleet", "--", name]);
        tests
    };
    let listed = output(tests().args(["--list", "--format", "terse"]))?;
    ensure!(has_tests(&listed), "no test has {name} in its name");
    let mut test = tests();
    test.args(["--nocapture", "--test-threads", "1"]);
    for (name, value) in [
        ("GENSET_CHAOS_REQUESTS", options.requests),
        ("GENSET_CHAOS_FAULTS", options.faults),
        ("GENSET_CHAOS_CLIENTS", options.clients),
        ("GENSET_CHAOS_AWAY", AWAY_SECONDS),
    ] {
        test.env(name, value.to_string());
    }
    if let Some(seed) = options.seed {
        test.env("GENSET_CHAOS_SEED", seed.to_string());
    }
    run_command(&mut test)
}

/// Whether the output of the test harness lists a test. A run without any test would pass.
fn has_tests(listed: &str) -> bool {
    listed.lines().any(|line| line.ends_with(": test"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_without_a_test_is_seen() {
        assert!(has_tests("file_and_tcp::chaos_loses_nothing: test\n"));
        assert!(!has_tests(""));
        assert!(!has_tests("\n0 tests, 0 benchmarks\n"));
    }
}
