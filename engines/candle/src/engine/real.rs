//! [`RealLoader`]: loads files to a model on its device, with its KV cache and its grammars.

mod limits;
mod process;
mod speculation;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use genset_backend_common::config::Deviation;
use genset_backend_common::{Capabilities, EngineConfig, EngineError, Role, StartContext, TokenId};
use genset_sampling::guided::GuideFactory;
use genset_scheduler::Limits;
use serde::Deserialize;
use serde_json::Value;

use self::limits::{limits, logit_rows};
use self::process::set_activation_bits;
pub(crate) use self::process::{set_isa, set_threads};
use self::speculation::OpenSpeculation;
use super::adapters::{AdapterLimits, Adapters};
use super::capabilities;
use super::forward::{Forward, ForwardError};
use super::thread::{Loaded, Loader};
use super::transfer::hex;
use crate::args::{CandleArgs, DeviceChoice, DtypeChoice};
use crate::error::LoadError;
use crate::load::{
    AdapterReader, KvCacheOptions, LoadProgress, ModelFile, OpenModel, WeightOptions,
    available_memory, kv_cache_size,
};
#[cfg(feature = "cuda")]
use crate::model::graphs::Graphs;
use crate::model::{
    KvCache, KvCacheSpec, KvLayout, Model, ModelConfig, ProductTime, SlowMatrix, StepBatch,
    WeightType, gpu,
};

/// Loads a checkout folder or a GGUF file.
#[derive(Debug)]
pub(super) struct RealLoader {
    args: CandleArgs,
    model: PathBuf,
    model_config: Option<PathBuf>,
}

/// The model and its KV cache.
struct RealForward {
    model: Model,
    cache: KvCache,
    #[cfg(feature = "cuda")]
    graphs: Graphs,
}

impl RealForward {
    #[cfg_attr(
        not(feature = "cuda"),
        expect(unused_variables, reason = "the CPU has no graphs")
    )]
    fn new(model: Model, cache: KvCache, enforce_eager: bool) -> Self {
        Self {
            model,
            cache,
            #[cfg(feature = "cuda")]
            graphs: Graphs::new(enforce_eager),
        }
    }
}

impl Forward for RealForward {
    fn forward(&mut self, batch: &StepBatch) -> Result<Tensor, ForwardError> {
        #[cfg(feature = "cuda")]
        if let Some(logits) = self.graphs.forward(&self.model, &mut self.cache, batch)? {
            return Ok(logits);
        }
        Ok(self.model.forward(&mut self.cache, batch)?)
    }

    fn time_products(
        &self,
        sequences: usize,
        repeats: usize,
    ) -> Result<Option<Vec<ProductTime>>, ForwardError> {
        Ok(self.model.time_products(sequences, repeats)?)
    }

    fn kv_layout(&self) -> Option<&KvLayout> {
        self.cache.layout()
    }

    fn kv_block(&self, block: usize) -> Option<&[u8]> {
        self.cache.block(block)
    }

    fn kv_block_mut(&mut self, block: usize) -> Option<&mut [u8]> {
        self.cache.block_mut(block)
    }
}

impl RealLoader {
    pub(super) fn new(args: &CandleArgs, model: &Path, model_config: Option<PathBuf>) -> Self {
        Self {
            args: args.clone(),
            model: model.to_owned(),
            model_config,
        }
    }
}

impl Loader<Loaded> for RealLoader {
    fn load(
        &self,
        start: &StartContext,
        was_given_up: &dyn Fn() -> bool,
    ) -> Result<Loaded, EngineError> {
        set_threads(self.args.threads)?;
        set_isa(self.args.isa)?;
        let speculation = self.args.speculation.settings()?;
        if self.args.block_size == 0 {
            return Err(EngineError::invalid_argument(
                "--block-size",
                "must be at least 1",
            ));
        }
        start.progress.report("reading the model's headers", None);
        let mut open = OpenModel::open(&self.model)?;
        if let Some(most) = self.args.context_length_tokens {
            open.config.context_length = open.config.context_length.min(wide(most.get()));
        }
        let options = weight_options(&self.args)?;
        let (device, dtype) = (options.device.clone(), options.dtype);
        let limits = limits(&self.args, device.is_cpu())?;
        let model_config = self.model_config.as_deref();
        let speculation = speculation
            .map(|settings| OpenSpeculation::open(settings, &open, model_config, start.role))
            .transpose()?;
        let can_be_apart = speculation
            .as_ref()
            .is_none_or(OpenSpeculation::can_be_apart);
        let spec = self.kv_cache(&open, speculation.as_ref(), &options, &limits)?;
        let guides = self.guides(&open, start)?;
        let (model, weights) = load_model(&open, options.clone(), start, was_given_up)?;
        tell_slow(&model);
        start.progress.report("allocating the KV cache", None);
        let with_spare = KvCacheSpec {
            num_blocks: spec.num_blocks + 1,
            ..spec.clone()
        };
        let cache = allocate(&open.config, &with_spare, &device)?;
        let vocab_size = open.config.vocab_size;
        let enforce_eager = self.args.enforce_eager;
        let speculation = speculation
            .map(|it| {
                it.load(
                    options,
                    &with_spare,
                    vocab_size,
                    enforce_eager,
                    start,
                    was_given_up,
                )
            })
            .transpose()?;
        let can_be_apart = can_be_apart && cache.layout().is_some();
        let adapters = self.adapters(&open.config, &device, dtype);
        let mut can = capabilities(guides.as_deref(), can_be_apart, adapters.is_some());
        if !device.is_cpu() {
            // Other kernels compute a row when the batch has more rows.
            can = can.with_deviations([Deviation::BatchVariant]);
        }
        let config = engine_config(&open, &limits, &spec, can);
        let KvCacheSpec {
            num_blocks,
            block_size,
            ..
        } = spec;
        tracing::info!(
            model = open.name,
            ?device,
            ?dtype,
            num_blocks,
            block_size,
            weights = weights.map(hex),
            "the model is loaded"
        );
        Ok(Loaded {
            forward: Box::new(RealForward::new(model, cache, enforce_eager)),
            speculation,
            config,
            limits,
            num_blocks,
            block_size,
            guides,
            kv_lease: Duration::from_secs(self.args.kv_lease.get().into()),
            weights,
            adapters,
        })
    }
}

impl RealLoader {
    /// The adapters' registry; `None` if adapters are disabled.
    fn adapters(
        &self,
        config: &ModelConfig,
        device: &Device,
        dtype: DType,
    ) -> Option<Arc<Adapters>> {
        let reader = AdapterReader {
            config: config.clone(),
            device: device.clone(),
            dtype,
        };
        let limits = AdapterLimits {
            count: wide(self.args.max_adapters),
            bytes: self.args.adapter_memory.0,
        };
        (limits.count > 0).then(|| Arc::new(Adapters::new(Box::new(reader), limits)))
    }

    /// Plans the KV cache, and rejects what would not fit in memory before anything is allocated.
    fn kv_cache(
        &self,
        open: &OpenModel,
        speculation: Option<&OpenSpeculation>,
        options: &WeightOptions,
        limits: &Limits,
    ) -> Result<KvCacheSpec, EngineError> {
        let dtype = kv_cache_dtype(self.args.kv_cache_dtype, options.dtype, &options.device)?;
        let block_size = wide(self.args.block_size);
        let wanted = KvCacheOptions {
            memory: self.args.kv_cache_memory.map(|size| size.0),
            block_size,
            max_num_seqs: limits.max_num_seqs,
            context_length: open.config.context_length,
            bytes_per_value: dtype.size_in_bytes(),
            more_bytes_per_block: speculation.map_or(0, |it| {
                it.kv_bytes_per_block(block_size, dtype.size_in_bytes())
            }),
        };
        let all_tokens = wanted.max_num_seqs.saturating_mul(wanted.context_length);
        let step_tokens = limits.max_num_batched_tokens.min(all_tokens);
        let memory = open.memory(options, step_tokens);
        let memory = match speculation.and_then(|it| it.memory(options, step_tokens)) {
            Some(other) => memory.beside(other),
            None => memory,
        };
        let drafts = speculation.map_or(0, |it| it.num_tokens);
        let rows = logit_rows(limits, drafts, step_tokens);
        let memory = memory.with_logits(rows, open.config.vocab_size);
        let available = available_memory(&options.device);
        let size = kv_cache_size(&open.config, &wanted, &memory, available)?;
        // Slots are numbered with 32 bits, and one block is allocated beyond the scheduler's.
        let most = wide(u32::MAX) / block_size - 1;
        Ok(KvCacheSpec {
            num_blocks: size.blocks.min(most),
            block_size,
            dtype,
        })
    }

    /// The grammar compiler; `None` for a model without a tokenizer, or with an unsupported one.
    fn guides(
        &self,
        open: &OpenModel,
        start: &StartContext,
    ) -> Result<Option<Arc<GuideFactory>>, EngineError> {
        let files = match open.files(self.model_config.as_deref()) {
            Ok(files) => files,
            Err(LoadError::NoTokenizer { problem, .. }) => {
                tracing::warn!(problem, "no tokenizer, so no guided decoding");
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let Some(tokenizer) = files.iter().find(|file| file.name == "tokenizer.json") else {
            return Ok(None);
        };
        start.progress.report("preparing guided decoding", None);
        match GuideFactory::try_new(
            &tokenizer.content,
            open.config.vocab_size,
            &eos_token_ids(&files),
        ) {
            Ok(guides) => Ok(Some(Arc::new(guides))),
            Err(error) => {
                tracing::warn!(%error, "no guided decoding with this tokenizer");
                Ok(None)
            }
        }
    }
}

/// The model's own end-of-sequence ids: those of `generation_config.json`, else of `config.json`, else the one that
/// `tokenizer_config.json` names.
fn eos_token_ids(files: &[ModelFile]) -> Vec<TokenId> {
    let read = |name: &str| {
        let file = files.iter().find(|file| file.name == name)?;
        let value: Value = serde_json::from_slice(&file.content).ok()?;
        let ids = value.get("eos_token_id")?;
        let ids = match ids.as_array() {
            Some(ids) => ids.iter().filter_map(token_id).collect(),
            None => vec![token_id(ids)?],
        };
        Some(ids).filter(|ids: &Vec<_>| !ids.is_empty())
    };
    read("generation_config.json")
        .or_else(|| read("config.json"))
        .or_else(|| Some(vec![named_end(files)?]))
        .unwrap_or_default()
}

/// The id of the end token that `tokenizer_config.json` names.
fn named_end(files: &[ModelFile]) -> Option<TokenId> {
    #[derive(Deserialize)]
    struct Tokenizer {
        added_tokens: Vec<AddedToken>,
    }
    #[derive(Deserialize)]
    struct AddedToken {
        id: TokenId,
        content: String,
    }
    let content = |name: &str| {
        let file = files.iter().find(|file| file.name == name)?;
        Some(file.content.as_slice())
    };
    let config: Value = serde_json::from_slice(content("tokenizer_config.json")?).ok()?;
    let eos = config.get("eos_token")?;
    let eos = eos.as_str().or_else(|| eos.get("content")?.as_str())?;
    let tokenizer: Tokenizer = serde_json::from_slice(content("tokenizer.json")?).ok()?;
    let mut added = tokenizer.added_tokens.into_iter();
    added.find(|token| token.content == eos).map(|it| it.id)
}

fn token_id(value: &Value) -> Option<TokenId> {
    value.as_u64().and_then(|id| TokenId::try_from(id).ok())
}

/// Loads the model; also returns the digest of its weights if the instance exchanges KV blocks with others.
fn load_model(
    open: &OpenModel,
    options: WeightOptions,
    start: &StartContext,
    was_given_up: &dyn Fn() -> bool,
) -> Result<(Model, Option<u64>), EngineError> {
    let mut weights = open.weights(options, loading_progress(start, was_given_up));
    if start.role != Role::Aggregated {
        weights = weights.with_digest(&open.config);
    }
    let model = Model::try_new(&open.config, &mut weights)?;
    Ok((model, weights.digest()))
}

/// The KV cache of a model.
fn allocate(
    config: &ModelConfig,
    spec: &KvCacheSpec,
    device: &Device,
) -> Result<KvCache, EngineError> {
    KvCache::try_new(config, spec.clone(), device).map_err(|error| {
        EngineError::internal("the KV cache could not be allocated; lower --kv-cache-memory")
            .with_source(error)
    })
}

/// Logs what is slow, its share of a step, and the remedy.
fn tell_slow(model: &Model) {
    let is_float = |matrix: &&SlowMatrix| matrix.dtype == WeightType::F32;
    let (floats, blocks): (Vec<_>, Vec<_>) = model.slow_matrices().iter().partition(is_float);
    let fixes = [
        "their weights are f32, four times the bytes of q8_0: leave out --quantize (rows must be multiples of 32)",
        "there are no kernels of ours for this processor; take one with AVX2 (x86-64)",
    ];
    for (matrices, fix) in [floats, blocks].into_iter().zip(fixes) {
        let Some(first) = matrices.first() else {
            continue;
        };
        let share: f64 = matrices.iter().map(|matrix| matrix.share).sum();
        tracing::warn!(
            matrices = matrices.len(),
            first = first.name,
            dtype = %first.dtype,
            "{:.0} % of a step's multiplications are slow: {fix}",
            share * 100.0,
        );
    }
}

/// Reports how much of the weights is loaded, and ends loading once nobody waits for them any more.
pub(crate) fn loading_progress<'a>(
    start: &'a StartContext,
    was_given_up: &'a dyn Fn() -> bool,
) -> impl FnMut(LoadProgress) -> Result<(), LoadError> + 'a {
    move |done| {
        let progress = &start.progress;
        progress.report("loading weights", Some(fraction(done)));
        if !was_given_up() {
            return Ok(());
        }
        let problem = candle_core::Error::Msg("the start was given up".into());
        Err(LoadError::candle("the model", problem))
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a bar on a screen"
)]
fn fraction(done: LoadProgress) -> f32 {
    (done.bytes as f64 / done.all_bytes.max(1) as f64) as f32
}

/// The device and the types that the flags ask for. Sets the bits of activations too.
pub(crate) fn weight_options(args: &CandleArgs) -> Result<WeightOptions, EngineError> {
    let device = device(args.device)?;
    set_activation_bits(args.activation_bits, device.is_cpu())?;
    Ok(WeightOptions {
        dtype: dtype(args.dtype, &device)?,
        device,
        quantization: args.quantize,
    })
}

fn device(choice: DeviceChoice) -> Result<Device, EngineError> {
    match choice {
        DeviceChoice::Cpu => Ok(Device::Cpu),
        DeviceChoice::Auto if !candle_core::utils::cuda_is_available() => Ok(Device::Cpu),
        DeviceChoice::Auto => Ok(gpu::open(0).unwrap_or_else(|error| {
            tracing::warn!(%error, "the GPU cannot be used; computing on the CPU");
            Device::Cpu
        })),
        DeviceChoice::Cuda(number) => gpu::open(number).map_err(|error| {
            let hint = if cfg!(feature = "cuda") {
                "see what nvidia-smi lists"
            } else {
                "this build computes on the CPU alone; build it with the cargo feature cuda"
            };
            let problem =
                format!("the GPU {number} cannot be used: {error}; {hint}, or use --device cpu");
            EngineError::invalid_argument("--device", problem)
        }),
    }
}

fn dtype(choice: DtypeChoice, device: &Device) -> Result<DType, EngineError> {
    match (choice, device.is_cpu()) {
        (DtypeChoice::Auto | DtypeChoice::F32, true) => Ok(DType::F32),
        (DtypeChoice::F16 | DtypeChoice::Bf16, true) => {
            let problem = "on the CPU activations are f32; leave it out, and choose the weights' type with --quantize";
            Err(EngineError::invalid_argument("--dtype", problem))
        }
        (DtypeChoice::Auto | DtypeChoice::Bf16, false) => Ok(DType::BF16),
        (DtypeChoice::F16, false) => Ok(DType::F16),
        (DtypeChoice::F32, false) => Err(EngineError::invalid_argument(
            "--dtype",
            "on a GPU it is bf16 or f16; f32 is not supported there",
        )),
    }
}

/// The type of the values in the KV cache, for activations in `dtype`.
fn kv_cache_dtype(
    choice: DtypeChoice,
    dtype: DType,
    device: &Device,
) -> Result<DType, EngineError> {
    let problem = match (choice, device.is_cpu()) {
        (DtypeChoice::Auto | DtypeChoice::F16, true) => return Ok(DType::F16),
        (DtypeChoice::F32, true) => return Ok(DType::F32),
        (DtypeChoice::Bf16, true) => "on the CPU it is f16 or f32".to_owned(),
        (DtypeChoice::Auto, false) => return Ok(dtype),
        (DtypeChoice::Bf16, false) if dtype == DType::BF16 => return Ok(dtype),
        (DtypeChoice::F16, false) if dtype == DType::F16 => return Ok(dtype),
        (DtypeChoice::F32 | DtypeChoice::F16 | DtypeChoice::Bf16, false) => {
            format!(
                "on a GPU it is the type that --dtype gives, here {}; leave it out",
                dtype.as_str()
            )
        }
    };
    Err(EngineError::invalid_argument("--kv-cache-dtype", problem))
}

fn engine_config(
    open: &OpenModel,
    limits: &Limits,
    spec: &KvCacheSpec,
    can: Capabilities,
) -> EngineConfig {
    let ModelConfig {
        context_length,
        vocab_size,
        ..
    } = open.config;
    let mut config = EngineConfig::new(open.name.clone(), narrow(context_length))
        .with_vocab_size(narrow(vocab_size))
        .with_capabilities(can);
    config.kv_block_size = std::num::NonZeroU32::new(narrow(spec.block_size));
    config.kv_total_blocks = u64::try_from(spec.num_blocks).ok();
    config.max_num_seqs = Some(narrow(limits.max_num_seqs));
    config.max_num_batched_tokens = Some(narrow(limits.max_num_batched_tokens));
    config
}

pub(crate) fn wide(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

pub(crate) fn narrow(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use genset_devtools::tiny_chat;

    use super::*;

    #[test]
    fn the_kv_cache_is_made_for_the_context_that_is_asked_for() {
        let loaded = |context_length_tokens| {
            let args = CandleArgs {
                device: DeviceChoice::Cpu,
                max_num_seqs: Some(2),
                context_length_tokens,
                ..CandleArgs::default()
            };
            let loader = RealLoader::new(&args, tiny_chat::folder(), None);
            let loaded = loader.load(&StartContext::detached(1), &|| false).unwrap();
            (loaded.config.context_length_tokens, loaded.num_blocks)
        };
        assert_eq!(loaded(NonZeroU32::new(64)), (64, 8));
        // The model's own context is 2048.
        assert_eq!(loaded(NonZeroU32::new(1 << 20)), (2048, 256));
        assert_eq!(loaded(None), (2048, 256));
    }

    #[test]
    fn on_the_cpu_the_kv_cache_is_f16_unless_told_otherwise() {
        let of = |choice| kv_cache_dtype(choice, DType::F32, &Device::Cpu);
        assert_eq!(of(DtypeChoice::Auto).unwrap(), DType::F16);
        assert_eq!(of(DtypeChoice::F16).unwrap(), DType::F16);
        assert_eq!(of(DtypeChoice::F32).unwrap(), DType::F32);
        let error = of(DtypeChoice::Bf16).unwrap_err();
        assert_eq!(error.at().map(|at| at.name()), Some("--kv-cache-dtype"));
        assert!(error.message().contains("f16 or f32"), "{error}");
    }

    #[test]
    fn the_end_is_what_the_first_file_says_that_says_one() {
        let tokenizer =
            r#"{"added_tokens": [{"id": 7, "content": "<s>"}, {"id": 8, "content": "</s>"}]}"#;
        let ids = |files: &[(&'static str, &str)]| {
            let file = |(name, content): &(&'static str, &str)| ModelFile {
                name,
                content: content.as_bytes().to_vec(),
            };
            let mut files: Vec<_> = files.iter().map(file).collect();
            files.push(file(&("tokenizer.json", tokenizer)));
            eos_token_ids(&files)
        };
        let named = ("tokenizer_config.json", r#"{"eos_token": "</s>"}"#);
        let generation = ("generation_config.json", r#"{"eos_token_id": [3, 4]}"#);
        let config = ("config.json", r#"{"eos_token_id": 5}"#);
        assert_eq!(ids(&[named, config, generation]), [3, 4]);
        assert_eq!(ids(&[named, config]), [5]);
        assert_eq!(ids(&[named, ("config.json", "{}")]), [8]);
        let whole = r#"{"eos_token": {"content": "<s>", "special": true}}"#;
        assert_eq!(ids(&[("tokenizer_config.json", whole)]), [7]);
        assert!(ids(&[]).is_empty());
    }
}
