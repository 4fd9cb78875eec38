//! The engine and the model's files, from what the command line says.

use std::path::Path;
use std::sync::Arc;

use genset_backend_common::worker::WorkerConfig;
use genset_backend_common::{EngineError, LLMEngine};
use genset_engine_echo::{EchoCore, EchoFull};
use genset_engine_sample::{CONTEXT_LENGTH, SampleArgs, SampleEngine};
use genset_runtime::ModelFolder;

use crate::args::{EngineKind, RunConfig};

/// Context of a model whose `config.json` names none, in tokens.
const DEFAULT_CONTEXT_LENGTH: u32 = 2048;

/// The model that is there when none is named.
const TINY_CHAT: [(&str, &[u8]); 4] = [
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
    if kind == EngineKind::EchoFull {
        if config.worker.model_path.is_some() {
            let problem =
                "echo_full takes text and needs no model folder; name it with --model-name";
            return Err(EngineError::invalid_argument("MODEL", problem));
        }
        let engine = EchoFull::from_args(&config.engine_args.echo);
        return Ok((Arc::new(engine), config.worker.worker_config(None)?));
    }
    let folder = match config.worker.model_folder()? {
        Some(folder) => folder,
        None => tiny_chat()?,
    };
    let vocab_size = folder.vocab_size.ok_or_else(|| {
        EngineError::invalid_argument(
            "MODEL",
            "config.json has no vocab_size, which this engine needs",
        )
    })?;
    let context = folder
        .context_length_tokens
        .unwrap_or(DEFAULT_CONTEXT_LENGTH);
    if let Some(asked) = config.worker.context_length
        && asked > context
    {
        let problem = format!("the model's context holds {context} tokens, not {asked}");
        return Err(EngineError::invalid_argument("--context-length", problem));
    }
    let engine: Arc<dyn LLMEngine> = match kind {
        EngineKind::Sample => {
            let token_delay_ms = config.engine_args.token_delay_ms;
            Arc::new(SampleEngine::from_args(&SampleArgs {
                vocab_size,
                token_delay_ms,
            }))
        }
        EngineKind::EchoCore | EngineKind::EchoFull => Arc::new(EchoCore::from_args(
            &config.engine_args.echo,
            vocab_size,
            context,
        )),
    };
    let mut worker = config.worker.worker_config(Some(folder))?;
    // The sample engine has a context of its own; what is served is the model's.
    let holds = if kind == EngineKind::Sample {
        CONTEXT_LENGTH
    } else {
        context
    };
    worker
        .context_length_tokens
        .get_or_insert(context.min(holds));
    Ok((engine, worker))
}

fn tiny_chat() -> Result<ModelFolder, EngineError> {
    let files = TINY_CHAT.map(|(name, content)| (name, content.to_vec()));
    ModelFolder::from_files("tiny-chat", Path::new("tiny-chat"), files)
        .map_err(|error| EngineError::internal("the built-in model is broken").with_source(error))
}
