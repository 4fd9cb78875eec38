//! [`OpenSpeculation`]: builds speculation from its flags and files.

use std::collections::HashMap;
use std::path::Path;

use candle_core::Device;
use genset_backend_common::{EngineError, Role, StartContext};
use tokenizers::Tokenizer;

use super::{KvCacheSpec, RealForward, allocate, load_model};
use crate::args::SpeculationSettings;
use crate::engine::speculation::draft_model::DraftModel;
use crate::engine::speculation::{Method, Speculation};
use crate::error::LoadError;
use crate::load::{MemoryEstimate, OpenModel, WeightOptions, kv_bytes_per_block};

const DRAFT_MODEL: &str = "--draft-model";

/// Speculation whose draft model, if there is one, is opened but not loaded.
#[derive(Debug)]
pub(super) struct OpenSpeculation {
    /// The most drafts per sequence and step.
    pub(super) num_tokens: usize,
    draft_model: Option<OpenModel>,
}

impl OpenSpeculation {
    /// Opens the draft model of `settings` for the model `target`.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the flag, if the vocabulary differs or the worker's role does not allow speculation; else
    /// an error of the files.
    pub(super) fn open(
        settings: SpeculationSettings,
        target: &OpenModel,
        model_config: Option<&Path>,
        role: Role,
    ) -> Result<Self, EngineError> {
        let draft_model = match settings.draft_model {
            None => None,
            Some(_) if role != Role::Aggregated => {
                let problem = format!(
                    "a {role} worker takes no draft model: the draft's KV blocks are not transferred with those of the prompt; \
                     use --speculate ngram on decode workers"
                );
                return Err(EngineError::invalid_argument(DRAFT_MODEL, problem));
            }
            Some(path) => {
                let draft = OpenModel::open(&path).map_err(of_draft)?;
                check_vocabulary(&draft, target, model_config)
                    .map_err(|problem| EngineError::invalid_argument(DRAFT_MODEL, problem))?;
                Some(draft)
            }
        };
        Ok(Self {
            num_tokens: settings.num_tokens,
            draft_model,
        })
    }

    /// Whether disaggregated prefill and decode are supported.
    pub(super) fn can_be_apart(&self) -> bool {
        self.draft_model.is_none()
    }

    /// The draft model's memory with steps of `step_tokens`, if there is one.
    pub(super) fn memory(
        &self,
        options: &WeightOptions,
        step_tokens: usize,
    ) -> Option<MemoryEstimate> {
        let draft = self.draft_model.as_ref()?;
        Some(draft.memory(options, step_tokens))
    }

    /// Bytes of a KV block of the draft model.
    pub(super) fn kv_bytes_per_block(&self, block_size: usize, bytes_per_value: usize) -> u64 {
        self.draft_model.as_ref().map_or(0, |draft| {
            kv_bytes_per_block(&draft.config, block_size, bytes_per_value)
        })
    }

    /// Loads the draft model, with a KV cache like the large model's. `vocab_size` is the large model's.
    ///
    /// # Errors
    /// The weights cannot be read, or the cache cannot be allocated.
    pub(super) fn load(
        self,
        options: WeightOptions,
        spec: &KvCacheSpec,
        vocab_size: usize,
        enforce_eager: bool,
        start: &StartContext,
        was_given_up: &dyn Fn() -> bool,
    ) -> Result<Speculation, EngineError> {
        let device: Device = options.device.clone();
        let method = match self.draft_model {
            None => Method::Ngram,
            Some(draft) => {
                let loaded = load_model(&draft, options, start, was_given_up);
                let (model, _) = loaded.map_err(of_draft)?;
                let cache = allocate(&draft.config, spec, &device)?;
                let forward = Box::new(RealForward::new(model, cache, enforce_eager));
                tracing::info!(draft_model = draft.name, "the draft model is loaded");
                Method::DraftModel(Box::new(DraftModel::new(
                    forward,
                    draft.config.vocab_size,
                    vocab_size,
                    draft.config.context_length,
                )))
            }
        };
        Ok(Speculation {
            num_tokens: self.num_tokens,
            method,
        })
    }
}

/// Attributes a fault of the draft model to the flag that names the model.
fn of_draft(error: impl Into<EngineError>) -> EngineError {
    error.into().with_at(DRAFT_MODEL)
}

/// Rejects a draft model whose tokens have other meanings. If both have a tokenizer, the sizes of the models' vocabularies may
/// differ: some are padded.
fn check_vocabulary(
    draft: &OpenModel,
    target: &OpenModel,
    model_config: Option<&Path>,
) -> Result<(), String> {
    let of =
        |model: &OpenModel, folder| vocabulary(model, folder).map_err(|error| error.to_string());
    let (of_draft, of_target) = (of(draft, None)?, of(target, model_config)?);
    let names = (&draft.name, &target.name);
    match of_draft.zip(of_target) {
        Some((draft, target)) if draft != target => {
            let differs = |(token, id): &(&String, &u32)| draft.get(*token) != Some(*id);
            let different = target.iter().filter(differs).count();
            Err(format!(
                "{} has another vocabulary than {}: of {} tokens {different} are others or have other ids; take a smaller model of \
                 the same family",
                names.0,
                names.1,
                target.len(),
            ))
        }
        Some(_) => Ok(()),
        None if draft.config.vocab_size == target.config.vocab_size => Ok(()),
        None => Err(format!(
            "{} has another vocabulary than {}: {} tokens, not {}; take a smaller model of the same family",
            names.0, names.1, draft.config.vocab_size, target.config.vocab_size
        )),
    }
}

/// The ids of a model's tokens; `None` without a readable tokenizer.
fn vocabulary(
    model: &OpenModel,
    folder: Option<&Path>,
) -> Result<Option<HashMap<String, u32>>, LoadError> {
    let files = match model.files(folder) {
        Ok(files) => files,
        Err(LoadError::NoTokenizer { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let file = files.iter().find(|file| file.name == "tokenizer.json");
    let text = file.and_then(|file| str::from_utf8(&file.content).ok());
    // Parsed by the tokenizers crate's own code: a generic function would be compiled here once more.
    let tokenizer = text.and_then(|text| text.parse::<Tokenizer>().ok());
    Ok(tokenizer.map(|tokenizer| tokenizer.get_vocab(true)))
}
