//! The `genset` binary: reads the command line, assembles engine, worker, runtime and frontend in one process, and returns the
//! outcome as an exit code.

mod args;
mod bench;
mod conform;
mod doctor;
mod engine;
mod fleet;
mod hub;
mod input;
mod node;
mod openai;
mod python;
mod results;
mod signals;
mod simulate;
mod threads;
mod tune;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use args::{Command, Tool};
use genset_backend_common::{EngineError, ErrorKind};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The exit code of a usage or configuration error.
const USAGE_ERROR: u8 = 2;

/// The exit code of a failure that may succeed later, so that a supervisor retries.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    signals::end_process_1();
    let code = match args::parse() {
        Ok(command) => perform(command),
        Err(error) => failed(&error),
    };
    ExitCode::from(match input::lost_output() {
        Some(error) if code == 0 => {
            input::complain(format_args!("standard output cannot be written: {error}"));
            FAILED
        }
        Some(_) | None => code,
    })
}

/// Performs the command; returns the exit code.
fn perform(command: Command) -> u8 {
    match command {
        Command::Print(text) => {
            input::print(&text);
            0
        }
        Command::Tool(tool) => perform_tool(tool),
        Command::Run(config) => run(*config),
    }
}

fn perform_tool(tool: Tool) -> u8 {
    match tool {
        Tool::Conform { command } => coded(conform::perform(*command)),
        Tool::Bench { command } => coded(bench::perform(&command)),
        Tool::Simulate(args) => coded(simulate::perform(&args)),
        Tool::Pull(args) => hub::pull(&args).unwrap_or_else(|error| failed(&error)),
        Tool::List(args) => coded(hub::list(&args)),
        Tool::Doctor(args) => coded(doctor::perform(&args)),
        Tool::Tune(args) => tune::perform(&args).unwrap_or_else(|error| failed(&error)),
        Tool::Rm(args) => coded(hub::rm(&args)),
        Tool::Models(args) => fleet::models(&args).unwrap_or_else(|error| failed(&error)),
        Tool::Top(args) => fleet::top(&args).unwrap_or_else(|error| failed(&error)),
        Tool::Control(args) => fleet::control(&args).unwrap_or_else(|error| failed(&error)),
        Tool::Key { name } => {
            let (key, lines) = genset_frontend::keys::new_key(&name);
            input::print(&format!(
                "The key, for its owner. It is shown only once:\n\n{key}\n\nFor the file of --api-keys:\n\n{lines}"
            ));
            0
        }
        Tool::Serve { arguments } => python("genset.serve", &arguments),
        Tool::Deploy { arguments } => python("genset.deploy", &arguments),
        Tool::Offer { arguments } => python("genset.offer", &arguments),
    }
}

/// Becomes a module of the Python package; returns only if it cannot.
fn python(module: &str, arguments: &[OsString]) -> u8 {
    input::complain(python::become_module(module, arguments));
    USAGE_ERROR
}

/// The exit code of a command; prints its error.
fn coded(outcome: Result<u8, EngineError>) -> u8 {
    match outcome {
        Ok(code) => code,
        Err(error) => {
            input::complain(error);
            USAGE_ERROR
        }
    }
}

/// Prints the error; returns the exit code for a usage error or another failure.
fn failed(error: &EngineError) -> u8 {
    input::complain(error);
    let is_usage = matches!(
        error.kind(),
        ErrorKind::InvalidArgument | ErrorKind::Unsupported
    );
    if is_usage { USAGE_ERROR } else { FAILED }
}

fn run(config: args::RunConfig) -> u8 {
    let (verbose, quiet) = (config.worker.verbose, config.input.is_interactive());
    let _logging = genset_runtime::init_logging_with_console(verbose, quiet, config.tokio_console);
    if let Some(remark) = config.remark {
        tracing::warn!("{remark}");
    }
    let runtime = match threads::of_every_core() {
        Ok(runtime) => runtime,
        Err(error) => {
            input::complain(error);
            return FAILED;
        }
    };
    signals::outlive_file_limit(&runtime);
    let code = runtime.block_on(node::run(config));
    let code = code.unwrap_or_else(|error| failed(&error));
    // A thread that is blocked in an engine, or waits for a line, must not keep the process alive.
    runtime.shutdown_timeout(Duration::from_millis(500));
    code
}
