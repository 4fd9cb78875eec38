//! llama.cpp as a Genset engine: [`LlamaCppEngine`] loads a GGUF file with llama.cpp's library, and computes with it.
//!
//! llama.cpp loads the model, keeps keys and values, and computes logits. This crate schedules (`slots`, `core`), and Genset's own
//! sampler and grammars choose tokens (`request`). It is neither a server nor the launcher of llama-server: tokens in, tokens
//! out. `src/main.rs` makes a worker of it.

mod core;
mod load;
mod request;
mod slots;
mod thread;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;

use genset_backend_common::output::{self, Finish, OutputStream};
use genset_backend_common::{
    EngineConfig, EngineControls, EngineError, EngineState, GenerateRequest, LLMEngine,
    RequestContext, RequestField, StartContext, async_trait,
};
use genset_sampling::Sampler;
use genset_sampling::guided::{Guide, GuideFactory};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::spawn_blocking;

use crate::core::Command;
use request::Active;
use slots::Sequence;
use thread::EngineThread;

/// The most concurrent grammar compilations: each may take a second of a core that the model needs too.
const COMPILING: usize = 2;

/// What the engine is built from, and the flags of its worker.
#[derive(Debug, Clone, clap::Args)]
pub struct LlamaCppArgs {
    /// A GGUF file
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// Sequences that run at once, at most 256
    #[arg(long, value_name = "COUNT", default_value = "16")]
    pub max_num_seqs: NonZeroU32,
    /// Tokens of a prompt and its answer together [default: the model's own limit, at most 32768]
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<NonZeroU32>,
    /// Tokens that keys and values are kept of, of all sequences together [default: as many as all may have, at most 32768 or
    /// --max-model-len]
    #[arg(long, value_name = "TOKENS")]
    pub kv_cache_tokens: Option<NonZeroU32>,
    /// Tokens of a step
    #[arg(long, value_name = "TOKENS", default_value = "512")]
    pub max_num_batched_tokens: NonZeroU32,
    /// Layers on the GPU [default: all, where the build has one]
    #[arg(long, value_name = "COUNT")]
    pub gpu_layers: Option<u32>,
    /// Threads that compute on the CPU [default: as many as this process may use]
    #[arg(long, value_name = "COUNT")]
    pub threads: Option<NonZeroU32>,
}

/// The engine. Building one is cheap; it loads its model in [`start`](LLMEngine::start).
pub struct LlamaCppEngine {
    args: LlamaCppArgs,
    state: EngineState<Serving>,
    /// Separate from the state, since a dropped start also leaves a thread to wait for.
    thread: Mutex<Option<EngineThread>>,
}

/// What the engine knows of its thread while it serves.
struct Serving {
    commands: mpsc::Sender<Command>,
    config: EngineConfig,
    /// Compiles grammars; `None` if the vocabulary cannot guide.
    guides: Option<Arc<GuideFactory>>,
    compiling: Arc<Semaphore>,
}

impl LlamaCppEngine {
    /// Creates an engine that is not started yet.
    #[must_use]
    pub fn from_args(args: &LlamaCppArgs) -> Self {
        Self {
            args: args.clone(),
            state: EngineState::new(),
            thread: Mutex::new(None),
        }
    }
}

#[async_trait]
impl LLMEngine for LlamaCppEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let start = async {
            let (thread, ready) = EngineThread::spawn(self.args.clone(), ctx)?;
            *self.thread.lock() = Some(thread);
            let ended = || EngineError::internal("the engine thread ended while it loaded");
            let (commands, loaded) = ready.await.map_err(|_| ended())??;
            let serving = Serving {
                commands,
                config: loaded.config.clone(),
                guides: loaded.guides,
                compiling: Arc::new(Semaphore::new(COMPILING)),
            };
            Ok((serving, loaded.config))
        };
        self.state.start(start).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.state.get()?.generate(request, ctx).await
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        if let Some(serving) = self.state.take() {
            // A thread that ended by itself takes no command, and needs none.
            drop(serving.commands.send(Command::Stop).await);
        }
        let thread = self.thread.lock().take();
        match thread {
            Some(thread) => thread.ended().await,
            None => Ok(()),
        }
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        Some(self)
    }
}

#[async_trait]
impl EngineControls for LlamaCppEngine {
    async fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        let (done, is_done) = oneshot::channel();
        let command = Command::ClearPrefixCache(done);
        let serving = self.state.get()?;
        let sent = serving.commands.send(command).await;
        sent.map_err(|_| EngineError::engine_has_stopped())?;
        is_done.await.map_err(|_| EngineError::engine_has_stopped())
    }
}

impl Serving {
    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.config.check(&request)?;
        let vocab_size = self.config.vocab_size.map_or(0, NonZeroU32::get);
        let vocab_size = usize::try_from(vocab_size).unwrap_or(usize::MAX);
        let seed = RandomState::new().build_hasher().finish();
        let sampler = Sampler::try_new(&request, vocab_size, seed)?;
        let guide = self.guide(&request).await?;
        let sampler = sampler.with_ends(guide.as_ref().map_or(&[][..], Guide::ends));
        let prompt_tokens = request.prompt_tokens().unwrap_or(0);
        let (sink, outputs) = output::channel(ctx.with_prompt_tokens(prompt_tokens));
        // The grammar allows only the empty text.
        if guide.as_ref().is_some_and(Guide::is_finished) {
            sink.finish(Finish::stop());
            return Ok(outputs);
        }
        let sequence = Sequence {
            tokens: request.tokens()?.to_vec(),
            salt: request.cache_salt.clone(),
            request: Active {
                sink,
                sampler,
                guide,
                max_tokens: request.max_tokens(self.config.context_length_tokens),
                stop: request.stop,
                cached_tokens: None,
            },
        };
        let sent = self.commands.send(Command::Add(Box::new(sequence))).await;
        sent.map_err(|_| EngineError::engine_has_stopped())?;
        Ok(outputs)
    }

    /// Compiles a request's grammar without blocking other requests.
    async fn guide(&self, request: &GenerateRequest) -> Result<Option<Guide>, EngineError> {
        if request.guided.is_none() {
            return Ok(None);
        }
        let guides = self.guides.clone().ok_or_else(|| {
            let problem = "needs a vocabulary that grammars can be compiled for";
            EngineError::unsupported(RequestField::Guided, problem)
        })?;
        let request = request.clone();
        let permit = Arc::clone(&self.compiling).acquire_owned().await;
        let permit = permit.map_err(|_| EngineError::engine_has_stopped())?;
        let compiling = spawn_blocking(move || {
            let _permit = permit;
            guides.compile_for(&request)
        });
        let compiled = compiling.await;
        compiled.unwrap_or_else(|error| {
            Err(EngineError::internal("compiling a grammar panicked").with_source(error))
        })
    }
}

genset_backend_common::debug_as!(|it| LlamaCppEngine { args: it.args, .. });
