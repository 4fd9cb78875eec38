//! mistral.rs as a Genset engine: [`MistralRsEngine`] loads a checkout or a GGUF file with it, and computes with it.
//!
//! mistral.rs schedules, batches, and keeps keys and values. It streams text without token ids, so the tokens are chosen
//! where its API shows logits: in a logits processor, by Genset's own sampler and grammars (`sequence`). It is not a
//! server: tokens in, tokens out. `src/main.rs` makes a worker of it.

mod load;
mod sequence;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::PathBuf;
use std::sync::Arc;

use genset_backend_common::config::Deviation;
use genset_backend_common::output::{self, OutputStream};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, EngineState, ErrorKind, GenerateRequest, LLMEngine,
    RequestContext, RequestField, StartContext, async_trait,
};
use genset_sampling::Sampler;
use genset_sampling::guided::{Guide, GuideFactory};
use mistralrs::MistralRs;
use tokio::sync::Semaphore;

use sequence::{Sequence, State};

/// The most concurrent grammar compilations: each may take a second of a core that the model needs too.
const COMPILING: usize = 2;

/// What the engine is built from, and the flags of its worker.
#[derive(Debug, Clone, clap::Args)]
pub struct MistralRsArgs {
    /// Folder of a checkout in safetensors, or a GGUF file
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// Sequences that run at once; on a CPU it is one
    #[arg(long, default_value_t = 32)]
    pub max_num_seqs: usize,
    /// Numbers of a checkout: auto, bf16, f16 or f32
    #[arg(long, default_value = "auto")]
    pub dtype: String,
}

/// The engine. Building one is cheap; it loads its model in [`start`](LLMEngine::start).
#[derive(Debug)]
pub struct MistralRsEngine {
    args: MistralRsArgs,
    model: EngineState<Model>,
}

/// What `start` builds.
struct Model {
    /// Dropping it ends the thread that computes.
    runner: Arc<MistralRs>,
    /// Compiles grammars; `None` if the tokenizer cannot guide.
    guides: Option<Arc<GuideFactory>>,
    /// Permits for concurrent grammar compilations.
    compiling: Arc<Semaphore>,
    /// Permits for concurrent sequences in mistral.rs.
    places: Arc<Semaphore>,
    /// The number of logits in a row.
    vocab_size: usize,
    context_length: u32,
}

impl MistralRsEngine {
    /// Creates an engine that is not started yet.
    #[must_use]
    pub fn from_args(args: &MistralRsArgs) -> Self {
        Self {
            args: args.clone(),
            model: EngineState::new(),
        }
    }

    async fn load(&self, ctx: &StartContext) -> Result<(Model, EngineConfig), EngineError> {
        let args = self.args.clone();
        ctx.progress.report("loading weights with mistral.rs", None);
        let model = blocking(move || load::load(&args)).await??;
        let name = self.args.model.file_stem().unwrap_or_default();
        let mut config = EngineConfig::new(name.to_string_lossy(), model.context_length)
            .with_vocab_size(u32::try_from(model.vocab_size).unwrap_or(u32::MAX))
            .with_capabilities(model.capabilities());
        config.max_num_seqs = u32::try_from(model.places.available_permits()).ok();
        Ok((model, config))
    }
}

impl Model {
    /// What mistral.rs and Genset's sampler support together. The Worker refuses everything else by name.
    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::tokens()
            .with_resume()
            .with_sampling(Sampler::OPTIONS);
        can.max_logprobs = Some(20);
        if self.guides.is_some() {
            can.guided = GuideFactory::KINDS.into();
        }
        if self.places.available_permits() > 1 {
            // Sequences of one length are multiplied as one matrix.
            can = can.with_deviations([Deviation::BatchVariant]);
        }
        can
    }

    /// Compiles a request's grammar.
    async fn guide(&self, request: &GenerateRequest) -> Result<Option<Guide>, EngineError> {
        if request.guided.is_none() {
            return Ok(None);
        }
        let guides = self.guides.clone().ok_or_else(|| {
            let problem = "needs a tokenizer that grammars can be compiled for";
            EngineError::unsupported(RequestField::Guided, problem)
        })?;
        let request = request.clone();
        let permit = Arc::clone(&self.compiling).acquire_owned().await;
        let permit = permit.map_err(|_| EngineError::engine_has_stopped())?;
        let compiled = blocking(move || {
            let _permit = permit;
            guides.compile_for(&request)
        });
        compiled.await?
    }

    async fn sequence(&self, request: GenerateRequest) -> Result<Sequence, EngineError> {
        let max_tokens = request.max_tokens(self.context_length);
        let seed = RandomState::new().build_hasher().finish();
        let sampler = Sampler::try_new(&request, self.vocab_size, seed)?;
        let guide = self.guide(&request).await?;
        let sampler = sampler.with_ends(guide.as_ref().map_or(&[][..], Guide::ends));
        Ok(Sequence::new(State {
            tokens: request.tokens()?.to_vec(),
            sampler,
            guide,
            stop: request.stop,
            max_tokens,
            responses: None,
            is_parked: false,
        }))
    }
}

#[async_trait]
impl LLMEngine for MistralRsEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        self.model.start(self.load(&ctx)).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let model = self.model.get()?;
        let sequence = model.sequence(request).await?;
        // A stream that outlives the engine holds only this sender, not the engine. `get_sender` also restarts a dead engine
        // thread.
        let requests = model.runner.get_sender(None).map_err(|error| {
            EngineError::new(ErrorKind::Unavailable, "mistral.rs cannot serve").with_source(error)
        })?;
        let (id, places) = (model.runner.next_request_id(), Arc::clone(&model.places));
        Ok(output::stream(ctx, move |out| async move {
            sequence.run(id, places, &requests, &out).await
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        // Frees the weights, which takes a moment.
        if let Some(model) = self.model.take() {
            model.places.close();
            model.compiling.close();
            blocking(move || drop(model)).await?;
        }
        Ok(())
    }
}

/// Runs long work on a blocking thread. A panic becomes an error.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, EngineError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| EngineError::internal(format!("mistral.rs panicked: {error}")))
}
