//! Loads a GGUF file with llama.cpp, and derives what the engine declares.

use std::num::NonZeroU32;
use std::sync::{Arc, OnceLock};
use std::thread::available_parallelism;

use genset_backend_common::config::Deviation;
use genset_backend_common::{Capabilities, EngineConfig, EngineError, StartContext, TokenId};
use genset_sampling::Sampler;
use genset_sampling::guided::{GuideFactory, Vocabulary, VocabularyError};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::{LogOptions, send_logs_to_tracing};

use crate::LlamaCppArgs;

/// The most log probabilities that a request may ask for.
const MAX_LOGPROBS: u32 = 20;

/// The limit that llama.cpp is compiled with (`LLAMA_MAX_SEQ`).
const MAX_SLOTS: u32 = 256;

/// The default number of tokens whose keys and values are kept: a few GiB for a model of 8 billion parameters.
const DEFAULT_CELLS: u32 = 32_768;

/// The number of a step's tokens that llama.cpp computes at once. It allocates intermediate results for this many.
const MICRO_BATCH: u32 = 512;

/// `LLAMA_FLASH_ATTN_TYPE_AUTO` and `_DISABLED`. On a CPU, flash attention adds values up in 16 bits, in an order that depends on the
/// batch: answers would change with other requests in the batch, and after a migration.
const AUTO: i32 = -1;
const OFF: i32 = 0;

/// The result of a start.
pub(crate) struct Loaded {
    pub(crate) config: EngineConfig,
    pub(crate) guides: Option<Arc<GuideFactory>>,
}

/// The flags, checked against the model.
pub(crate) struct Settings {
    pub(crate) slots: usize,
    /// Tokens per step.
    pub(crate) batch: usize,
    /// Tokens whose keys and values are kept.
    pub(crate) cells: usize,
    context_length: u32,
    params: LlamaContextParams,
}

/// llama.cpp, initialized once per process.
fn backend() -> Result<&'static LlamaBackend, EngineError> {
    static BACKEND: OnceLock<Option<LlamaBackend>> = OnceLock::new();
    let init = || {
        send_logs_to_tracing(LogOptions::default());
        LlamaBackend::init().ok()
    };
    let taken =
        "something else in this process runs llama.cpp; start the engine in a process of its own";
    { BACKEND.get_or_init(init).as_ref() }.ok_or_else(|| EngineError::internal(taken))
}

/// Loads the model's weights. Blocks until they are loaded, or until `was_given_up`.
///
/// # Errors
/// `InvalidArgument`, naming the flag.
pub(crate) fn load(
    args: &LlamaCppArgs,
    start: &StartContext,
    was_given_up: impl Fn() -> bool + 'static,
) -> Result<(LlamaModel, Settings), EngineError> {
    let shown = args.model.display();
    let failed = |problem: String| EngineError::invalid_argument("MODEL", problem);
    if !args.model.is_file() {
        return Err(failed(format!("{shown} is no file; name a GGUF file")));
    }
    let progress = start.progress.clone();
    let mut params = LlamaModelParams::default().with_progress_callback(move |fraction| {
        progress.report("loading weights with llama.cpp", Some(fraction));
        !was_given_up()
    });
    if let Some(layers) = args.gpu_layers {
        params = params.with_n_gpu_layers(layers);
    }
    let model = LlamaModel::load_from_file(backend()?, &args.model, &params).map_err(|error| {
        let hint = "its own words stand in the log before this";
        failed(format!("llama.cpp cannot load {shown}: {error}; {hint}"))
    })?;
    // llama.cpp returns -1 for models without one.
    if model.decode_start_token().0 >= 0 {
        let problem = format!("{shown} has an encoder beside its decoder, which is not supported");
        return Err(failed(problem));
    }
    let computes_on_gpu = backend()?.supports_gpu_offload() && args.gpu_layers != Some(0);
    let settings = settings(args, model.n_ctx_train(), computes_on_gpu)?;
    Ok((model, settings))
}

/// Checks the flags against the model's training context.
fn settings(
    args: &LlamaCppArgs,
    trained_on: u32,
    computes_on_gpu: bool,
) -> Result<Settings, EngineError> {
    let wrong =
        |flag: &'static str, problem: String| Err(EngineError::invalid_argument(flag, problem));
    let slots = args.max_num_seqs.get();
    if slots > MAX_SLOTS {
        let problem = format!("llama.cpp runs at most {MAX_SLOTS} sequences at once, not {slots}");
        return wrong("--max-num-seqs", problem);
    }
    let batch = args.max_num_batched_tokens.get();
    if batch < slots {
        let problem =
            format!("must be at least --max-num-seqs, {slots}: each takes a token a step");
        return wrong("--max-num-batched-tokens", problem);
    }
    let asked = args.max_model_len.map(NonZeroU32::get);
    let context_length = asked.unwrap_or(trained_on.min(DEFAULT_CELLS));
    if context_length > trained_on {
        let problem = format!("the model holds {trained_on} tokens, not {context_length}");
        return wrong("--max-model-len", problem);
    }
    let all = context_length.saturating_mul(slots);
    let default = NonZeroU32::new(all.min(DEFAULT_CELLS.max(context_length)));
    let cells = args.kv_cache_tokens.or(default);
    let count = cells.map_or(0, NonZeroU32::get);
    if count < context_length {
        let problem = format!(
            "{count} tokens are fewer than one sequence may have, {context_length}; raise it, or lower --max-model-len"
        );
        return wrong("--kv-cache-tokens", problem);
    }
    let threads = args.threads.map(NonZeroU32::get).or_else(|| {
        let threads = available_parallelism().ok()?;
        u32::try_from(threads.get()).ok()
    });
    let threads = threads.and_then(|threads| i32::try_from(threads).ok());
    let threads = threads.unwrap_or(1);
    let flash_attention = if computes_on_gpu { AUTO } else { OFF };
    let params = LlamaContextParams::default()
        .with_n_ctx(cells)
        .with_n_seq_max(slots)
        .with_n_batch(batch)
        .with_n_ubatch(batch.min(MICRO_BATCH))
        .with_n_threads(threads)
        .with_n_threads_batch(threads)
        // One memory for all sequences, which may share cells.
        .with_kv_unified(true)
        .with_flash_attention_policy(flash_attention)
        // A prefix can be cut only if all of it is in memory.
        .with_swa_full(true);
    let wide = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
    Ok(Settings {
        slots: wide(slots),
        batch: wide(batch),
        cells: wide(count),
        context_length,
        params,
    })
}

/// Allocates the keys and values, and the batch.
///
/// # Errors
/// `InvalidArgument`, naming the flag.
pub(crate) fn context<'model>(
    model: &'model LlamaModel,
    settings: &Settings,
) -> Result<LlamaContext<'model>, EngineError> {
    let made = model.new_context(backend()?, settings.params.clone());
    made.map_err(|error| {
        let problem = format!(
            "llama.cpp makes no room for {} tokens: {error}; lower it, or --max-num-seqs",
            settings.cells
        );
        EngineError::invalid_argument("--kv-cache-tokens", problem)
    })
}

/// What the engine declares, and the compiler of its grammars.
pub(crate) fn loaded(
    args: &LlamaCppArgs,
    start: &StartContext,
    model: &LlamaModel,
    settings: &Settings,
) -> Loaded {
    start.progress.report("preparing guided decoding", None);
    let guides = match guides(model) {
        Ok(guides) => Some(Arc::new(guides)),
        Err(error) => {
            tracing::warn!(%error, "no guided decoding with this vocabulary");
            None
        }
    };
    let name = args.model.file_stem().unwrap_or_default();
    let mut config = EngineConfig::new(name.to_string_lossy(), settings.context_length)
        .with_vocab_size(u32::try_from(model.n_vocab()).unwrap_or(0))
        .with_capabilities(capabilities(guides.is_some()));
    config.max_num_seqs = u32::try_from(settings.slots).ok();
    config.max_num_batched_tokens = u32::try_from(settings.batch).ok();
    Loaded { config, guides }
}

/// What llama.cpp and Genset's sampler support together. The Worker refuses everything else by name.
fn capabilities(can_guide: bool) -> Capabilities {
    let mut can = Capabilities::tokens()
        .with_resume()
        .with_sampling(Sampler::OPTIONS)
        // A row that is alone in a batch is computed by another kernel.
        .with_deviations([Deviation::BatchVariant]);
    can.max_logprobs = Some(MAX_LOGPROBS);
    if can_guide {
        can.guided = GuideFactory::KINDS.into();
    }
    can
}

/// Makes the compiler of grammars from llama.cpp's bytes of each token.
fn guides(model: &LlamaModel) -> Result<GuideFactory, VocabularyError> {
    let vocab = model.vocab();
    let mut vocabulary = Vocabulary::unused(usize::try_from(model.n_vocab()).unwrap_or(0));
    let mut ends = Vec::new();
    for token in vocab.tokens() {
        let id = TokenId::try_from(token.0).unwrap_or(TokenId::MAX);
        let bytes = vocab.token_to_piece(token, false, None);
        if !bytes.is_empty() {
            vocabulary.set_text(id, bytes);
        } else {
            let name = vocab.token_to_piece(token, true, None);
            if !name.is_empty() {
                vocabulary.set_special(id, String::from_utf8_lossy(&name).into_owned());
            }
        }
        if vocab.is_eog(token) {
            ends.push(id);
        }
    }
    GuideFactory::of_vocabulary(vocabulary, &ends)
}
