//! `genset doctor`: checks the machine, its limits, installed software, reachable services and the files that settings name.
//! Reports whether each is well and, if not, the command that fixes it. Changes nothing.

mod engines;
mod files;
mod finding;
mod limits;
mod machine;
mod network;
mod ports;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use genset_backend_common::EngineError;
use genset_runtime::{NetworkArgs, StatusArgs};

use crate::args::HttpArgs;
use crate::bench::progress::telling_if_long;
use crate::input::{note, print};
use crate::threads;
pub(crate) use finding::HELP;
use finding::{Area, Level, count, in_json, in_words};

/// The exit code when there is a problem.
const PROBLEM: u8 = 1;

/// The time limit for another program to print its version.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// TOML file with flags of genset run, by their long names
    #[arg(long, env = "GENSET_CONFIG", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) http: HttpArgs,
    #[command(flatten)]
    pub(crate) status: StatusArgs,
    #[command(flatten, next_help_heading = "Network")]
    pub(crate) network: NetworkArgs,
    /// As the environment or the file says.
    #[arg(skip)]
    pub(crate) max_connections: usize,
    /// Whether the run is a worker, which serves no HTTP.
    #[arg(skip)]
    pub(crate) is_worker: bool,
    /// That of a run.
    #[arg(skip)]
    pub(crate) model: Option<CheckedModel>,
}

/// A model, and why it cannot be served.
pub(crate) type CheckedModel = (PathBuf, Result<(), EngineError>);

/// Checks everything and prints the findings. The exit code says whether there is a problem.
///
/// # Errors
/// When the async runtime cannot be started.
pub(crate) fn perform(args: &DoctorArgs) -> Result<u8, EngineError> {
    let runtime = threads::two()?;
    let looks = telling_if_long(look(args), || {
        note("waiting for servers and programs to answer");
    });
    let findings = runtime.block_on(looks);
    // A hanging program must not block this one.
    runtime.shutdown_background();
    print(&match args.json {
        true => in_json(&findings),
        false => in_words(&findings),
    });
    let has_problem = count(&findings, Level::Problem) > 0;
    Ok(if has_problem { PROBLEM } else { 0 })
}

/// Runs the checks concurrently, because they mostly wait; returns the findings in reading order.
async fn look(args: &DoctorArgs) -> [Area; 6] {
    let slow = async {
        tokio::join!(
            machine::look(),
            engines::look(),
            network::look(&args.network),
            files::look(args)
        )
    };
    let (machine, engines, network, files) = slow.await;
    [
        ("Machine", machine),
        ("Limits", limits::look(args.max_connections)),
        ("Ports", ports::look(args)),
        ("Network", network),
        ("Files", files),
        ("Engines", engines),
    ]
}

/// The output of a program on either stream; `None` if it is not installed, fails, or takes too long.
async fn said(program: &str, args: &[&str]) -> Option<String> {
    let mut command = tokio::process::Command::new(program);
    command
        .args(args)
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(PROGRAM_TIMEOUT, command.output())
        .await
        .ok()?
        .ok()?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).trim().to_owned();
    output.status.success().then_some(text)
}
