//! `out=mocker`: simulates vLLM's timing and memory, with a model's tokens and without its weights.

use std::collections::BTreeSet;
use std::sync::Arc;

use genset_backend_common::worker::WorkerConfig;
use genset_backend_common::{EngineError, LLMEngine, TokenId};
use genset_engine_mocker::{MockerArgs, MockerEngine, MockerModel};
use genset_runtime::ModelFolder;
use serde::Deserialize;

use super::{context_length, model_folder, vocab_size};
use crate::args::RunConfig;

/// Builds the engine (which does not start it) and the worker's configuration.
///
/// # Errors
/// `InvalidArgument`, naming the flag or the file.
pub(super) fn build(config: &RunConfig) -> Result<(Arc<dyn LLMEngine>, WorkerConfig), EngineError> {
    let folder = model_folder(config)?;
    let args = match &config.engine_args.launcher.extra_engine_args {
        Some(path) => MockerArgs::load(path)?,
        None => MockerArgs::default(),
    };
    let context = context_length(&folder, config.worker.context_length)?;
    let mut model = MockerModel::new(vocab_size(&folder)?, context);
    model.unused_tokens = added_tokens(&folder)?;
    let engine = MockerEngine::try_new(args, model)?;
    let worker = config.worker.worker_config(Some(folder))?;
    Ok((Arc::new(engine), worker))
}

/// Tokens that a tokenizer adds to its text vocabulary: ends of sequence, roles, tool markup.
#[derive(Deserialize)]
struct Tokenizer {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: TokenId,
}

fn added_tokens(folder: &ModelFolder) -> Result<BTreeSet<TokenId>, EngineError> {
    let mut files = folder.artifacts.iter();
    let bytes = files
        .find(|file| file.reference.name == "tokenizer.json")
        .map_or(&b"{}"[..], |file| &file.content);
    let tokenizer: Tokenizer = serde_json::from_slice(bytes)
        .map_err(|error| EngineError::invalid_argument("tokenizer.json", error))?;
    Ok(tokenizer
        .added_tokens
        .into_iter()
        .map(|token| token.id)
        .collect())
}
