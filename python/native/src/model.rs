//! A model that Python registers: its spec, and the Worker around its handler.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::worker::{
    CanaryConfig, Report, RequestLimits, Worker, WorkerConfig, WorkerHandle,
};
use genset_backend_common::{
    EngineConfig, EngineError, ErrorKind, MetricsRegistry, Role,
    card::{Artifact, EndpointType},
    error::At,
    series::ENDPOINT_LABEL,
};
use genset_runtime::{EndpointName, ModelFolder, Runtime, RuntimeRegistrar, replace_chat_template};
use serde::Deserialize;

use crate::call::CallHandler;
use crate::engine::HandlerEngine;

/// The context length of a model for which neither Python nor the files give one: longer than any prompt.
const UNBOUNDED_TOKENS: u32 = 1 << 30;

/// The maximum size of a chat template file, in bytes.
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;

/// The arguments of `register_llm`, as `genset.llm` writes them.
#[derive(Debug, Deserialize)]
pub(crate) struct ModelSpec {
    /// Namespace, component and endpoint.
    endpoint: (String, String, String),
    worker_id: u64,
    /// The engine's config. A context of 0 means: read it from the model's files.
    engine: EngineConfig,
    /// Folder with the tokenizer, or a GGUF file with one; `None` for models whose handler reads text.
    model_path: Option<PathBuf>,
    aliases: Vec<String>,
    endpoint_types: Option<BTreeSet<EndpointType>>,
    migration_limit: u32,
    user_data: serde_json::Value,
    tool_parser: Option<String>,
    reasoning_parser: Option<String>,
    chat_template: Option<PathBuf>,
    max_running: usize,
    max_waiting: usize,
    grace_s: f64,
    /// The time limit of a request without a deadline, in seconds; 0 for no limit.
    request_timeout_s: f64,
    /// The longest silence inside an answer, in seconds; 0 for no limit.
    idle_timeout_s: f64,
    /// Silence after which a canary is sent, in seconds; 0 sends one only at the start.
    canary_interval_s: f64,
    /// The wait for a canary's answer, in seconds.
    canary_timeout_s: f64,
    /// Lowers the context.
    context_length: Option<u32>,
    role: Role,
    /// Python's number for the handler of the Worker's calls other than requests; `None` if there is none.
    pub(crate) hooks: Option<u64>,
}

impl ModelSpec {
    fn name(&self) -> Result<EndpointName, EngineError> {
        let (namespace, component, endpoint) = &self.endpoint;
        EndpointName::try_new(namespace, component, endpoint)
            .map_err(|error| EngineError::invalid_argument("endpoint", error))
    }

    /// Reads the model's files. They may be large: do not call it on an async thread.
    fn artifacts(&mut self) -> Result<Vec<Artifact>, EngineError> {
        let mut artifacts = Vec::new();
        if let Some(path) = &self.model_path {
            let folder = if path.is_file() {
                of_gguf(path)?
            } else {
                ModelFolder::load(path)
                    .map_err(|error| EngineError::invalid_argument("model_path", error))?
            };
            if self.engine.context_length_tokens == 0 {
                self.engine.context_length_tokens = folder.context_length_tokens.unwrap_or(0);
            }
            if self.engine.vocab_size.is_none() {
                self.engine.vocab_size = folder.vocab_size.and_then(|size| size.try_into().ok());
            }
            artifacts = folder.artifacts;
        }
        if let Some(path) = &self.chat_template {
            replace_chat_template(&mut artifacts, read_template(path)?);
        }
        if self.engine.context_length_tokens == 0 {
            tracing::warn!(
                model = self.engine.model,
                "neither register_llm nor the model's files say how long its context is; requests of any length are let through"
            );
            self.engine.context_length_tokens = UNBOUNDED_TOKENS;
        }
        Ok(artifacts)
    }

    fn worker_config(&self, artifacts: Vec<Artifact>) -> Result<WorkerConfig, EngineError> {
        let config = WorkerConfig {
            aliases: self.aliases.clone(),
            endpoint_types: self.endpoint_types.clone(),
            context_length_tokens: self.context_length,
            role: self.role,
            migration_limit: self.migration_limit,
            user_data: self.user_data.clone(),
            tool_parser: self.tool_parser.clone(),
            reasoning_parser: self.reasoning_parser.clone(),
            artifacts,
            grace: duration("grace", self.grace_s)?,
            limits: RequestLimits {
                max_running: self.max_running,
                max_waiting: self.max_waiting,
                request_timeout: limit("request_timeout", self.request_timeout_s)?,
                idle_timeout: limit("idle_timeout", self.idle_timeout_s)?,
            },
            canary: CanaryConfig {
                interval: limit("canary_interval", self.canary_interval_s)?,
                timeout: duration("canary_timeout", self.canary_timeout_s)?,
                ..CanaryConfig::default()
            },
            ..WorkerConfig::default()
        };
        config.validate()?;
        Ok(config)
    }
}

fn duration(name: &str, seconds: f64) -> Result<Duration, EngineError> {
    Duration::try_from_secs_f64(seconds).map_err(|error| EngineError::invalid_argument(name, error))
}

/// Converts seconds to a limit; 0 means no limit.
fn limit(name: &str, seconds: f64) -> Result<Option<Duration>, EngineError> {
    duration(name, seconds).map(|limit| (!limit.is_zero()).then_some(limit))
}

/// The files made from a GGUF file's metadata.
#[cfg(feature = "gguf")]
fn of_gguf(path: &Path) -> Result<ModelFolder, EngineError> {
    let files = genset_engine_candle::load::gguf_files(path)
        .map_err(|error| EngineError::from(error).with_at(At::other("model_path")))?;
    let files = files.into_iter().map(|file| (file.name, file.content));
    ModelFolder::from_files("model", path, files)
        .map_err(|error| EngineError::invalid_argument("model_path", error))
}

#[cfg(not(feature = "gguf"))]
fn of_gguf(path: &Path) -> Result<ModelFolder, EngineError> {
    let problem = format!(
        "{} is a GGUF file, which this build of the native module does not read (feature `gguf`); give the model's folder",
        path.display()
    );
    Err(EngineError::unsupported(At::other("model_path"), problem))
}

fn read_template(path: &PathBuf) -> Result<Vec<u8>, EngineError> {
    let problem = |problem: String| {
        let text = format!("{}: {problem}", path.display());
        EngineError::invalid_argument("chat_template", text)
    };
    let size = std::fs::metadata(path)
        .map_err(|error| problem(error.to_string()))?
        .len();
    if size > MAX_TEMPLATE_BYTES {
        return Err(problem(format!("{size} bytes are no chat template")));
    }
    std::fs::read(path).map_err(|error| problem(error.to_string()))
}

/// A served model.
#[derive(Debug)]
pub(crate) struct ServedModel {
    pub(crate) name: EndpointName,
    pub(crate) worker: WorkerHandle,
    pub(crate) engine: Arc<HandlerEngine>,
    /// Its metrics, shown while it is served.
    _metrics: MetricsRegistry,
}

/// Starts a model's Worker, which probes the handler and lists it by itself.
///
/// # Errors
/// `InvalidArgument`, naming the invalid argument of `register_llm` or the file at fault.
pub(crate) async fn serve(
    runtime: &Runtime,
    mut spec: ModelSpec,
    handler: CallHandler,
    hooks: Option<CallHandler>,
) -> Result<ServedModel, EngineError> {
    let name = spec.name()?;
    let read = tokio::task::spawn_blocking(move || {
        let artifacts = spec.artifacts();
        (spec, artifacts)
    });
    let (spec, artifacts) = read.await.map_err(|error| {
        EngineError::internal("reading the model's files failed").with_source(error)
    })?;
    let config = spec.worker_config(artifacts?)?;
    let engine = HandlerEngine::new(handler, hooks, spec.engine);
    let registrar = Arc::new(RuntimeRegistrar::new(runtime.clone(), name.clone()));
    let metrics = runtime
        .metrics()
        .labelled(ENDPOINT_LABEL, &name.to_string());
    let (id, shown) = (spec.worker_id, metrics.clone());
    let worker = Worker::new(id, engine.clone(), config, registrar, metrics).spawn();
    Ok(ServedModel {
        name,
        worker,
        engine,
        _metrics: shown,
    })
}

/// The result of a Worker that has ended: its exit code, or the error that ended it.
///
/// # Errors
/// The error that ended it.
pub(crate) fn ended(report: Report) -> Result<Option<u64>, EngineError> {
    match (report.outcome.exit_code(), report.error) {
        (0, _) => Ok(Some(0)),
        (_, Some(error)) => Err(error),
        (3, None) => Ok(Some(3)),
        (code, None) => {
            let message = format!(
                "the worker ended with exit code {code}: {:?}",
                report.outcome
            );
            Err(EngineError::new(ErrorKind::Internal, message))
        }
    }
}
