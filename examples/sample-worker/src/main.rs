//! An engine author's own worker binary: flags, lifecycle, signals and exit codes come from the runtime.

use genset_engine_sample::{SampleArgs, SampleEngine};

fn main() -> std::process::ExitCode {
    let (engine, worker) = genset_runtime::parse::<SampleArgs>();
    genset_runtime::run(SampleEngine::from_args(&engine), worker)
}
