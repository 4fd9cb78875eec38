//! [`run_program`]: the `main` of an engine's own program, in Rust. A worker starts the program and talks to it over a socket;
//! a user who starts it gets something else, such as a worker. It initializes the process's log, so only a `main` may call it;
//! those of `engines/mistralrs` and `engines/llamacpp` do.

use std::env;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Parser};
use genset_backend_common::LLMEngine;
use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::process::LOG_VARIABLE;
use crate::serve::{serve, worker_socket};

/// An engine in a process of its own, started by a worker of Genset
#[derive(Debug, Parser)]
struct Served<A: Args> {
    #[command(flatten)]
    engine: A,
}

/// The whole `main` of a program. In a process that a worker started, it parses the engine's flags, creates the engine and
/// [serves](serve) it until the worker sends `GoAway`. In any other process it runs `otherwise`.
///
/// It logs to standard error at the worker's level. Information messages of the targets in `talkative` are left out, for
/// verbose libraries.
///
/// # Examples
/// ```no_run
/// use genset_engine_sample::{SampleArgs, SampleEngine};
/// use genset_engine_subprocess::run_program;
///
/// fn main() -> std::process::ExitCode {
///     run_program(&[], SampleEngine::from_args, || {
///         // A worker by itself: `genset_runtime::parse::<SampleArgs>()` and `genset_runtime::run`.
///         std::process::ExitCode::FAILURE
///     })
/// }
/// ```
#[expect(
    clippy::print_stderr,
    reason = "where there is no socket there is no log yet"
)]
pub fn run_program<A: Args, E: LLMEngine>(
    talkative: &[&str],
    engine: impl FnOnce(&A) -> E,
    otherwise: impl FnOnce() -> ExitCode,
) -> ExitCode {
    let served = match worker_socket() {
        Ok(None) => return otherwise(),
        Ok(Some(socket)) => {
            let args = Served::<A>::parse().engine;
            let asked = env::var(LOG_VARIABLE).unwrap_or_default();
            init_log(level(&asked), talkative);
            serve_to_end(Arc::new(engine(&args)), socket)
        }
        Err(error) => Err(error.to_string()),
    };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("ERROR {problem}");
            ExitCode::FAILURE
        }
    }
}

fn serve_to_end(engine: Arc<dyn LLMEngine>, socket: StdUnixStream) -> Result<(), String> {
    let runtime = tokio::runtime::Runtime::new().map_err(|error| error.to_string())?;
    let served = runtime.block_on(serve(engine, socket));
    // A load in progress must not keep the process alive.
    runtime.shutdown_background();
    served.map_err(|error| error.to_string())
}

/// Begins each line with its level; the worker logs it at that level.
fn init_log(level: Level, talkative: &[&str]) {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .without_time();
    let log = tracing_subscriber::registry().with(lines);
    log.with(targets(level, talkative)).init();
}

fn targets(level: Level, talkative: &[&str]) -> Targets {
    let of_talkative = match level {
        Level::INFO => Level::WARN,
        level => level,
    };
    let targets = Targets::new().with_default(level);
    targets.with_targets(talkative.iter().map(|target| (*target, of_talkative)))
}

/// The level for the worker's word.
fn level(asked: &str) -> Level {
    match asked {
        "error" => Level::ERROR,
        "warning" => Level::WARN,
        "debug" => Level::DEBUG,
        _ => Level::INFO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_the_workers() {
        for (asked, means) in [
            ("error", Level::ERROR),
            ("warning", Level::WARN),
            ("info", Level::INFO),
            ("debug", Level::DEBUG),
            ("", Level::INFO),
        ] {
            assert_eq!(level(asked), means, "{asked}");
        }
    }

    #[test]
    fn information_of_talkative_targets_is_left_out_unless_all_is_asked_for() {
        let logs = |at: Level, target: &str, level: Level| {
            targets(at, &["much"]).would_enable(target, &level)
        };
        assert!(logs(Level::INFO, "little", Level::INFO));
        assert!(!logs(Level::INFO, "much", Level::INFO));
        assert!(logs(Level::INFO, "much", Level::WARN));
        assert!(logs(Level::DEBUG, "much", Level::INFO));
        assert!(!logs(Level::ERROR, "much", Level::WARN));
    }
}
