//! [`SubprocessEngine`]: the process as an engine.

use std::num::NonZeroU32;
use std::sync::Arc;

use genset_backend_common::ports::Control;
use genset_backend_common::{
    DrainContext, EngineConfig, EngineControls, EngineError, EngineState, ErrorKind,
    GenerateRequest, LLMEngine, OutputStream, RequestContext, StartContext, async_trait,
    controls::{ControlReply, ControlRequest},
    error::At,
};
use genset_process::{Supervised, Supervision};
use genset_wire::{GoAwayCode, RequestHead};
use serde_json::Value;
use tokio::time::timeout;

use crate::config::SubprocessConfig;
use crate::failure::ChildFailure;
use crate::launch::{Launch, SMALL_WINDOW, head, terms};
use crate::link::Link;
use crate::messages::DrainRequest;
use crate::outputs::Outputs;

/// An engine that runs in its own process and speaks `docs/subprocess-protocol.md` over a socket.
///
/// [`start`](LLMEngine::start) starts the process. When [`cleanup`](LLMEngine::cleanup) returns, the process and all its
/// descendants are gone. If the process ends before that, every active request ends with an error that says how, and may
/// migrate. Then the engine is dead, unless [`SubprocessConfig::restart`] restarts it.
///
/// # Examples
/// ```no_run
/// use genset_backend_common::{LLMEngine, StartContext};
/// use genset_engine_subprocess::{SubprocessConfig, SubprocessEngine};
///
/// # async fn start() -> Result<(), genset_backend_common::EngineError> {
/// let config = SubprocessConfig::new("python3").with_args(["my_engine.py"]);
/// let engine = SubprocessEngine::new(config);
/// println!("{} is loaded", engine.start(StartContext::detached(1)).await?.model);
/// engine.cleanup().await
/// # }
/// ```
#[derive(Debug)]
pub struct SubprocessEngine {
    config: SubprocessConfig,
    running: EngineState<Running>,
    supervision: Supervision,
}

/// The state that `start` builds.
#[derive(Debug)]
struct Running {
    /// Ends the process if this is dropped before `cleanup`.
    process: Supervised<Link>,
    /// The vocabulary size of every process: one with a different size must not serve.
    vocab_size: Option<NonZeroU32>,
}

impl SubprocessEngine {
    /// An engine whose process is not started yet.
    #[must_use]
    pub fn new(config: SubprocessConfig) -> Self {
        Self {
            config,
            running: EngineState::new(),
            supervision: Supervision::default(),
        }
    }

    async fn launch(&self, ctx: &StartContext) -> Result<(Running, EngineConfig), EngineError> {
        self.config.validate()?;
        let program = Launch::new(&self.config, &self.supervision, ctx);
        let started = (self.supervision).start(program, terms(&self.config), ctx);
        let (process, declared) = started.await?;
        let running = Running {
            process,
            vocab_size: declared.vocab_size,
        };
        Ok((running, declared))
    }

    /// The process that serves now.
    fn link(&self) -> Result<Arc<Link>, EngineError> {
        self.running.get()?.process.session()
    }

    /// Asks the process to free everything and exit.
    async fn take_leave(&self, link: &Arc<Link>) -> Result<(), EngineError> {
        let limit = self.config.cleanup_timeout;
        let call = link.call(head("cleanup"), &(), SMALL_WINDOW);
        match timeout(limit, async { call.await?.only::<Value>().await }).await {
            Ok(Ok(_)) => {
                let reason = "the worker has no more use for the engine";
                link.go_away(GoAwayCode::Shutdown, reason);
                Ok(())
            }
            Ok(Err(_)) if link.is_dead() => Ok(()),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                self.supervision.kill();
                let what = "answer `cleanup`";
                Err(ChildFailure::TooLate { what, limit }.to_error(&[]))
            }
        }
    }
}

#[async_trait]
impl LLMEngine for SubprocessEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let stopped = ChildFailure::Stopped.to_error(&[]);
        let start = self.supervision.unless_ending(self.launch(&ctx), stopped);
        self.running.start(start).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let running = self.running.get()?;
        let link = running.process.session()?;
        let prompt_tokens = request.prompt_tokens().unwrap_or(ctx.prompt_tokens());
        let head = RequestHead::of("generate".to_owned(), &ctx);
        let call = link.call(head, &request, self.config.window).await?;
        Ok(Outputs::stream(
            call,
            ctx,
            running.vocab_size,
            prompt_tokens,
        ))
    }

    // `abort` is not needed: a request that is cancelled or dropped sends Cancel by itself, and the process aborts it.

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        let link = self.link()?;
        let deadline_ms = u64::try_from(ctx.deadline.as_millis()).unwrap_or(u64::MAX);
        let asked = DrainRequest { deadline_ms };
        let call = link.call(head("drain"), &asked, SMALL_WINDOW).await?;
        call.only::<Value>().await.map(drop)
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        // Kept until the end: dropping it kills the process, which may still be exiting.
        let running = self.running.take();
        let stopped = ChildFailure::Stopped.to_error(&[]);
        let served = running
            .as_ref()
            .and_then(|it| it.process.close(stopped.clone()));
        let mut result = Ok(());
        if let Some(link) = served {
            link.end_calls(stopped);
            result = self.take_leave(&link).await;
        }
        // Also ends a start or restart in progress, and its process.
        self.supervision.end().await;
        result
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        Some(self)
    }
}

#[async_trait]
impl Control for SubprocessEngine {
    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let link = self.link()?;
        let call = link.call(head("control"), &request, SMALL_WINDOW);
        let reply = call.await?.only().await;
        let reply = reply.map_err(|error| unless_absent(&request, error))?;
        reply.ok_or_else(|| EngineError::internal("the engine's process gave no reply to control"))
    }
}

/// A process without the endpoint `control` may refuse it as `NotFound`. An operation that names nothing can have no other reason
/// for that, and is then unsupported.
fn unless_absent(request: &ControlRequest, error: EngineError) -> EngineError {
    let names_something = match request {
        ControlRequest::LoadAdapter { .. }
        | ControlRequest::UnloadAdapter { .. }
        | ControlRequest::UpdateWeights { .. } => true,
        ControlRequest::Sleep { .. }
        | ControlRequest::Wake
        | ControlRequest::ClearPrefixCache
        | ControlRequest::ListAdapters
        | ControlRequest::StartProfile
        | ControlRequest::StopProfile
        | ControlRequest::LogLevel { .. } => false,
    };
    if names_something || error.kind() != ErrorKind::NotFound {
        return error;
    }
    EngineError::unsupported(At::other(request.op()), "is no operation of this engine")
        .with_source(error)
}
