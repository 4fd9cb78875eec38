//! The program `genset-mistralrs`: `genset run out=mistralrs` starts it and talks with it over a socket; started by a person, it is a
//! worker that other processes find.

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use genset_engine_mistralrs::{MistralRsArgs, MistralRsEngine};
use genset_engine_subprocess::{serve, worker_socket};
use tracing::Level;

/// mistral.rs as an engine that a worker of Genset runs in a process of its own
#[derive(Parser)]
struct Served {
    #[command(flatten)]
    engine: MistralRsArgs,
}

fn main() -> ExitCode {
    let served = match worker_socket() {
        Ok(None) => {
            let (engine, mut worker) = genset_runtime::parse::<MistralRsArgs>();
            // A checkout is published, too; a GGUF file needs the folder of its tokenizer named.
            let folder = Some(engine.model.clone()).filter(|model| model.is_dir());
            worker.model_path = worker.model_path.or(folder);
            return genset_runtime::run(MistralRsEngine::from_args(&engine), worker);
        }
        Ok(Some(socket)) => {
            let args = Served::parse().engine;
            // Each line begins with its level, by which the worker logs it.
            tracing_subscriber::fmt()
                .with_writer(std::io::stderr)
                .with_ansi(false)
                .without_time()
                .with_max_level(level())
                .init();
            let engine = Arc::new(MistralRsEngine::from_args(&args));
            let runtime = tokio::runtime::Runtime::new().map_err(|error| error.to_string());
            runtime.and_then(|runtime| {
                let served = runtime.block_on(serve(engine, socket));
                // A load under way must not keep the process.
                runtime.shutdown_background();
                served.map_err(|error| error.to_string())
            })
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

/// How much the worker logs.
fn level() -> Level {
    let asked = std::env::var("GENSET_ENGINE_LOG").unwrap_or_default();
    match asked.as_str() {
        "error" => Level::ERROR,
        "warning" => Level::WARN,
        "debug" => Level::DEBUG,
        _ => Level::INFO,
    }
}
