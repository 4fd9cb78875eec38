//! `genset bench`: models for benchmarks, and measurements of an engine.

mod engine;
mod make_model;
mod progress;

use clap::Subcommand;
use genset_backend_common::EngineError;

use engine::EngineBenchArgs;
use make_model::MakeModelArgs;

pub(crate) const HELP: &str = "\
Examples:
  genset bench make-model --params 100m --out /tmp/model-100m
  genset bench make-model --params 1b --out /tmp/model-1b --gguf q8_0
  genset bench engine /tmp/model-100m
  genset bench engine /tmp/model-1b/model.gguf --sequences 1,64 --json

Exit codes: 0 done, 2 usage, a file that cannot be read or written, or a model that cannot be loaded.";

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Make a model with random weights, of the size of a real one
    MakeModel(MakeModelArgs),
    /// Measure how fast the candle engine computes a model
    Engine(Box<EngineBenchArgs>),
}

/// Performs a command; returns the exit code.
///
/// # Errors
/// `InvalidArgument`, naming the flag or the file.
pub(crate) fn perform(command: &BenchCommand) -> Result<u8, EngineError> {
    match command {
        BenchCommand::MakeModel(args) => make_model::perform(args)?,
        BenchCommand::Engine(args) => engine::perform(args)?,
    }
    Ok(0)
}
