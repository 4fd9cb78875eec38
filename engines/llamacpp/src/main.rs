//! The program `genset-llamacpp`: `genset run out=libllama` starts it and communicates over a socket; if a person starts it, it is a
//! worker that other processes find.

use std::process::ExitCode;

use genset_engine_llamacpp::{LlamaCppArgs, LlamaCppEngine};
use genset_engine_subprocess::run_program;

fn main() -> ExitCode {
    // llama.cpp logs everything about a model at its start.
    let talkative = ["llama-cpp-2"];
    run_program(&talkative, LlamaCppEngine::from_args, || {
        // --model-path names the folder of the model's tokenizer.
        let (engine, worker) = genset_runtime::parse::<LlamaCppArgs>();
        genset_runtime::run(LlamaCppEngine::from_args(&engine), worker)
    })
}
