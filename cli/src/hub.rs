//! Models by name: a `MODEL` that is not a path comes from the hub. `genset pull`, `list` and `rm` manage the downloaded ones.

mod commands;
mod shown;

use std::io;
use std::path::{Path, PathBuf};

use genset_backend_common::{EngineError, ErrorKind};
use genset_engine_candle::CandleArgs;
use genset_engine_launcher::ServerKind;
use genset_hub::{Fetched, Hub, HubError, HubSettings, ModelRef, Needs};
use genset_runtime::WorkerArgs;

use crate::args::{EngineArgs, EngineKind, OutputKind};
use crate::engine::apart::Apart;
use crate::input::note;
use crate::threads;

pub(crate) use commands::{ListArgs, PullArgs, RmArgs, list, pull, rm};
use shown::Shown;

/// The files to download for an engine; `None` if it reads no model.
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
        // These need only the tokenizer; an engine in its own process reads weights by itself.
        EngineKind::EchoCore
        | EngineKind::Sample
        | EngineKind::Scripted
        | EngineKind::Mocker
        | EngineKind::Cmd => Needs::Config,
        EngineKind::EchoFull => return None,
    })
}

/// A model of the hub, if `path` does not exist on this disk and is a valid name.
pub(crate) fn named(path: &Path) -> Option<ModelRef> {
    let text = path.to_str()?;
    let is_here = path.try_exists().unwrap_or_else(|error| {
        // What this process may not look at is a path. Nothing is in a file.
        error.kind() != io::ErrorKind::NotADirectory
    });
    let is_named = text.starts_with("hf://") || !is_here;
    is_named.then(|| text.parse().ok())?
}

/// Whether the flags name a model of the hub, whose files do not exist yet and cannot be checked.
pub(crate) fn is_asked(worker: &WorkerArgs, model_config: Option<&Path>) -> bool {
    let paths = [worker.model_path.as_deref(), model_config];
    paths
        .into_iter()
        .flatten()
        .any(|path| named(path).is_some())
}

/// Replaces names of the hub by the paths of the downloaded files, and names the served model after its repository.
///
/// # Errors
/// `InvalidArgument`, saying what to do, or `Unavailable`: the hub is unreachable and the model is not cached.
pub(crate) fn bring(
    output: &OutputKind,
    worker: &mut WorkerArgs,
    engine: &mut EngineArgs,
) -> Result<(), EngineError> {
    let Some(needs) = needs(output) else {
        return Ok(());
    };
    if let Some(model) = worker.model_path.as_deref().and_then(named) {
        // The file contains the tokenizer.
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

/// Replaces a draft model's name on the hub by the path of the downloaded files.
///
/// # Errors
/// As [`bring`].
pub(crate) fn bring_draft(candle: &mut CandleArgs) -> Result<(), EngineError> {
    if let Some(path) = &mut candle.speculation.draft_model {
        *path = local("--draft-model", path, Needs::WeightsOrGguf)?;
    }
    Ok(())
}

/// The path of a model for `out=candle`: `path` itself, or the downloaded files if it is a name of the hub.
///
/// # Errors
/// As [`bring`].
pub(crate) fn of_candle(path: &Path) -> Result<PathBuf, EngineError> {
    local("MODEL", path, Needs::WeightsOrGguf)
}

/// The path of a tokenizer for the setting `at`: `path` itself, or the downloaded files if it is a name of the hub.
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

/// Downloads the model of the setting `at`, and shows the progress.
fn fetch(at: &'static str, model: &ModelRef, needs: Needs) -> Result<Fetched, EngineError> {
    let bad = |error: &dyn std::fmt::Display| EngineError::invalid_argument(at, error);
    let hub = hub().map_err(|error| bad(&error))?;
    let runtime = threads::two()?;
    let shown = Shown::new(model);
    let fetched = runtime.block_on(hub.fetch(model, needs, &shown));
    shown.finish();
    let fetched = fetched.map_err(|error| {
        let mut told = error.to_string();
        // The mistyped path of a file looks like a name.
        if model.repo.name().ends_with(".gguf") {
            told = format!("there is no file {model} here, and {told}");
        }
        match error.is_passing() {
            true => EngineError::new(ErrorKind::Unavailable, told).with_at(at),
            false => bad(&told),
        }
    })?;
    if let Some(error) = &fetched.stale {
        note(format_args!(
            "warning: {error}; the copy of {model} that is here is used, commit {}",
            fetched.commit
        ));
    }
    Ok(fetched)
}

/// The hub, configured by its environment variables.
pub(crate) fn hub() -> Result<Hub, HubError> {
    Ok(Hub::new(HubSettings::from_variables(|name| {
        std::env::var_os(name)
    })?))
}
