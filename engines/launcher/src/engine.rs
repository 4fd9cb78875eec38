//! [`LauncherEngine`]: the server as an engine.

use std::num::NonZeroU32;
use std::sync::Arc;

use genset_backend_common::{
    DrainContext, EngineConfig, EngineControls, EngineError, EngineState, GenerateRequest,
    GuidedDecoding, LLMEngine, OutputStream, RequestContext, Role, StartContext, async_trait,
    controls::{Adapter, SleepLevel},
};
use genset_backend_common::{RequestField, output};
use genset_process::{Supervised, Supervision};
use serde_json::Value;
use tokio::time::timeout;

use crate::adapters::{AtStart, Takes};
use crate::apart::Apart;
use crate::api::{self, Api, Facts};
use crate::bounds::bounded;
use crate::command::{Plan, asked_context};
use crate::config::{LauncherConfig, ServerInput};
use crate::controls::Controls;
use crate::dialect::Dialect;
use crate::drive::Drive;
use crate::failure::ServerFailure;
use crate::kv::{Clears, KvFeed, KvFollower, KvSource};
use crate::launch::{Launch, terms};
use crate::load::ServerLoad;
use crate::probe;
use crate::ranks::Ranks;
use crate::room::{Room, shared_tokens};
use crate::server::Server;

/// The context length if neither the server nor the model's files report one, in tokens.
const DEFAULT_CONTEXT: u32 = 2048;

/// An engine that runs the server of another project as a child process.
///
/// [`start`](LLMEngine::start) starts the server. When [`cleanup`](LLMEngine::cleanup) returns, the server and all its
/// descendants are gone; likewise when this process is killed. If the server dies, every active request ends at once with an
/// error that lets it migrate. Then the server is restarted, up to the configured number of times.
///
/// # Examples
/// ```no_run
/// use genset_backend_common::{LLMEngine, StartContext};
/// use genset_engine_launcher::{LauncherConfig, LauncherEngine, ServerInput, ServerKind};
///
/// # async fn start() -> Result<(), genset_backend_common::EngineError> {
/// let input = ServerInput::Tokens { vocab_size: None };
/// let config = LauncherConfig::new(ServerKind::Vllm, "/models/Qwen3-4B", input);
/// let engine = LauncherEngine::new(config);
/// println!("{} is loaded", engine.start(StartContext::detached(1)).await?.model);
/// engine.cleanup().await
/// # }
/// ```
#[derive(Debug)]
pub struct LauncherEngine {
    config: LauncherConfig,
    running: EngineState<Running>,
    supervision: Supervision,
}

/// The state that `start` builds.
#[derive(Debug)]
struct Running {
    /// Ends the server if this is dropped before `cleanup`.
    server: Supervised<Server>,
    api: Arc<dyn Api>,
    context_length_tokens: u32,
    vocab_size: Option<NonZeroU32>,
    ranks: Ranks,
    room: Option<Room>,
    apart: Apart,
    load: Arc<ServerLoad>,
    controls: Controls,
}

impl LauncherEngine {
    /// An engine whose server is not started yet.
    #[must_use]
    pub fn new(config: LauncherConfig) -> Self {
        Self {
            config,
            running: EngineState::new(),
            supervision: Supervision::default(),
        }
    }

    async fn launch(&self, ctx: &StartContext) -> Result<(Running, EngineConfig), EngineError> {
        let config = &self.config;
        config.validate()?;
        config.validate_role(ctx.role)?;
        if let Err(error) = config.validate_api_keys() {
            // Only the frontends know whether there are API keys.
            tracing::info!("requests with an API key are refused: {}", error.message());
        }
        let dialect = probe::dialect(config).await?;
        let api = api::of(config, dialect)?;
        let mut plan = Plan::new(config, dialect)?
            .in_role(config, ctx.role)
            .with_adapters(&ctx.adapters, config)?;
        let source = KvSource::for_server(config, dialect)?;
        if let Some(source) = &source {
            plan = plan.with_args(source.args());
        }
        let followers = Arc::default();
        let load = Arc::new(ServerLoad::new(dialect, ctx));
        let adapters = AtStart::new(ctx.adapters.clone());
        let program = Launch {
            config: config.clone(),
            plan,
            adapters: adapters.clone(),
            tasks: self.supervision.tasks().clone(),
            progress: ctx.progress.clone(),
            load: Arc::clone(&load),
            kv_source: source.clone(),
            kv_followers: Arc::clone(&followers),
        };
        let started = self.supervision.start(program, terms(config), ctx).await;
        let (supervised, ()) = started?;
        let server = supervised.session()?;
        let facts = self.facts(&*api, &server).await?;
        let context = self.context(asked_context(config, dialect), facts);
        let mut declared = self.declare(&*api, dialect, context, facts);
        let ranks = Ranks::of(config, dialect, facts.ranks);
        declared.data_parallel_size = ranks.count();
        let takes = Takes::of(config, &adapters, &server).await;
        declared.capabilities.adapters = takes == Takes::WhileServing || !ctx.adapters.is_empty();
        let kv_followers = match (KvFeed::of(config, dialect, source), &ranks) {
            (Some(feed), Ranks::Known(_)) => kv_followers(&feed, ctx, &declared, facts),
            (Some(_), Ranks::Unknown(_)) | (None, _) => Vec::new(),
        };
        for follower in &kv_followers {
            declared.capabilities.kv_events = true;
            // Also with one rank: workers of a model may differ in their ranks, but in nothing else that they declare.
            declared.capabilities.kv_ranks = true;
            let following = follower.clone().run(Arc::clone(&server));
            self.supervision.tasks().spawn(following);
        }
        let clears = kv_followers.first().map(|first| Arc::clone(&first.clears));
        followers.get_or_init(|| kv_followers);
        let apart = Apart::new(ctx.role, ctx.kv_transfers.clone(), config.kv_lease);
        if ctx.role == Role::Prefill {
            let (apart, supervision) = (apart.clone(), self.supervision.clone());
            self.supervision.tasks().spawn(async move {
                tokio::select! {
                    () = supervision.ending() => {}
                    () = apart.expire() => {}
                }
            });
        }
        load.started(&declared);
        let mut controls = Controls::new(config, dialect, ctx.role);
        controls.clears = clears;
        (controls.takes, controls.at_start) = (takes, adapters);
        let running = Running {
            server: supervised,
            api,
            context_length_tokens: context,
            vocab_size: declared.vocab_size,
            ranks,
            room: self.room(dialect, facts),
            apart,
            load,
            controls,
        };
        Ok((running, declared))
    }

    async fn facts(&self, api: &dyn Api, server: &Server) -> Result<Facts, EngineError> {
        let asked = timeout(self.config.health_timeout, api.facts(&server.client)).await;
        let answer = asked.map_err(|_| {
            ServerFailure::Hung {
                silent_for: self.config.health_timeout,
            }
            .to_error(self.config.kind.title(), &[])
        })?;
        answer.map_err(|error| {
            let title = self.config.kind.title();
            EngineError::internal(format!(
                "the {title} server is healthy but does not describe itself: {error}"
            ))
            .with_source(error)
        })
    }

    /// The context length from the server, the configuration, or the model's files, in this order.
    fn context(&self, asked: Option<u32>, facts: Facts) -> u32 {
        let known = facts.context_length_tokens.filter(|context| *context > 0);
        known
            .or(asked)
            .or(self.config.model_context_length_tokens)
            .unwrap_or(DEFAULT_CONTEXT)
    }

    /// The room that requests share, if the server needs it.
    fn room(&self, dialect: Dialect, facts: Facts) -> Option<Room> {
        match dialect {
            Dialect::LlamaCppPython => Some(Room::one_at_a_time()),
            Dialect::LlamaServer => {
                let tokens = shared_tokens(&self.config, facts.context_length_tokens?)?;
                let slots = facts.max_num_seqs.unwrap_or(1);
                Some(Room::of_tokens(tokens, slots, api::LLAMA_PAST_LIMIT))
            }
            Dialect::Vllm | Dialect::Sglang | Dialect::Trtllm => None,
        }
    }

    fn declare(&self, api: &dyn Api, dialect: Dialect, context: u32, facts: Facts) -> EngineConfig {
        let config = &self.config;
        let mut can = api.capabilities();
        if dialect == Dialect::Vllm {
            can = can.with_roles(Role::ALL);
        }
        let mut declared = EngineConfig::new(&config.name, context).with_capabilities(can);
        declared.max_num_seqs = facts.max_num_seqs;
        declared.kv_block_size = facts.kv_block_size.or(config.kv_block_size);
        declared.kv_total_blocks = facts.kv_total_blocks;
        declared.canary = api.canary(&config.name).map(Box::new);
        declared.vocab_size = match config.input {
            ServerInput::Tokens { vocab_size } => vocab_size,
            ServerInput::Text => None,
        };
        declared
    }
}

impl Running {
    /// The maximum answer length: the request's limit and the rest of the context.
    fn max_tokens(&self, request: &GenerateRequest) -> Option<u32> {
        let room = request
            .prompt_tokens()
            .map(|prompt| self.context_length_tokens.saturating_sub(prompt).max(1));
        match (request.stop.max_tokens, room) {
            (Some(asked), Some(room)) => Some(asked.min(room)),
            (asked, room) => asked.or(room),
        }
    }
}

/// The followers of the server's KV events, one per rank; none if those of a rank are missing, or the events cannot be used.
fn kv_followers(
    feed: &KvFeed,
    ctx: &StartContext,
    declared: &EngineConfig,
    facts: Facts,
) -> Vec<KvFollower> {
    if let Some(reason) = facts.no_kv_events {
        tracing::info!(reason, "the KV events of the server are not followed");
        return Vec::new();
    }
    let ranks = 0..declared.data_parallel_size;
    if let Some(rank) = ranks.clone().find(|rank| !feed.has_rank(*rank)) {
        tracing::info!(
            rank,
            "the server publishes no KV events of this rank, so none are followed"
        );
        return Vec::new();
    }
    let Some(block_size) = declared.kv_block_size else {
        tracing::warn!(
            "the server publishes KV events, but does not report the size of its blocks"
        );
        return Vec::new();
    };
    let clears = Clears::new(ctx.kv_events.clone());
    let follower = |rank| KvFollower {
        feed: feed.clone(),
        rank,
        publisher: match declared.data_parallel_size {
            1 => ctx.kv_events.clone(),
            _ => ctx.kv_events.of_rank(rank),
        },
        clears: Arc::clone(&clears),
        block_size,
        total_blocks: declared.kv_total_blocks,
    };
    ranks.map(follower).collect()
}

fn trace_headers(ctx: &RequestContext) -> Vec<(&'static str, String)> {
    let Some(trace) = ctx.trace() else {
        return Vec::new();
    };
    let mut headers = vec![("traceparent", trace.traceparent.clone())];
    if !trace.tracestate.is_empty() {
        headers.push(("tracestate", trace.tracestate.clone()));
    }
    headers
}

impl LauncherEngine {
    /// The controls, and the server that serves now.
    fn operated(&self) -> Result<(Arc<Running>, Arc<Server>), EngineError> {
        let running = self.running.get()?;
        let server = running.server.session()?;
        Ok((running, server))
    }
}

/// Operations besides generation.
#[async_trait]
impl EngineControls for LauncherEngine {
    async fn sleep(&self, level: SleepLevel) -> Result<(), EngineError> {
        let (running, server) = self.operated()?;
        running.controls.sleep(&server, level).await
    }

    async fn wake(&self) -> Result<(), EngineError> {
        let (running, server) = self.operated()?;
        running.controls.wake(&server).await
    }

    async fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        let (running, server) = self.operated()?;
        running.controls.clear_prefix_cache(&server).await
    }

    async fn update_weights(&self, source: Value) -> Result<(), EngineError> {
        let (running, server) = self.operated()?;
        running.controls.update_weights(&server, source).await
    }

    async fn start_profile(&self) -> Result<(), EngineError> {
        let (running, server) = self.operated()?;
        running.controls.start_profile(&server).await
    }

    async fn stop_profile(&self) -> Result<String, EngineError> {
        let (running, server) = self.operated()?;
        running.controls.stop_profile(&server).await
    }

    async fn load_adapter(&self, adapter: Adapter) -> Result<(), EngineError> {
        let (running, server) = self.operated()?;
        running.controls.load_adapter(&server, adapter).await
    }

    async fn unload_adapter(&self, name: &str) -> Result<(), EngineError> {
        let (running, server) = self.operated()?;
        running.controls.unload_adapter(&server, name).await
    }

    async fn adapters(&self) -> Result<Vec<Adapter>, EngineError> {
        let (_, server) = self.operated()?;
        Ok(server.adapters.list())
    }
}

#[async_trait]
impl LLMEngine for LauncherEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let stopped = ServerFailure::Stopped.to_error(self.config.kind.title(), &[]);
        let launch = self.launch(&ctx);
        let start = self.supervision.unless_ending(launch, stopped);
        self.running.start(start).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let running = self.running.get()?;
        if let Some(GuidedDecoding::Choice(choices)) = request.guided.as_deref()
            && choices.is_empty()
        {
            return Err(EngineError::invalid_argument(
                RequestField::Guided,
                "must hold at least one text",
            ));
        }
        running.ranks.check(request.data_parallel_rank)?;
        let server = running.server.session()?;
        let adapter = request.adapter.as_deref();
        let adapter = adapter.map(|name| server.adapters.find(name)).transpose()?;
        let pass = server.gate.enter()?;
        let mut request = bounded(request, running.vocab_size)?;
        request.adapter = adapter.map(|adapter| adapter.model);
        let max_tokens = running.max_tokens(&request);
        let leg = running.apart.leg(&request, max_tokens)?;
        let call = running.api.leg_call(&request, max_tokens, &leg)?;
        let prompt_tokens = request.prompt_tokens().unwrap_or(ctx.prompt_tokens());
        let drive = Drive {
            api: Arc::clone(&running.api),
            server,
            pass,
            request,
            call,
            leg,
            apart: running.apart.clone(),
            ctx: ctx.clone(),
            max_tokens,
            vocab_size: running.vocab_size,
            headers: trace_headers(&ctx),
            room: running.room.clone(),
            counted: running.load.count(),
        };
        Ok(output::stream(
            ctx.with_prompt_tokens(prompt_tokens),
            move |out| drive.run(out),
        ))
    }

    // Not needed: a request that is cancelled or dropped closes its connection, and the server notices that.
    async fn abort(&self, ctx: &RequestContext) {
        if let Ok(running) = self.running.get() {
            running.apart.abort(ctx.id());
        }
    }

    async fn drain(&self, _ctx: DrainContext) -> Result<(), EngineError> {
        if let Ok(running) = self.running.get() {
            running.apart.drained().await;
        }
        Ok(())
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        Some(self)
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        // Kept until the end: dropping it kills the server, which may still be exiting.
        let running = self.running.take();
        if let Some(running) = &running {
            let error = ServerFailure::Stopped.to_error(self.config.kind.title(), &[]);
            if let Some(server) = running.server.close(error.clone()) {
                server.fail(error);
            }
            running.apart.close();
        }
        // Also ends a start in progress, and its server.
        self.supervision.end().await;
        Ok(())
    }
}
