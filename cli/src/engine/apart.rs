//! `out=mistralrs`: mistral.rs, in a process of its own, for it wants other versions of crates than this program has. The program,
//! `genset-mistralrs`, is built apart from `engines/mistralrs`. A decision record, `docs/adr/0026`, says why.

use std::env;
use std::path::PathBuf;
use std::sync::Arc;

use genset_backend_common::worker::WorkerConfig;
use genset_backend_common::{EngineError, LLMEngine};
use genset_engine_subprocess::{SubprocessConfig, SubprocessEngine};

use super::candle::{BuiltInFiles, files_of};
use super::{context_length, supervised, template, tiny_chat};
use crate::args::RunConfig;

/// The program that is mistral.rs.
const PROGRAM: &str = "genset-mistralrs";

/// What a user is told where the program is not there.
pub(crate) const IS_MISSING: &str = "there is no mistral.rs here: out=candle answers in its place, with the same models. \
    To have it, build the program genset-mistralrs in a checkout of Genset with `cargo build --release --manifest-path \
    engines/mistralrs/Cargo.toml`, and put it (engines/mistralrs/target/release/genset-mistralrs) beside genset or into PATH";

/// Where the program is: beside this one, or in `PATH`.
pub(crate) fn program() -> Option<PathBuf> {
    let beside = env::current_exe().ok();
    let beside = beside.and_then(|own| own.parent().map(PathBuf::from));
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = beside.into_iter().chain(env::split_paths(&path));
    folders
        .map(|folder| folder.join(PROGRAM))
        .find(|program| program.is_file())
}

/// Builds the engine (which does not start it) and the worker's configuration.
///
/// # Errors
/// `InvalidArgument` or `Unsupported`, naming the flag or the file.
pub(super) fn build(config: &RunConfig) -> Result<(Arc<dyn LLMEngine>, WorkerConfig), EngineError> {
    let program = program().ok_or_else(|| EngineError::unsupported("out", IS_MISSING))?;
    let process = |weights: PathBuf| -> Result<SubprocessEngine, EngineError> {
        let weights = weights.into_os_string().into_string().map_err(|_| {
            EngineError::invalid_argument("MODEL", "must be a path in UTF-8 for out=mistralrs")
        })?;
        let process = SubprocessConfig::new(&program).with_args([weights]);
        Ok(supervised(process, config))
    };
    let (mut folder, engine): (_, Arc<dyn LLMEngine>) = match &config.worker.model_path {
        None => {
            let files = BuiltInFiles::unpack()?;
            let engine = process(files.weights())?;
            (tiny_chat()?, Arc::new(files.served_by(engine)))
        }
        Some(path) => {
            let model_config = config.engine_args.model_config.as_deref();
            let folder = files_of(path, model_config, config)?;
            (folder, Arc::new(process(path.clone())?))
        }
    };
    if let Some(path) = &config.engine_args.chat_template {
        template::replace(&mut folder, path)?;
    }
    let context = context_length(&folder, config.worker.context_length)?;
    let mut worker = config.worker.worker_config(Some(folder))?;
    worker.context_length_tokens.get_or_insert(context);
    Ok((engine, worker))
}
