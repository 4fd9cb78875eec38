//! The program `genset-mistralrs`: `genset run out=mistralrs` starts it and communicates over a socket; if a person starts it, it is a
//! worker that other processes find.

use std::process::ExitCode;

use genset_engine_mistralrs::{MistralRsArgs, MistralRsEngine};
use genset_engine_subprocess::run_program;

fn main() -> ExitCode {
    run_program(&[], MistralRsEngine::from_args, || {
        let (engine, mut worker) = genset_runtime::parse::<MistralRsArgs>();
        // A checkout is its own tokenizer folder; a GGUF file needs one named.
        let folder = Some(engine.model.clone()).filter(|model| model.is_dir());
        worker.model_path = worker.model_path.or(folder);
        genset_runtime::run(MistralRsEngine::from_args(&engine), worker)
    })
}
