//! `genset simulate`: a fleet in this process, in virtual time.
//!
//! Also has the flags of a load, because `genset bench serve` sends the same loads to real servers.

mod load;

use std::convert::Infallible;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;

use clap::Args;
use genset_backend_common::{EngineError, text_file::read_text};
use genset_engine_mocker::MockerArgs;
use genset_router::KvConfig;
use genset_simulate::{Fault, Plan, Policy, Report, simulate_counted};

use crate::bench::progress::{PROGRESS_AFTER, PROGRESS_EVERY, Progress};
use crate::input::print;
use crate::results;

pub(crate) use load::{LoadArgs, LoadKind};

pub(crate) const HELP: &str = "\
Examples:
  genset simulate
  genset simulate --workers 64 --load agent --requests 20000 --rate 20 --plot ttft.svg
  genset simulate --trace mooncake_trace.jsonl --workers 16 --policies round-robin,oracle --json
  genset simulate --prefill-workers 0,2,3 --policies round-robin,kv
  genset simulate --faults faults.json       where the file has [{\"at_s\": 10, \"worker\": 0, \"do\": \"crash\"}]

Exit codes: 0 done, 2 usage, or a file that cannot be read or written.";

/// The largest file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 30;

#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// Workers, each a mocker
    #[arg(long, default_value_t = 8, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    workers: u32,
    /// Frontends: each request goes to one of them at random, and each knows of the others only what workers publish
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1000))]
    frontends: u32,
    /// How an instance is chosen, with commas between them: modes of --router-mode, random, oracle
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "round-robin,random,least-loaded,kv,oracle"
    )]
    policies: Vec<String>,
    /// Fleets to compare, with commas between them: of the workers, so many compute prompts and the others answer; 0 for workers
    /// that do both
    #[arg(
        long,
        value_name = "COUNTS",
        value_delimiter = ',',
        default_value = "0"
    )]
    prefill_workers: Vec<usize>,
    /// Kind of load
    #[arg(long, value_enum, default_value_t = LoadKind::Chat, conflicts_with = "trace")]
    load: LoadKind,
    /// Conversations, or single requests, that begin in a second, on average
    #[arg(
        long,
        default_value_t = 4.0,
        value_name = "RATE",
        conflicts_with = "trace"
    )]
    rate: f64,
    #[command(flatten)]
    loads: LoadArgs,
    #[command(flatten)]
    kv: KvConfig,
    /// Requests in all; of a trace, at most
    #[arg(long, default_value = "2000", value_name = "COUNT")]
    requests: NonZeroU64,
    /// JSON file with what happens to workers and frontends: crash, stop, start, restart
    #[arg(long, value_name = "FILE")]
    faults: Option<PathBuf>,
    /// JSON or YAML file with the mockers' settings
    #[arg(long, value_name = "FILE")]
    extra_engine_args: Option<PathBuf>,
    /// Varies load and chance; one seed gives the same figures
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// SVG file to write: the distribution of TTFT of each policy, and with faults what clients waited over time
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Simulates and prints the results; returns the exit code.
///
/// # Errors
/// `InvalidArgument` or `Unsupported`, naming the flag or the file.
pub(crate) fn perform(args: &SimulateArgs) -> Result<u8, EngineError> {
    let plan = args.plan()?;
    if let Some(path) = &args.plot {
        results::check("--plot", path)?;
    }
    let report = simulate_visibly(&plan)?;
    if args.json {
        print(&(report.json() + "\n"));
    } else {
        print(&report.to_string());
    }
    if let Some(path) = &args.plot {
        results::write("--plot", path, &report.svg())?;
    }
    Ok(0)
}

/// Simulates, and shows the progress of a long run.
fn simulate_visibly(plan: &Plan) -> Result<Report, EngineError> {
    let all = plan.requests()?;
    let ended: Arc<AtomicU64> = Arc::default();
    let counted: &AtomicU64 = &ended;
    let (over, is_over) = sync_channel(1);
    thread::scope(|scope| {
        scope.spawn(move || tell(counted, all, &is_over));
        let report = simulate_counted(plan, &ended);
        drop(over);
        report
    })
}

/// Shows how many of `all` requests have ended, until the other end of `is_over` is dropped.
fn tell(ended: &AtomicU64, all: u64, is_over: &Receiver<Infallible>) {
    let mut progress = None;
    let mut pause = PROGRESS_AFTER;
    while is_over.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        progress
            .get_or_insert_with(|| Progress::of_rounds("simulating"))
            .set(ended.load(Ordering::Relaxed), all);
        pause = PROGRESS_EVERY;
    }
}

impl SimulateArgs {
    fn plan(&self) -> Result<Plan, EngineError> {
        self.kv.validate()?;
        let workers = usize::try_from(self.workers).unwrap_or(usize::MAX);
        let frontends = usize::try_from(self.frontends).unwrap_or(usize::MAX);
        let policies = self.policies.iter().map(|name| name.parse());
        let policies = policies.collect::<Result<Vec<Policy>, EngineError>>()?;
        let faults = match &self.faults {
            Some(path) => Fault::read_script(&read("--faults", path)?, workers, frontends)?,
            None => Vec::new(),
        };
        let engine = match &self.extra_engine_args {
            Some(path) => MockerArgs::load(path)?,
            None => MockerArgs::default(),
        };
        Ok(Plan {
            workers,
            frontends,
            engine,
            load: self.loads.load(self.load, self.rate, self.requests.get())?,
            faults,
            policies,
            prefill_workers: self.prefill_workers.clone(),
            kv: self.kv.clone(),
            seed: self.seed,
        })
    }
}

/// Reads the file of a flag.
fn read(flag: &str, path: &Path) -> Result<String, EngineError> {
    let bad = |problem: String| {
        EngineError::invalid_argument(flag, format!("{}: {problem}", path.display()))
    };
    read_text(path, MAX_FILE_BYTES).map_err(|error| bad(error.to_string()))
}
