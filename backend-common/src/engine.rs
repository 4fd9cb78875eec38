//! [`LLMEngine`]: the trait an engine author implements, and what the Worker hands to it.

use async_trait::async_trait;

use crate::config::EngineConfig;
use crate::context::RequestContext;
use crate::controls::{Adapter, EngineControls};
use crate::error::EngineError;
use crate::handles::{HealthReporter, LoadPublisher, MetricsRegistry, ProgressReporter};
use crate::kv::KvEventPublisher;
use crate::output::OutputStream;
use crate::request::GenerateRequest;
use crate::transfer::KvTransfers;

use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// An inference engine. Three methods are required, and it stays that small: what an engine publishes it is handed in
/// [`StartContext`], what it can do it declares in [`EngineConfig`].
///
/// Construction is cheap and without side effects; heavy work belongs in [`start`](Self::start).
///
/// # Examples
#[doc = concat!("```\n", include_str!("../doc/zeros.rs"), "```")]
#[async_trait]
pub trait LLMEngine: Send + Sync + 'static {
    /// Loads the model and says what it can do. Called once. When it returns `Ok`, `generate` is ready for concurrent
    /// calls.
    ///
    /// It runs on a thread that others share, so it must not block: reading, computing and waiting for a device belong on a
    /// thread of their own, such as `tokio::task::spawn_blocking` has. A `start` that holds its thread can be neither told to
    /// stop nor given up.
    ///
    /// # Errors
    /// Any kind; the worker then calls `cleanup` and stops with the error in its log.
    ///
    /// # Cancel safety
    /// The Worker drops the future when it is told to stop during a load, and calls `cleanup` after that.
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError>;

    /// Starts one request. Called concurrently. Returns once the request is accepted; the work happens in the stream.
    ///
    /// # Contract
    /// - Exactly one terminal item, nothing after it.
    /// - Usage agrees with the tokens streamed and with the prompt's length, also when cancelled.
    /// - When `ctx` is cancelled, a `Cancelled` terminal follows soon.
    /// - Dropping the stream, at any point, frees whatever the request held, soon.
    /// - A request that is refused, at once or by an error in its stream, holds nothing from then on, whatever it had been given.
    ///
    /// "Soon" is what the step under way takes, and a few more: at most 2 s or ten times what the engine takes for a token,
    /// whichever is longer.
    ///
    /// # Errors
    /// A typed refusal before any token: `Overloaded`, `InvalidArgument`, `NotFound`, `EngineShutdown` when not started.
    ///
    /// # Cancel safety
    /// Dropping the future before it returned frees whatever it reserved.
    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError>;

    /// A hint that the request was cancelled or its stream dropped, for engines whose scheduler lives elsewhere. May
    /// come after the request ended, or for a request the engine never saw.
    async fn abort(&self, _ctx: &RequestContext) {}

    /// Work that must be done while peers can still reach this process, such as KV transfers under way. Called once the
    /// instance is unlisted and its requests have ended or used up their grace. Returns soon where there is no such work.
    ///
    /// # Errors
    /// Logged; the shutdown goes on.
    async fn drain(&self, _ctx: DrainContext) -> Result<(), EngineError> {
        Ok(())
    }

    /// Frees everything. Called exactly once if `start` was called, also when it failed or was dropped half-way; must
    /// also be harmless when called twice, or without `start`. Waits for no reader: a stream that is held over it ends, once it
    /// is read, as it would have or with `EngineShutdown`.
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
    /// The part an instance plays in serving a sequence.
    #[derive(
        Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
    )]
    #[serde(rename_all = "snake_case")]
    pub enum Role {
        /// Prefill and decode in one instance.
        #[default]
        Aggregated = "aggregated",
        /// Prefill only: one token, and transfer parameters in the terminal. What ends with its first token has none.
        Prefill = "prefill",
        /// Decode only: takes the transfer parameters of a prefill instance, and answers all of it, the first token included.
        /// Where they say that [nobody holds blocks](crate::transfer::TransferParams::none), it computes the prompt itself.
        Decode = "decode",
    }
}

impl FromStr for Role {
    type Err = String;

    /// Reads a name, or `agg` for the first.
    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|role| role.name() == text);
        let role = named.or((text == "agg").then_some(Self::Aggregated));
        role.ok_or_else(|| format!("{text:?} is none of aggregated (or agg), prefill, decode"))
    }
}

/// What an engine is handed at start. Keep the handles it needs; dropping the others costs nothing.
#[derive(Debug, Clone)]
pub struct StartContext {
    /// Identifies the worker in the whole cluster, below 2^53; the instance's id in discovery.
    pub worker_id: u64,
    /// The part the instance plays.
    pub role: Role,
    /// LoRA adapters that the operator named, for an engine that has to know before it starts. Those that it does not list then
    /// are loaded through its [`controls`](LLMEngine::controls).
    pub adapters: Vec<Adapter>,
    /// Where the engine registers its metrics.
    pub metrics: MetricsRegistry,
    /// Where the engine publishes the changes of its prefix cache.
    pub kv_events: KvEventPublisher,
    /// How KV blocks get to and from other workers.
    pub kv_transfers: KvTransfers,
    /// Where the engine publishes how busy it is.
    pub load: LoadPublisher,
    /// Where the engine says how far loading is.
    pub progress: ProgressReporter,
    /// Where the engine says that it can go on no more.
    pub health: HealthReporter,
}

impl StartContext {
    /// A context whose handles lead nowhere else: for tests, and for engines used without a Worker.
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

/// What an engine is handed at drain.
#[derive(Debug, Clone)]
pub struct DrainContext {
    /// Time left for draining; the call is dropped when it is over.
    pub deadline: Duration,
}
