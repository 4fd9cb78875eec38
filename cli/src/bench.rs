//! `genset bench`: what benchmarks need.

mod make_model;
mod progress;

use clap::Subcommand;
use genset_backend_common::EngineError;

use make_model::MakeModelArgs;

pub(crate) const HELP: &str = "\
Examples:
  genset bench make-model --params 100m --out /tmp/model-100m
  genset bench make-model --params 1b --out /tmp/model-1b --gguf q8_0

Exit codes: 0 done, 2 usage or a file that cannot be written.";

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Make a model with random weights, of the size of a real one
    MakeModel(MakeModelArgs),
}

/// Performs a command; returns the exit code.
///
/// # Errors
/// `InvalidArgument`, naming the flag or the file.
pub(crate) fn perform(command: &BenchCommand) -> Result<u8, EngineError> {
    match command {
        BenchCommand::MakeModel(args) => make_model::perform(args)?,
    }
    Ok(0)
}
