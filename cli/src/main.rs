//! The `genset` binary: reads the command line, assembles engine, worker, runtime and frontend in one process, and turns
//! how it went into an exit code.

mod args;
mod bench;
mod conform;
mod engine;
mod input;
mod layers;
mod node;

use std::process::ExitCode;
use std::time::Duration;

use args::Command;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The exit code of a usage or configuration error.
const USAGE_ERROR: u8 = 2;

fn main() -> ExitCode {
    let command = match args::parse() {
        Ok(command) => command,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(USAGE_ERROR);
        }
    };
    match command {
        Command::Print(text) => {
            input::print(&text);
            ExitCode::SUCCESS
        }
        Command::Conform(command) => match conform::perform(*command) {
            Ok(code) => ExitCode::from(code),
            Err(error) => {
                eprintln!("error: {error}");
                ExitCode::from(USAGE_ERROR)
            }
        },
        Command::Bench(command) => match bench::perform(&command) {
            Ok(code) => ExitCode::from(code),
            Err(error) => {
                eprintln!("error: {error}");
                ExitCode::from(USAGE_ERROR)
            }
        },
        Command::Key(name) => {
            let (key, lines) = genset_frontend::keys::new_key(&name);
            input::print(&format!(
                "The key, for its owner; it is shown this once:\n\n{key}\n\nFor the file of --api-keys:\n\n{lines}"
            ));
            ExitCode::SUCCESS
        }
        Command::Run(config) => run(*config),
    }
}

fn run(config: args::RunConfig) -> ExitCode {
    let _logging =
        genset_runtime::init_logging(config.worker.verbose, config.input.is_interactive());
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: the async runtime cannot be started: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = match runtime.block_on(node::run(config)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            USAGE_ERROR
        }
    };
    // A thread that an engine blocks, or that waits for a line, must not keep the process.
    runtime.shutdown_timeout(Duration::from_millis(500));
    ExitCode::from(code)
}
