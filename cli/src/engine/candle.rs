//! `out=candle`: a language model in this process, from a checkout folder, a GGUF file, or the binary itself; or an embedder or a
//! cross-encoder, from a checkout folder.

use std::fs::{self, File};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use genset_backend_common::output::OutputStream;
use genset_backend_common::worker::WorkerConfig;
use genset_backend_common::{
    DrainContext, EngineConfig, EngineControls, EngineError, GenerateRequest, LLMEngine,
    RequestContext, StartContext, async_trait,
};
use genset_engine_candle::load::{OpenEmbedder, OpenModel, gguf_files, gguf_name};
use genset_engine_candle::{CandleArgs, CandleEngine, EmbeddingEngine};
use genset_process::{lock_folder, remove_left_folders};
use genset_runtime::ModelFolder;
use tempfile::TempDir;

use super::{TINY_CHAT, worker_of};
use crate::args::{EngineKind, RunConfig};

/// The built-in model's weights: the smaller of the two files in the repository, which needs no conversion at the start.
const TINY_CHAT_WEIGHTS: (&str, &[u8]) = (
    "tiny-chat-q8_0.gguf",
    include_bytes!("../../../models/tiny-chat/tiny-chat-q8_0.gguf"),
);

/// The prefix of folders that the built-in model is unpacked into.
const UNPACKED_PREFIX: &str = "genset-tiny-chat-";

/// Builds the engine (which does not start it) and the worker's configuration.
///
/// # Errors
/// `InvalidArgument` or `Unsupported`, naming the flag or the file.
pub(super) fn build(config: &RunConfig) -> Result<(Arc<dyn LLMEngine>, WorkerConfig), EngineError> {
    if let Some(path) = &config.worker.model_path
        && OpenEmbedder::is_at(path)
    {
        return embedder(path, config);
    }
    let (folder, engine): (_, Arc<dyn LLMEngine>) = match &config.worker.model_path {
        None => {
            let engine = BuiltInFiles::unpack()?.engine(&candle_args(config));
            (super::tiny_chat()?, Arc::new(engine))
        }
        Some(path) => of_path(path, config)?,
    };
    let (mut worker, context) = worker_of(folder, config)?;
    worker.context_length_tokens.get_or_insert(context);
    Ok((engine, worker))
}

/// Builds an embedder or a cross-encoder. The engine itself knows its longest input: positions, the checkout's own limit and a
/// step bound it.
fn embedder(
    path: &Path,
    config: &RunConfig,
) -> Result<(Arc<dyn LLMEngine>, WorkerConfig), EngineError> {
    if config.engine_args.chat_template.is_some() {
        let problem = "the model embeds or scores texts and answers no chats, so it has no use for one; leave the flag out";
        return Err(EngineError::invalid_argument("--chat-template", problem));
    }
    let folder = folder_of_model(config)?;
    let engine = EmbeddingEngine::from_args(&config.engine_args.candle, path);
    Ok((Arc::new(engine), config.worker.worker_config(folder)?))
}

fn of_path(
    path: &Path,
    config: &RunConfig,
) -> Result<(ModelFolder, Arc<dyn LLMEngine>), EngineError> {
    let args = candle_args(config);
    let mut folder = files_of(path, config)?;
    // The engine's start reads more of a folder, and tells what is wrong with it.
    if path.is_dir()
        && let Ok(context) = OpenModel::context_length(path)
    {
        folder.context_length_tokens = u32::try_from(context).ok();
    }
    let model_config = config.engine_args.model_config.as_ref();
    let engine = match model_config.filter(|_| !path.is_dir()) {
        Some(folder) => CandleEngine::from_args_with_config(&args, path, folder.to_owned()),
        None => CandleEngine::from_args(&args, path),
    };
    Ok((folder, Arc::new(engine)))
}

/// The folder of the model, which is a word here. The programs of workers have a flag for it.
fn folder_of_model(config: &RunConfig) -> Result<Option<ModelFolder>, EngineError> {
    let folder = config.worker.model_folder();
    folder.map_err(|error| error.with_at("MODEL"))
}

/// The engine's arguments from the flags; one comes from the worker's flags.
fn candle_args(config: &RunConfig) -> CandleArgs {
    CandleArgs {
        context_length_tokens: config.worker.context_length.and_then(NonZeroU32::new),
        ..config.engine_args.candle.clone()
    }
}

/// The files to publish for a model: those of its folder, or those inside a GGUF file.
///
/// # Errors
/// `InvalidArgument` or `Unsupported`, naming the flag or the file.
pub(super) fn files_of(path: &Path, config: &RunConfig) -> Result<ModelFolder, EngineError> {
    if path.is_dir() {
        let folder = folder_of_model(config)?;
        return folder.ok_or_else(|| EngineError::internal("the model's path is lost"));
    }
    let model_config = config.engine_args.model_config.as_deref();
    let files = match model_config {
        // Other engines may support architectures that candle does not.
        None if !config.output.is(EngineKind::Candle) => gguf_files(path)?,
        None | Some(_) => OpenModel::open(path)?.files(model_config)?,
    };
    let files = files.into_iter().map(|file| (file.name, file.content));
    ModelFolder::from_files(gguf_name(path), path, files)
        .map_err(|error| EngineError::invalid_argument("MODEL", error))
}

/// The built-in model's files, unpacked into a temporary folder. The last engine that uses it removes it.
#[derive(Clone)]
pub(crate) struct BuiltInFiles(Arc<Unpacked>);

struct Unpacked {
    folder: TempDir,
    /// Held as long as the folder is used.
    _lock: Option<File>,
}

impl BuiltInFiles {
    /// Unpacks the files, and removes those of processes that were killed.
    ///
    /// # Errors
    /// `Internal` if the folder for temporary files cannot be written.
    pub(crate) fn unpack() -> Result<Self, EngineError> {
        let cannot = |error| {
            let problem = "the built-in model cannot be unpacked into the folder for temporary files (TMPDIR)";
            EngineError::internal(problem).with_source(error)
        };
        remove_left_folders(UNPACKED_PREFIX);
        let folder = tempfile::Builder::new()
            .prefix(UNPACKED_PREFIX)
            .tempdir()
            .map_err(cannot)?;
        let lock = lock_folder(folder.path());
        for (name, content) in TINY_CHAT.into_iter().chain([TINY_CHAT_WEIGHTS]) {
            fs::write(folder.path().join(name), content).map_err(cannot)?;
        }
        Ok(Self(Arc::new(Unpacked {
            folder,
            _lock: lock,
        })))
    }

    /// An engine for these files.
    pub(crate) fn engine(&self, args: &CandleArgs) -> BuiltIn {
        let folder = self.0.folder.path();
        let engine = CandleEngine::from_args_with_config(args, &self.weights(), folder.to_owned());
        self.served_by(engine)
    }

    /// The file with the weights, which also contains the tokenizer.
    pub(super) fn weights(&self) -> PathBuf {
        self.0.folder.path().join(TINY_CHAT_WEIGHTS.0)
    }

    /// Keeps the files as long as `engine` exists.
    pub(super) fn served_by(&self, engine: impl LLMEngine) -> BuiltIn {
        BuiltIn {
            engine: Box::new(engine),
            _files: self.clone(),
        }
    }
}

/// The engine of the built-in model.
pub(crate) struct BuiltIn {
    engine: Box<dyn LLMEngine>,
    _files: BuiltInFiles,
}

#[async_trait]
impl LLMEngine for BuiltIn {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        self.engine.start(ctx).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.engine.generate(request, ctx).await
    }

    async fn abort(&self, ctx: &RequestContext) {
        self.engine.abort(ctx).await;
    }

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        self.engine.drain(ctx).await
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.engine.cleanup().await
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        self.engine.controls()
    }
}
