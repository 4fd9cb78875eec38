//! [`LLMEngine`]: the trait that an engine author implements, and what the Worker passes to it.

use async_trait::async_trait;

use crate::config::EngineConfig;
use crate::context::RequestContext;
use crate::controls::{Adapter, EngineControls};
use crate::error::EngineError;
use crate::handles::{HealthReporter, LoadPublisher, MetricsRegistry, ProgressReporter};
use crate::kv::KvEventPublisher;
use crate::output::OutputStream;
use crate::request::GenerateRequest;
use crate::spelling::none_of;
use crate::transfer::KvTransfers;

use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// An inference engine. Three methods are required, and the trait stays small: the engine publishes through handles in
/// [`StartContext`], and declares its abilities in [`EngineConfig`].
///
/// Construction is cheap and without side effects; heavy work belongs in [`start`](Self::start).
///
/// # Examples
#[doc = concat!("```\n", include_str!("../doc/zeros.rs"), "```")]
#[async_trait]
pub trait LLMEngine: Send + Sync + 'static {
    /// Loads the model and returns what it can do. Called once. After `Ok`, `generate` must be ready for concurrent calls.
    ///
    /// It runs on a shared thread, so it must not block: do blocking I/O, computation and device waits on other threads, for
    /// example with `tokio::task::spawn_blocking`. A `start` that blocks its thread can be neither stopped nor abandoned.
    ///
    /// # Errors
    /// Any kind; the worker then calls `cleanup`, logs the error and stops.
    ///
    /// # Cancel safety
    /// If the Worker is stopped during a load, it drops the future and then calls `cleanup`.
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError>;

    /// Starts one request. Called concurrently. Returns once the request is accepted; the stream does the work.
    ///
    /// # Contract
    /// - Exactly one terminal item, nothing after it.
    /// - Usage agrees with the tokens streamed and with the prompt's length, also when cancelled.
    /// - When `ctx` is cancelled, a `Cancelled` terminal follows soon.
    /// - Dropping the stream, at any point, soon frees everything the request held.
    /// - A request that is refused, at once or by an error in its stream, holds nothing afterwards, whatever it had been given.
    ///
    /// "Soon" is the current step and a few more: at most 2 s or ten times the engine's time per token, whichever is longer. The
    /// conformance kit measures that time with one request alone. A step of a full batch takes longer, so the kit allows 48 times.
    ///
    /// # Errors
    /// A typed refusal before any token: `Overloaded`, `InvalidArgument`, `NotFound`, `EngineShutdown` when not started.
    ///
    /// # Cancel safety
    /// Dropping the future before it returns frees everything it reserved.
    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError>;

    /// A hint that the request was cancelled or its stream dropped, for engines whose scheduler runs elsewhere. May arrive after
    /// the request ended, or for a request that the engine never saw.
    async fn abort(&self, _ctx: &RequestContext) {}

    /// Finishes work that needs other workers to reach this process, such as KV transfers in flight. Called once the instance is
    /// unlisted and its requests have ended or used up their grace. Returns soon if there is no such work.
    ///
    /// # Errors
    /// Logged; the shutdown continues.
    async fn drain(&self, _ctx: DrainContext) -> Result<(), EngineError> {
        Ok(())
    }

    /// Frees everything. Called exactly once if `start` was called, even if `start` failed or was dropped; must also be harmless
    /// when called twice, or without `start`. Does not wait for readers: a stream that is still held ends, once read, as it would
    /// have or with `EngineShutdown`.
    ///
    /// # Errors
    /// Logged; the process exits as failed.
    async fn cleanup(&self) -> Result<(), EngineError>;

    /// Administrative abilities (sleep, adapters, weight updates), if the engine has any.
    fn controls(&self) -> Option<&dyn EngineControls> {
        None
    }
}

crate::named! {
    /// The role of an instance in serving a sequence.
    #[derive(
        Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
    )]
    #[serde(rename_all = "snake_case")]
    pub enum Role {
        /// Prefill and decode in one instance.
        #[default]
        Aggregated = "aggregated",
        /// Prefill only: one token, with transfer parameters in the terminal. An answer that ends with its first token has none.
        Prefill = "prefill",
        /// Decode only: takes the transfer parameters of a prefill instance, and streams the whole answer, including the first
        /// token. If they [name no blocks](crate::transfer::TransferParams::none), it computes the prompt itself.
        Decode = "decode",
    }
}

impl FromStr for Role {
    type Err = String;

    /// Parses a name, or `agg` for aggregated.
    fn from_str(text: &str) -> Result<Self, String> {
        let role = Self::from_name(text).or((text == "agg").then_some(Self::Aggregated));
        role.ok_or_else(|| none_of(text, Self::ALL.map(Self::name).into_iter().chain(["agg"])))
    }
}

/// What the Worker passes to an engine at start. Keep the handles you need; dropping the others costs nothing.
#[derive(Debug, Clone)]
pub struct StartContext {
    /// The worker's id, unique in the cluster and below 2^53; also the instance's id in discovery.
    pub worker_id: u64,
    /// The role of the instance.
    pub role: Role,
    /// LoRA adapters from the operator, for engines that need them before they start. After the start, the Worker loads those
    /// that the engine does not list, through its [`controls`](LLMEngine::controls).
    pub adapters: Vec<Adapter>,
    /// Where the engine registers its metrics.
    pub metrics: MetricsRegistry,
    /// Where the engine publishes the changes of its prefix cache.
    pub kv_events: KvEventPublisher,
    /// Transfers KV blocks to and from other workers.
    pub kv_transfers: KvTransfers,
    /// Where the engine publishes its load.
    pub load: LoadPublisher,
    /// Where the engine reports the progress of loading.
    pub progress: ProgressReporter,
    /// Where the engine reports that it has failed.
    pub health: HealthReporter,
}

impl StartContext {
    /// Returns a context with unconnected handles, for tests and for engines used without a Worker.
    #[must_use]
    pub fn detached(worker_id: u64) -> Self {
        Self {
            worker_id,
            role: Role::default(),
            adapters: Vec::new(),
            metrics: MetricsRegistry::default(),
            kv_events: KvEventPublisher::default(),
            kv_transfers: KvTransfers::new(worker_id),
            load: LoadPublisher::default(),
            progress: ProgressReporter::default(),
            health: HealthReporter::default(),
        }
    }
}

/// What the Worker passes to an engine at drain.
#[derive(Debug, Clone)]
pub struct DrainContext {
    /// Time left for draining; the Worker drops the call afterwards.
    pub deadline: Duration,
}
