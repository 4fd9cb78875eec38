//! Loads a model with mistral.rs, and finds out what its API does not tell: the number of logits in a row.

use std::sync::Arc;

use genset_backend_common::EngineError;
use genset_sampling::guided::GuideFactory;
use mistralrs::core::MistralRsBuilder;
use mistralrs::{
    AnyModelBuilder, CustomLogitsProcessor, GgufModelBuilder, MistralRs, ModelDType, Tensor,
    TextModelBuilder, TokenSource,
};
use tokio::runtime::Builder;
use tokio::spawn;
use tokio::sync::{Semaphore, mpsc};

use crate::sequence::asked;
use crate::{COMPILING, MistralRsArgs, Model};

/// Loads the model. Blocks until it is loaded.
pub(crate) fn load(args: &MistralRsArgs) -> Result<Model, EngineError> {
    let failed = |problem: String| EngineError::invalid_argument("MODEL", problem);
    let model = args.model.canonicalize();
    let model = model.map_err(|error| failed(format!("{}: {error}", args.model.display())))?;
    let dtype: Result<ModelDType, _> = args.dtype.parse();
    let dtype = dtype.map_err(|error| EngineError::invalid_argument("--dtype", error))?;
    // A runtime of its own: mistral.rs inspects the runtime that it is called in.
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime
        .map_err(|error| EngineError::internal("no runtime to load in").with_source(error))?;
    runtime.block_on(async {
        let builder: AnyModelBuilder = match (model.parent(), model.file_name()) {
            (Some(folder), Some(file)) if model.is_file() => {
                GgufModelBuilder::new(folder.display(), vec![file.to_string_lossy()])
                    .with_token_source(TokenSource::None)
                    .with_max_num_seqs(args.max_num_seqs)
                    .into()
            }
            _ => TextModelBuilder::new(model.display())
                .with_token_source(TokenSource::None)
                .with_dtype(dtype)
                .with_max_num_seqs(args.max_num_seqs)
                .into(),
        };
        let (pipeline, scheduler, _) = { builder.build_pipeline().await }
            .map_err(|error| failed(format!("mistral.rs cannot load it: {error:#}")))?;
        let loaded = pipeline.lock().await;
        let (tokenizer, metadata) = (loaded.tokenizer(), loaded.get_metadata());
        let is_on_cpu = loaded.device().is_cpu();
        drop(loaded);
        // On a CPU, its attention mixes up the sequences of a batch that decodes (`flash_attn_cpu_single_q`).
        let places = if is_on_cpu { 1 } else { args.max_num_seqs };
        let build = || {
            MistralRsBuilder::new(Arc::clone(&pipeline), scheduler.clone(), false, None)
                // Its prefix cache does not know `cache_salt`, which separates tenants.
                .with_no_prefix_cache(true)
                // The request decides what ends a sequence.
                .with_disable_eos_stop(true)
                .build()
        };
        // It panics, about once in 500 starts, if its new thread holds a lock that it only tries.
        let runner = match spawn(build()).await {
            Ok(runner) => runner,
            Err(_) => build().await,
        };
        let vocab_size = row_length(&runner).await?;
        let tokenizer = tokenizer.and_then(|tokenizer| tokenizer.to_string(false).ok());
        let tokenizer = tokenizer.unwrap_or_default().into_bytes();
        let guides = GuideFactory::try_new(&tokenizer, vocab_size, &metadata.eos_tok);
        Ok(Model {
            runner,
            guides: guides.ok().map(Arc::new),
            compiling: Arc::new(Semaphore::new(COMPILING)),
            places: Arc::new(Semaphore::new(places)),
            vocab_size,
            context_length: u32::try_from(metadata.max_seq_len).unwrap_or(u32::MAX),
        })
    })
}

/// Computes one token, and looks at the logits.
async fn row_length(runner: &MistralRs) -> Result<usize, EngineError> {
    let failed = || EngineError::internal("mistral.rs loaded the model and computes no token");
    let (length, mut lengths) = mpsc::channel(1);
    let look = move |logits: &Tensor, _: &[u32]| -> mistralrs::Result<Tensor> {
        length.try_send(logits.elem_count()).ok();
        Ok(logits.clone())
    };
    let look: Arc<dyn CustomLogitsProcessor> = Arc::new(look);
    let (responses, _kept) = mpsc::channel(8);
    let request = asked(runner.next_request_id(), vec![0], 1, responses, look);
    let requests = runner.get_sender(None).map_err(|_| failed())?;
    requests.send(request).await.map_err(|_| failed())?;
    lengths.recv().await.ok_or_else(failed)
}
