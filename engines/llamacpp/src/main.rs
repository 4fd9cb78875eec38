//! The program `genset-llamacpp`: `genset run out=libllama` starts it and talks with it over a socket; started by a person, it is a
//! worker that other processes find.

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use genset_engine_llamacpp::{LlamaCppArgs, LlamaCppEngine};
use genset_engine_subprocess::{serve, worker_socket};
use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// llama.cpp as an engine that a worker of Genset runs in a process of its own
#[derive(Parser)]
struct Served {
    #[command(flatten)]
    engine: LlamaCppArgs,
}

fn main() -> ExitCode {
    let served = match worker_socket() {
        Ok(None) => {
            // The folder of the model's tokenizer is named by --model-path.
            let (engine, worker) = genset_runtime::parse::<LlamaCppArgs>();
            return genset_runtime::run(LlamaCppEngine::from_args(&engine), worker);
        }
        Ok(Some(socket)) => {
            let args = Served::parse().engine;
            // Each line begins with its level, by which the worker logs it.
            let lines = tracing_subscriber::fmt::layer()
                .with_writer(std::io::stderr)
                .with_ansi(false)
                .without_time();
            let level = level();
            // llama.cpp tells all about a model at its start.
            let of_llama = if level == Level::INFO {
                Level::WARN
            } else {
                level
            };
            let levels = Targets::new().with_default(level);
            let levels = levels.with_target("llama-cpp-2", of_llama);
            tracing_subscriber::registry()
                .with(lines)
                .with(levels)
                .init();
            let engine = Arc::new(LlamaCppEngine::from_args(&args));
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
