//! `genset bench`: measurements of an engine and of servers.

pub(crate) mod engine;
pub(crate) mod progress;
pub(crate) mod serve;

use clap::Subcommand;
use genset_backend_common::EngineError;

use engine::EngineBenchArgs;
use serve::ServeBenchArgs;

pub(crate) const HELP: &str = "\
Examples:
  genset bench engine /tmp/model-100m
  genset bench engine /tmp/model-1b/model.gguf --sequences 1,64 --json
  genset bench serve http://127.0.0.1:8080 --concurrency 16 --requests 400
  genset bench serve http://a:8080 http://b:8000 --rate 5 --duration 60 --input-tokens sharegpt --slo-ttft-ms 200

Exit codes: 0 done, 1 requests failed, 2 usage, a file that cannot be read or written, a model that cannot be loaded or a server
that cannot be measured, 3 stopped before the end.";

/// The exit code of a run that Ctrl-C ended.
pub(crate) const CUT: u8 = 3;

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure how fast the candle engine computes a model
    Engine(Box<EngineBenchArgs>),
    /// Measure how fast a server answers: any with OpenAI's API
    Serve(Box<ServeBenchArgs>),
}

/// Runs a command; returns the exit code.
///
/// # Errors
/// `InvalidArgument`, naming the flag, the file or the server.
pub(crate) fn perform(command: &BenchCommand) -> Result<u8, EngineError> {
    match command {
        BenchCommand::Engine(args) => engine::perform(args),
        BenchCommand::Serve(args) => serve::perform(args),
    }
}
