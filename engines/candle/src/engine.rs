//! [`CandleEngine`]: the [`LLMEngine`] that combines scheduler, model and sampler.
//!
//! The async side (`engine`) checks a request and compiles its grammar, then sends it to the engine thread (`thread`,
//! `core`). In each step the thread plans with the scheduler, adds drafts if speculation is on (`speculation`), packs the
//! batch (`batch`), lets the model compute it (`forward`), samples tokens (`sequence`) and puts them into mailboxes
//! (`mailbox`), whose readers are woken together (`readers`).

mod adapters;
mod batch;
mod blocks;
pub(crate) mod core;
pub(crate) mod forward;
mod mailbox;
pub(crate) mod metrics;
mod readers;
pub(crate) mod real;
mod sequence;
mod speculation;
pub(crate) mod thread;
mod transfer;

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use genset_backend_common::output::{OutputStream, PredictionTokens};
use genset_backend_common::{
    Capabilities, DrainContext, EngineConfig, EngineControls, EngineError, EngineState,
    GenerateRequest, LLMEngine, RequestContext, RequestField, Role, StartContext, TokenId,
    async_trait, controls::Adapter, kv::sequence_root, transfer::receiving,
};
use genset_sampling::Sampler;
use genset_sampling::guided::{Guide, GuideFactory};
use genset_scheduler::AddError;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::{JoinSet, spawn_blocking};

use self::adapters::Adapters;
use self::core::{Command, look, refused, too_long_for_cache};
use self::mailbox::{Nudge, mailbox};
use self::readers::Readers;
use self::real::RealLoader;
use self::sequence::{Active, Arrival};
use self::thread::{EngineThread, Loaded, Loader, Serving};
use self::transfer::PrefillLeg;
use crate::CandleArgs;
use crate::model::ProductTime;

/// The most log probabilities a request may ask for.
const MAX_LOGPROBS: u32 = 20;

/// Concurrent grammar compilations: each may take a second of a core that the model needs too.
const COMPILING: usize = 2;

/// Language models on CPU and CUDA, batched continuously over a paged KV cache. The
/// [crate's documentation](crate) has an example.
pub struct CandleEngine {
    loader: Arc<dyn Loader<Loaded>>,
    state: EngineState<Running>,
    thread: EngineThread,
}

struct Running {
    serving: Serving,
    compiling: Arc<Semaphore>,
    /// Permits for compiled grammars whose sequences have no token yet, as many as sequences may run: each grammar may take dozens
    /// of megabytes.
    compiled: Arc<Semaphore>,
    /// Permits for requests that wait for such a permit.
    waiting: Semaphore,
    /// Wakes readers.
    tasks: Mutex<JoinSet<()>>,
}

impl CandleEngine {
    /// Creates an engine for the checkout folder or `.gguf` file at `model`; `start` loads it.
    #[must_use]
    pub fn from_args(args: &CandleArgs, model: &Path) -> Self {
        Self::with_loader(Arc::new(RealLoader::new(args, model, None)))
    }

    /// As [`from_args`](Self::from_args), with the tokenizer of the folder `model_config` instead of the model's own.
    #[must_use]
    pub fn from_args_with_config(args: &CandleArgs, model: &Path, model_config: PathBuf) -> Self {
        Self::with_loader(Arc::new(RealLoader::new(args, model, Some(model_config))))
    }

    /// Times the products of a step in which `sequences` sequences decode, by kind of matrix, each the median of `repeats` times.
    /// `None` on a GPU. It is for measurements: requests wait meanwhile.
    ///
    /// # Errors
    /// The engine is not started or has stopped, or a product fails.
    ///
    /// # Cancel safety
    /// The engine goes on to time them, and forgets the result.
    pub async fn time_products(
        &self,
        sequences: usize,
        repeats: usize,
    ) -> Result<Option<Vec<ProductTime>>, EngineError> {
        let (reply, times) = oneshot::channel();
        let command = Command::TimeProducts {
            sequences,
            repeats,
            reply,
        };
        let running = self.state.get()?;
        let sent = running.serving.commands.send(command).await;
        sent.map_err(|_| EngineError::engine_has_stopped())?;
        times.await.map_err(|_| EngineError::engine_has_stopped())?
    }

    fn with_loader(loader: Arc<dyn Loader<Loaded>>) -> Self {
        Self {
            loader,
            state: EngineState::new(),
            thread: EngineThread::default(),
        }
    }

    async fn load(&self, start: StartContext) -> Result<Running, EngineError> {
        let readers = Arc::new(Readers::default());
        let (loader, of_thread) = (Arc::clone(&self.loader), Arc::clone(&readers));
        let serving = self
            .thread
            .start(start, move |start, ready| {
                thread::serve(&*loader, start, of_thread, ready);
            })
            .await?;
        let mut tasks = JoinSet::new();
        tasks.spawn(readers.serve());
        let holds = serving.transfers.holds.clone();
        tasks.spawn(async move { holds.expire().await });
        let places = serving.config.max_num_seqs.map_or(COMPILING, |most| {
            usize::try_from(most).unwrap_or(Semaphore::MAX_PERMITS)
        });
        let max_waiting = serving.max_waiting;
        Ok(Running {
            serving,
            compiled: Arc::new(Semaphore::new(places)),
            waiting: Semaphore::new(max_waiting.min(Semaphore::MAX_PERMITS)),
            compiling: Arc::new(Semaphore::new(COMPILING)),
            tasks: Mutex::new(tasks),
        })
    }
}

#[async_trait]
impl LLMEngine for CandleEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let start = async {
            let running = self.load(ctx).await?;
            let config = running.serving.config.clone();
            Ok((running, config))
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

    async fn abort(&self, ctx: &RequestContext) {
        if let Ok(running) = self.state.get() {
            running.serving.transfers.holds.abort(ctx.id());
            look(&running.serving.commands.downgrade());
        }
    }

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        if let Ok(running) = self.state.get() {
            let drained = running.serving.transfers.holds.drained();
            // Blocks not fetched by then are lost; their requests start again.
            let _ = tokio::time::timeout(ctx.deadline, drained).await;
        }
        Ok(())
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        let running = self.state.take();
        if let Some(running) = &running {
            running.serving.transfers.close();
            // An engine thread that ended by itself takes no command, and needs none.
            drop(running.serving.commands.send(Command::Stop).await);
        }
        self.thread.ended().await;
        if let Some(running) = running {
            let mut tasks = std::mem::take(&mut *running.tasks.lock());
            tasks.shutdown().await;
        }
        Ok(())
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        Some(self)
    }
}

#[async_trait]
impl EngineControls for CandleEngine {
    async fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        let (done, is_done) = oneshot::channel();
        let running = self.state.get()?;
        let command = Command::ClearPrefixCache(done);
        running
            .serving
            .commands
            .send(command)
            .await
            .map_err(|_| EngineError::engine_has_stopped())?;
        is_done.await.map_err(|_| EngineError::engine_has_stopped())
    }

    async fn load_adapter(&self, adapter: Adapter) -> Result<(), EngineError> {
        let running = self.state.get()?;
        running.adapters()?.load(adapter).await
    }

    async fn unload_adapter(&self, name: &str) -> Result<(), EngineError> {
        self.state.get()?.adapters()?.unload(name)
    }

    async fn adapters(&self) -> Result<Vec<Adapter>, EngineError> {
        Ok(self.state.get()?.adapters()?.list())
    }
}

impl Running {
    /// The adapters, if the engine supports any.
    fn adapters(&self) -> Result<&Arc<Adapters>, EngineError> {
        let adapters = self.serving.adapters.as_ref();
        adapters.ok_or_else(|| {
            EngineError::unsupported("--max-adapters", "is 0, so no adapters are served")
        })
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let Serving {
            config,
            capacity_tokens,
            transfers,
            commands,
            ..
        } = &self.serving;
        config.check(&request)?;
        let adapter = match &request.adapter {
            Some(name) => Some(self.adapters()?.get(name)?),
            None => None,
        };
        let digest = adapter.as_ref().map(|adapter| adapter.weights().digest());
        let source = transfers.source_of(&request, digest)?;
        let prompt_tokens = request.prompt_tokens().unwrap_or(0);
        let prompt_len = request.tokens()?.len();
        if prompt_len > *capacity_tokens {
            return Err(too_long_for_cache(prompt_len, *capacity_tokens));
        }
        let vocab_size = config
            .vocab_size
            .map_or(0, |size| usize::try_from(size.get()).unwrap_or(usize::MAX));
        let sampler = Sampler::try_new(&request, vocab_size, random_seed())?;
        let (guide, place_of_guide) = self.guide(&request).await?.unzip();
        let sampler = sampler.with_ends(guide.as_ref().map_or(&[][..], Guide::ends));
        let max_tokens = request.max_tokens(config.context_length_tokens);
        let far = ctx.child();
        let (receives, place) = source.as_ref().map(|_| oneshot::channel()).unzip();
        let prefill = (transfers.role == Role::Prefill).then(|| {
            Box::new(PrefillLeg {
                transfers: transfers.clone(),
                request_id: ctx.id().to_owned(),
                prompt_tokens: prompt_len,
                adapter: digest,
            })
        });
        let (outlet, outputs) = mailbox(ctx.with_prompt_tokens(prompt_tokens), self.nudge());
        let prompt = sequence_of(request.tokens()?, max_tokens);
        let active = Box::new(Active {
            outlet,
            sampler,
            guide,
            place_of_guide,
            stop: request.stop,
            max_tokens,
            prefill,
            predictions: PredictionTokens::default(),
        });
        let kv_name = adapter.as_ref().map(|adapter| adapter.kv_name());
        let root = sequence_root(request.cache_salt.as_deref(), kv_name);
        let arrival = Arrival {
            prompt,
            priority: request.priority,
            root,
            adapter,
            receives,
            active,
        };
        commands
            .send(Command::Add(Box::new(arrival)))
            .await
            .map_err(|_| EngineError::engine_has_stopped())?;
        let Some((source, place)) = source.zip(place) else {
            return Ok(outputs);
        };
        let fetch = transfers
            .clone()
            .fetch(source, place, commands.downgrade(), far);
        Ok(receiving(outputs, fetch))
    }

    /// Compiles a request's grammar once a permit is free. Errors of the grammar itself are reported without that wait, and so is
    /// that too many requests wait.
    async fn guide(
        &self,
        request: &GenerateRequest,
    ) -> Result<Option<(Guide, OwnedSemaphorePermit)>, EngineError> {
        let Some(guided) = request.guided.clone() else {
            return Ok(None);
        };
        let none = || {
            EngineError::unsupported(
                RequestField::Guided,
                "this model has no tokenizer that grammars can be compiled for",
            )
        };
        let guides = self.serving.guides.clone().ok_or_else(none)?;
        let free = Arc::clone(&self.compiled).try_acquire_owned();
        let place = if let Ok(place) = free {
            place
        } else {
            let factory = Arc::clone(&guides);
            self.beside(move || factory.check(&guided)).await?;
            let waiting = self.serving.max_waiting;
            let full = |_| refused(AddError::QueueFull { waiting });
            let _waiting = self.waiting.try_acquire().map_err(full)?;
            let place = Arc::clone(&self.compiled).acquire_owned().await;
            place.map_err(|_| EngineError::engine_has_stopped())?
        };
        if self.serving.commands.is_closed() {
            return Err(EngineError::engine_has_stopped());
        }
        let request = request.clone();
        let guide = self.beside(move || guides.compile_for(&request)).await?;
        Ok(guide.map(|guide| (guide, place)))
    }

    /// Runs work on a grammar off the async threads.
    async fn beside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, EngineError> {
        let permit = Arc::clone(&self.compiling)
            .acquire_owned()
            .await
            .map_err(|_| EngineError::engine_has_stopped())?;
        let working = spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        working.await.unwrap_or_else(|_| {
            Err(EngineError::internal(
                "compiling a grammar panicked; please report it",
            ))
        })
    }

    /// Holds no strong sender, so the engine thread can end: a stream may outlive the engine.
    fn nudge(&self) -> Nudge {
        let commands = self.serving.commands.downgrade();
        Box::new(move || look(&commands))
    }
}

/// The one copy of a prompt, to which its answer is appended. It has room for an answer as long as the prompt, so that the
/// first token does not reallocate it; a longer answer does.
fn sequence_of(prompt: &[TokenId], max_tokens: u32) -> Vec<TokenId> {
    let answer = usize::try_from(max_tokens).unwrap_or(usize::MAX);
    let mut sequence = Vec::with_capacity(prompt.len() + answer.min(prompt.len()));
    sequence.extend_from_slice(prompt);
    sequence
}

/// A seed for requests without one.
fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// The engine's capabilities. Guided decoding needs a tokenizer, disaggregation needs KV blocks that can be copied out of the
/// cache, and adapters must be enabled.
fn capabilities(
    guides: Option<&GuideFactory>,
    can_be_apart: bool,
    has_adapters: bool,
) -> Capabilities {
    let mut can = Capabilities::tokens()
        .with_resume()
        .with_sampling(Sampler::OPTIONS);
    can.max_logprobs = Some(MAX_LOGPROBS);
    can.kv_events = true;
    can.priority = true;
    can.adapters = has_adapters;
    if can_be_apart {
        can.roles = BTreeSet::from(Role::ALL);
    }
    if guides.is_some() {
        can.guided = GuideFactory::KINDS.into();
    }
    can
}

genset_backend_common::debug_as!(|it| CandleEngine {
    state: it.state,
    ..
});

#[cfg(test)]
mod tests;
