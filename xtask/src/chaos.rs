//! `cargo xtask chaos`: the chaos test of fleets, long. What it does stands in `cli/tests/fleet/cases/chaos.rs`.

use crate::process::{cargo, run as run_command};
use crate::repo::Repo;

/// How much of it.
#[derive(Debug, Clone)]
pub(crate) struct ChaosOptions {
    /// Requests to each fleet.
    pub(crate) requests: u64,
    /// Faults in each fleet, while there are requests.
    pub(crate) faults: u64,
    /// Requests at once.
    pub(crate) clients: u64,
    /// What decides requests and faults; another one each time without.
    pub(crate) seed: Option<u64>,
    /// Fleets whose names begin so, such as `file_and_tcp`; all without.
    pub(crate) fleet: Option<String>,
}

/// How long discovery is gone.
const AWAY_SECONDS: u64 = 20;

/// Builds the test and runs it, one fleet after the other.
///
/// # Errors
/// When it does not build, or a request was lost.
pub(crate) fn run(repo: &Repo, options: &ChaosOptions) -> anyhow::Result<()> {
    let mut test = cargo(repo.root());
    test.args(["test", "-p", "genset", "--test", "fleet", "--"]);
    let fleet = options.fleet.as_deref().unwrap_or_default();
    test.arg(format!("{fleet}::chaos_loses_nothing").trim_start_matches(':'));
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
