//! Builds the engine and the model's files from the command line.

pub(crate) mod apart;
pub(crate) mod candle;
mod launcher;
mod mocker;
pub(crate) mod scripted;
mod template;

use std::path::Path;
use std::sync::Arc;

use genset_backend_common::worker::WorkerConfig;
use genset_backend_common::{EngineError, LLMEngine};
use genset_engine_echo::{EchoCore, EchoFull};
use genset_engine_sample::{CONTEXT_LENGTH, SampleArgs, SampleEngine};
use genset_engine_subprocess::{SubprocessConfig, SubprocessEngine};
use genset_runtime::ModelFolder;

use crate::args::{EngineKind, RunConfig, required_command, required_script};

/// Context length of a model whose `config.json` has none, in tokens.
const DEFAULT_CONTEXT_LENGTH: u32 = 2048;

/// The default model.
pub(crate) const TINY_CHAT: [(&str, &[u8]); 4] = [
    (
        "config.json",
        include_bytes!("../../models/tiny-chat/config.json"),
    ),
    (
        "tokenizer.json",
        include_bytes!("../../models/tiny-chat/tokenizer.json"),
    ),
    (
        "tokenizer_config.json",
        include_bytes!("../../models/tiny-chat/tokenizer_config.json"),
    ),
    (
        "generation_config.json",
        include_bytes!("../../models/tiny-chat/generation_config.json"),
    ),
];

/// Builds the engine (which does not start it) and the worker's configuration.
///
/// # Errors
/// `InvalidArgument` or `Unsupported`, naming the flag or the file.
pub(crate) fn build(
    kind: EngineKind,
    config: &RunConfig,
) -> Result<(Arc<dyn LLMEngine>, WorkerConfig), EngineError> {
    let args = &config.engine_args;
    match kind {
        EngineKind::Candle => candle::build(config),
        EngineKind::EchoFull => echo_full(config),
        EngineKind::Scripted if config.worker.model_path.is_none() => {
            let script = required_script(args.script.as_deref())?;
            let parts = scripted::Parts::of_text(script)?;
            Ok((Arc::new(parts.engine()), config.worker.worker_config(None)?))
        }
        EngineKind::Apart(apart) => apart::build(apart, config),
        EngineKind::Cmd => in_a_process(config),
        EngineKind::Server(kind) => launcher::build(kind, config),
        EngineKind::Mocker => mocker::build(config),
        EngineKind::EchoCore => of_tokens(config, u32::MAX, |folder, context| {
            let engine = EchoCore::from_args(&args.echo, vocab_size(folder)?, context);
            Ok(Arc::new(engine.once()))
        }),
        EngineKind::Sample => of_tokens(config, CONTEXT_LENGTH, |folder, _| {
            let args = SampleArgs {
                vocab_size: vocab_size(folder)?,
                token_delay_ms: args.token_delay_ms,
            };
            Ok(Arc::new(SampleEngine::from_args(&args)))
        }),
        EngineKind::Scripted => of_tokens(config, u32::MAX, |folder, context| {
            let script = required_script(args.script.as_deref())?;
            let parts = scripted::Parts::of_tokens(script, folder, context)?;
            Ok(Arc::new(parts.engine()))
        }),
    }
}

fn echo_full(config: &RunConfig) -> Result<(Arc<dyn LLMEngine>, WorkerConfig), EngineError> {
    let engine = EchoFull::from_args(&config.engine_args.echo);
    Ok((Arc::new(engine), config.worker.worker_config(None)?))
}

/// An engine in its own process. It declares what it takes when it starts; for tokens it needs the model's folder.
fn in_a_process(config: &RunConfig) -> Result<(Arc<dyn LLMEngine>, WorkerConfig), EngineError> {
    let command = required_command(config.engine_args.engine_cmd.as_deref())?;
    let engine = supervised(subprocess(command)?, config);
    let path = config.worker.model_path.as_ref();
    let folder = path.map(|_| model_folder(config)).transpose()?;
    Ok((Arc::new(engine), config.worker.worker_config(folder)?))
}

/// The engine of `process`, run as the flags say.
fn supervised(process: SubprocessConfig, config: &RunConfig) -> SubprocessEngine {
    SubprocessEngine::new(with_flags(process, config))
}

/// `process` with the flags of every engine in its own process. The worker's limit of a start is the process's too: a shorter one
/// could not be raised.
pub(crate) fn with_flags(process: SubprocessConfig, config: &RunConfig) -> SubprocessConfig {
    let args = &config.engine_args;
    let mut process = process.with_restarts(args.engine_restarts);
    process.inherited_env = args.engine_env.clone();
    process.log_limit = args.log_limit();
    process.start_timeout = config.worker.start_timeout;
    process
}

/// The process that a command line starts.
///
/// # Errors
/// `InvalidArgument`, naming the flag.
pub(crate) fn subprocess(command: &str) -> Result<SubprocessConfig, EngineError> {
    let config = SubprocessConfig::try_from_command_line(command)
        .map_err(|error| EngineError::invalid_argument("--engine-cmd", error))?;
    config.validate()?;
    Ok(config)
}

/// An engine that takes a model's tokens, made from the model's files and context length. It holds sequences of `holds` tokens.
fn of_tokens(
    config: &RunConfig,
    holds: u32,
    make: impl FnOnce(&ModelFolder, u32) -> Result<Arc<dyn LLMEngine>, EngineError>,
) -> Result<(Arc<dyn LLMEngine>, WorkerConfig), EngineError> {
    let folder = model_folder(config)?;
    let context = context_length(&folder, config.worker.context_length)?;
    let engine = make(&folder, context)?;
    let mut worker = config.worker.worker_config(Some(folder))?;
    worker
        .context_length_tokens
        .get_or_insert(context.min(holds));
    Ok((engine, worker))
}

/// The model on the command line or the built-in one, with the template on the command line.
fn model_folder(config: &RunConfig) -> Result<ModelFolder, EngineError> {
    let mut folder = match &config.worker.model_path {
        Some(path) => candle::files_of(path, config)?,
        None => tiny_chat()?,
    };
    template::apply(&mut folder, config)?;
    Ok(folder)
}

fn vocab_size(folder: &ModelFolder) -> Result<u32, EngineError> {
    folder.vocab_size.ok_or_else(|| {
        let problem = "config.json has no vocab_size, which this engine needs";
        EngineError::invalid_argument("MODEL", problem)
    })
}

/// The model's context length. `asked` must not exceed it.
pub(crate) fn context_length(folder: &ModelFolder, asked: Option<u32>) -> Result<u32, EngineError> {
    let context = folder
        .context_length_tokens
        .unwrap_or(DEFAULT_CONTEXT_LENGTH);
    match asked {
        Some(asked) if asked > context => {
            let problem = format!("the model's context holds {context} tokens, not {asked}");
            Err(EngineError::invalid_argument("--context-length", problem))
        }
        Some(_) | None => Ok(context),
    }
}

/// The built-in model.
///
/// # Errors
/// `Internal` if the build embedded other files.
pub(crate) fn tiny_chat() -> Result<ModelFolder, EngineError> {
    let files = TINY_CHAT.map(|(name, content)| (name, content.to_vec()));
    ModelFolder::from_files("tiny-chat", Path::new("tiny-chat"), files)
        .map_err(|error| EngineError::internal("the built-in model is broken").with_source(error))
}

/// The worker for a model that is computed, and the model's context length.
fn worker_of(
    mut folder: ModelFolder,
    config: &RunConfig,
) -> Result<(WorkerConfig, u32), EngineError> {
    template::apply(&mut folder, config)?;
    let context = context_length(&folder, config.worker.context_length)?;
    Ok((config.worker.worker_config(Some(folder))?, context))
}
