//! `out=vllm`, `sglang`, `trtllm` and `llamacpp`: launches and drives the servers of other projects.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::worker::WorkerConfig;
use genset_backend_common::{EngineError, LLMEngine, Role, card::Artifact, request::MediaKind};
use genset_engine_candle::load::gguf_files;
use genset_engine_launcher::{
    ExtraArgs, LauncherArgs, LauncherConfig, LauncherEngine, MediaKinds, Nodes, RestartPolicy,
    ServerInput, ServerKind,
};
use genset_engine_subprocess::SubprocessConfig;
use genset_runtime::ModelFolder;

use super::template;
use crate::args::{RunConfig, is_gguf, required_model};

/// Builds the engine (which does not start it) and the worker's configuration.
///
/// # Errors
/// `InvalidArgument` or `Unsupported`, naming the flag or the file.
pub(super) fn build(
    kind: ServerKind,
    config: &RunConfig,
) -> Result<(Arc<dyn LLMEngine>, WorkerConfig), EngineError> {
    let model = required_model(kind, config.worker.model_path.as_deref())?;
    let folder = folder_of(model, config)?;
    let engine = LauncherEngine::new(launcher(kind, model, folder.as_ref(), config)?);
    let template = if folder.is_none() {
        template_of(model)
    } else {
        None
    };
    let mut worker = config.worker.worker_config(folder)?;
    worker.artifacts.extend(template);
    Ok((Arc::new(engine), worker))
}

/// The file with the chat template of a GGUF file that the server takes as text: it shows the parsers of the answers. `None` if
/// the GGUF file cannot be read here.
fn template_of(model: &Path) -> Option<Artifact> {
    let mut files = gguf_files(model).ok()?.into_iter();
    let file = files.find(|file| file.name == "tokenizer_config.json")?;
    Some(Artifact::new(file.name, file.content))
}

/// The folder with the tokenizer, with which the server takes tokens: the model itself, or `--model-config` for a GGUF file.
fn folder_of(model: &Path, config: &RunConfig) -> Result<Option<ModelFolder>, EngineError> {
    let (path, flag) = match config.engine_args.model_config.as_deref() {
        Some(named) => (named, "--model-config"),
        None if is_gguf(model) => return Ok(None),
        None => (model, "MODEL"),
    };
    let mut folder =
        ModelFolder::load(path).map_err(|error| EngineError::invalid_argument(flag, error))?;
    template::apply(&mut folder, config)?;
    Ok(Some(folder))
}

fn launcher(
    kind: ServerKind,
    model: &Path,
    folder: Option<&ModelFolder>,
    config: &RunConfig,
) -> Result<LauncherConfig, EngineError> {
    let args = &config.engine_args.launcher;
    let input = match folder {
        Some(folder) => ServerInput::Tokens {
            vocab_size: folder.vocab_size.and_then(|size| size.try_into().ok()),
        },
        None => ServerInput::Text,
    };
    let mut launcher = LauncherConfig::new(kind, model, input);
    launcher.media = media(kind, model, args);
    launcher.context_length_tokens = config.worker.context_length;
    launcher.model_context_length_tokens = folder.and_then(|folder| folder.context_length_tokens);
    launcher.tensor_parallel_size = args.tensor_parallel_size;
    launcher.base_gpu_id = args.base_gpu_id;
    launcher.nodes = Nodes {
        num_nodes: args.num_nodes,
        node_rank: args.node_rank,
        leader_addr: args.leader_addr.clone(),
    };
    launcher.kv_block_size = args.kv_cache_block_size;
    launcher.kv_lease = Duration::from_secs(config.engine_args.candle.kv_lease.get().into());
    let role = config.worker.role;
    launcher.kv_transfer_host = match (role, args.kv_transfer_host) {
        (Role::Prefill | Role::Decode, Some(address)) => address,
        (Role::Prefill | Role::Decode, None) => config.worker.network.own_address()?,
        (Role::Aggregated, None) => launcher.kv_transfer_host,
        (Role::Aggregated, Some(_)) => {
            let problem =
                "is for --role prefill and decode; others do not reach this worker's KV blocks";
            return Err(EngineError::invalid_argument("--kv-transfer-host", problem));
        }
    };
    launcher.restart = RestartPolicy::of(config.engine_args.engine_restarts);
    launcher.inherited_env = config.engine_args.engine_env.clone();
    launcher.log_limit = config.engine_args.log_limit();
    if let Some(seconds) = args.engine_start_timeout {
        launcher.start_timeout = Duration::from_secs(seconds.into());
    }
    let extra = args.extra_engine_args.as_deref().map(ExtraArgs::load);
    launcher.extra = extra.transpose()?;
    launcher.command = args.server_cmd.as_deref().map(words).transpose()?;
    launcher.validate_role(role)?;
    launcher.validate()?;
    if config.frontend.api_keys.is_some() {
        launcher.validate_api_keys()?;
    }
    Ok(launcher)
}

/// The media that the flags declare, or else those in a checkout's files for a server that takes media.
fn media(kind: ServerKind, model: &Path, args: &LauncherArgs) -> BTreeSet<MediaKind> {
    if let Some(said) = &args.media {
        return said.0.clone();
    }
    match kind {
        ServerKind::Vllm | ServerKind::Sglang => {
            let config = std::fs::read(model.join("config.json"));
            MediaKinds::of_config(&config.unwrap_or_default()).0
        }
        ServerKind::Trtllm | ServerKind::LlamaCpp => BTreeSet::new(),
    }
}

/// Splits a command line into words.
fn words(command: &str) -> Result<Vec<String>, EngineError> {
    let config = SubprocessConfig::try_from_command_line(command)
        .map_err(|error| EngineError::invalid_argument("--server-cmd", error))?;
    let program = config.program.display().to_string();
    Ok(std::iter::once(program).chain(config.args).collect())
}
