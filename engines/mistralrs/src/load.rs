//! Loads a model with mistral.rs, and asks it for what its API does not tell: how many logits a row has.

use std::sync::Arc;

use genset_backend_common::EngineError;
use genset_sampling::guided::GuideFactory;
use mistralrs::core::MistralRsBuilder;
use mistralrs::model_builder_trait::{build_gguf_pipeline, build_text_pipeline};
use mistralrs::{
    CustomLogitsProcessor, GgufModelBuilder, MistralRs, ModelDType, Tensor, TextModelBuilder,
    TokenSource,
};
use tokio::sync::{Semaphore, mpsc};

use crate::sequence::asked;
use crate::{MistralRsArgs, Model};

/// Blocks for as long as it takes.
pub(crate) fn load(args: &MistralRsArgs) -> Result<Model, EngineError> {
    let failed = |problem: String| EngineError::invalid_argument("MODEL", problem);
    let model = args.model.canonicalize();
    let model = model.map_err(|error| failed(format!("{}: {error}", args.model.display())))?;
    let dtype: Result<ModelDType, _> = args.dtype.parse();
    let dtype = dtype.map_err(|error| EngineError::invalid_argument("--dtype", error))?;
    // Of its own: mistral.rs looks at the runtime that it is called in.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| EngineError::internal("no runtime to load in").with_source(error))?;
    runtime.block_on(async {
        let max_num_seqs = usize::try_from(args.max_num_seqs).unwrap_or(usize::MAX);
        let built = match (model.parent(), model.file_name()) {
            (Some(folder), Some(file)) if model.is_file() => {
                let file = vec![file.to_string_lossy()];
                let builder = GgufModelBuilder::new(folder.display(), file)
                    .with_token_source(TokenSource::None)
                    .with_max_num_seqs(max_num_seqs);
                build_gguf_pipeline(builder).await
            }
            _ => {
                let builder = TextModelBuilder::new(model.display())
                    .with_token_source(TokenSource::None)
                    .with_dtype(dtype)
                    .with_max_num_seqs(max_num_seqs);
                build_text_pipeline(builder).await
            }
        };
        let (pipeline, scheduler, _) =
            built.map_err(|error| failed(format!("mistral.rs cannot load it: {error:#}")))?;
        let (tokenizer, metadata, device) = {
            let pipeline = pipeline.lock().await;
            let (tokenizer, metadata) = (pipeline.tokenizer(), pipeline.get_metadata());
            (tokenizer, metadata, pipeline.device())
        };
        // On a CPU, its attention mixes up the sequences of a batch that decodes (`flash_attn_cpu_single_q`).
        let places = if device.is_cpu() { 1 } else { max_num_seqs };
        let runner = MistralRsBuilder::new(pipeline, scheduler, false, None)
            // Its prefix cache knows no `cache_salt`, which keeps tenants apart.
            .with_no_prefix_cache(true)
            // What ends a sequence is for its request to say.
            .with_disable_eos_stop(true)
            .build()
            .await;
        let vocab_size = row_length(&runner).await?;
        let tokenizer = tokenizer.and_then(|tokenizer| tokenizer.to_string(false).ok());
        let guides = GuideFactory::try_new(
            tokenizer.unwrap_or_default().as_bytes(),
            vocab_size,
            &metadata.eos_tok,
        );
        Ok(Model {
            runner,
            guides: guides.ok().map(Arc::new),
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
