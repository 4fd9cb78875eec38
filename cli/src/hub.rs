//! Models by name: a `MODEL` that is no path comes from the hub, and `genset pull`, `list` and `rm` look after those that are
//! there.

mod commands;
mod shown;

use std::path::{Path, PathBuf};

use genset_backend_common::{EngineError, ErrorKind};
use genset_engine_candle::CandleArgs;
use genset_engine_launcher::ServerKind;
use genset_hub::{Fetched, Hub, HubError, HubSettings, ModelRef, Needs};
use genset_runtime::WorkerArgs;

use crate::args::{EngineArgs, EngineKind, OutputKind};
use crate::engine::apart::Apart;
use crate::input::note;

pub(crate) use commands::{ListArgs, PullArgs, RmArgs, list, pull, rm};
use shown::Shown;

/// What is downloaded for an engine; `None` for one that reads no model.
fn needs(output: &OutputKind) -> Option<Needs> {
    let OutputKind::Engine(engine) = output else {
        return None;
    };
    Some(match engine {
        EngineKind::Candle | EngineKind::Apart(Apart::MistralRs) => Needs::WeightsOrGguf,
        EngineKind::Apart(Apart::LibLlama) | EngineKind::Server(ServerKind::LlamaCpp) => {
            Needs::Gguf
        }
        EngineKind::Server(ServerKind::Vllm | ServerKind::Sglang | ServerKind::Trtllm) => {
            Needs::Weights
        }
        // Their tokens come from the tokenizer; an engine in a process of its own reads weights by itself.
        EngineKind::EchoCore
        | EngineKind::Sample
        | EngineKind::Scripted
        | EngineKind::Mocker
        | EngineKind::Cmd => Needs::Config,
        EngineKind::EchoFull => return None,
    })
}

/// A model of the hub, where `path` is nothing on this disk and could name one.
pub(crate) fn named(path: &Path) -> Option<ModelRef> {
    let text = path.to_str()?;
    let is_named = text.starts_with("hf://") || !path.exists();
    is_named.then(|| text.parse().ok())?
}

/// Whether the flags name a model of the hub, for which there are no files yet that could be checked.
pub(crate) fn is_asked(worker: &WorkerArgs, model_config: Option<&Path>) -> bool {
    let paths = [worker.model_path.as_deref(), model_config];
    paths
        .into_iter()
        .flatten()
        .any(|path| named(path).is_some())
}

/// Puts the paths of what was fetched in place of names of the hub, and names the served model after its repository.
///
/// # Errors
/// `InvalidArgument`, saying what to do, or `Unavailable`: the hub is away, and the model is not here.
pub(crate) fn bring(
    output: &OutputKind,
    worker: &mut WorkerArgs,
    engine: &mut EngineArgs,
) -> Result<(), EngineError> {
    let Some(needs) = needs(output) else {
        return Ok(());
    };
    if let Some(model) = worker.model_path.as_deref().and_then(named) {
        // The tokenizer is in the file.
        let is_inside = needs == Needs::Config && model.names_gguf();
        let needs = if is_inside { Needs::Gguf } else { needs };
        worker.model_path = Some(fetch("MODEL", &model, needs)?.path);
        worker
            .model_name
            .get_or_insert_with(|| model.repo.to_string());
    }
    if let Some(model) = engine.model_config.as_deref().and_then(named) {
        engine.model_config = Some(fetch("--model-config", &model, Needs::Config)?.path);
    }
    if output.is(EngineKind::Candle) {
        bring_draft(&mut engine.candle)?;
    }
    Ok(())
}

/// Puts the path of what was fetched in place of a draft model's name on the hub.
///
/// # Errors
/// As [`bring`].
pub(crate) fn bring_draft(candle: &mut CandleArgs) -> Result<(), EngineError> {
    if let Some(path) = &mut candle.speculation.draft_model {
        *path = local("--draft-model", path, Needs::WeightsOrGguf)?;
    }
    Ok(())
}

/// Where the engine of `out=candle` finds a model: at `path`, or fetched where that is a name of the hub.
///
/// # Errors
/// As [`bring`].
pub(crate) fn of_candle(path: &Path) -> Result<PathBuf, EngineError> {
    local("MODEL", path, Needs::WeightsOrGguf)
}

/// Where a tokenizer lies that the setting `at` names: at `path`, or fetched where that is a name of the hub.
///
/// # Errors
/// As [`bring`].
pub(crate) fn tokenizer(at: &'static str, path: &Path) -> Result<PathBuf, EngineError> {
    local(at, path, Needs::Config)
}

fn local(at: &'static str, path: &Path, needs: Needs) -> Result<PathBuf, EngineError> {
    match named(path) {
        Some(model) => Ok(fetch(at, &model, needs)?.path),
        None => Ok(path.to_owned()),
    }
}

/// Fetches a model that the setting `at` names, and shows how far it is.
fn fetch(at: &'static str, model: &ModelRef, needs: Needs) -> Result<Fetched, EngineError> {
    let bad = |error: &dyn std::fmt::Display| EngineError::invalid_argument(at, error);
    let hub = hub().map_err(|error| bad(&error))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| bad(&error))?;
    let shown = Shown::new(model);
    let fetched = runtime.block_on(hub.fetch(model, needs, &shown));
    shown.finish();
    let fetched = fetched.map_err(|error| match error.is_passing() {
        true => EngineError::new(ErrorKind::Unavailable, error.to_string()).with_at(at),
        false => bad(&error),
    })?;
    if let Some(error) = &fetched.stale {
        note(format_args!(
            "warning: {error}; the copy of {model} that is here is used, commit {}",
            fetched.commit
        ));
    }
    Ok(fetched)
}

/// The hub, as its variables say.
pub(crate) fn hub() -> Result<Hub, HubError> {
    Ok(Hub::new(HubSettings::from_variables(|name| {
        std::env::var_os(name)
    })?))
}
