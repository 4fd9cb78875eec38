//! [`SubprocessEngine`]: the process as an engine.

use std::sync::Arc;

use genset_backend_common::ports::Control;
use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::wire::{GoAwayCode, RequestHead};
use genset_backend_common::{
    DrainContext, EngineConfig, EngineControls, EngineError, EngineState, GenerateRequest,
    LLMEngine, OutputStream, RequestContext, StartContext, async_trait,
    controls::{ControlReply, ControlRequest},
};
use serde::Serialize;
use serde_json::Value;
use tokio::time::{Duration, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::config::SubprocessConfig;
use crate::failure::ChildFailure;
use crate::keeper::{Current, Keeper};
use crate::outputs::Outputs;
use crate::session::{KillOnDrop, Launcher, SMALL_WINDOW, Session, head};
use crate::supervisor::Release;

/// An engine that runs in a process of its own and speaks `docs/subprocess-protocol.md` over a socket.
///
/// The process starts in [`start`](LLMEngine::start) and is gone, with everything it started, when
/// [`cleanup`](LLMEngine::cleanup) returns. However it ends before that, every request under way ends with an error that
/// says how, and may go on elsewhere; then the engine is dead, unless [`SubprocessConfig::restart`] has it started again.
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
    tasks: TaskTracker,
    release: Release,
    /// Cancelled by `cleanup`: a start that is under way ends.
    abandon: CancellationToken,
}

/// What `start` builds.
#[derive(Debug)]
struct Running {
    current: Arc<Current>,
    /// Cancelled once nobody starts the process again.
    is_unkept: CancellationToken,
    /// Ends the process, and its keeper, if this is dropped before `cleanup`.
    _process: KillOnDrop,
    _abandon: DropGuard,
}

/// The request of the endpoint `drain`.
#[derive(Serialize)]
struct DrainRequest {
    deadline_ms: u64,
}

impl SubprocessEngine {
    /// An engine whose process is not started yet.
    #[must_use]
    pub fn new(config: SubprocessConfig) -> Self {
        Self {
            config,
            running: EngineState::new(),
            tasks: TaskTracker::new(),
            release: Release::default(),
            abandon: CancellationToken::new(),
        }
    }

    async fn launch(&self, ctx: &StartContext) -> Result<(Running, EngineConfig), EngineError> {
        self.config.validate()?;
        let launcher = Launcher::new(&self.config, &self.tasks, &self.release, ctx);
        let (session, declared) = launcher.launch().await?;
        let current = Arc::new(Current::new(session));
        let is_unkept = CancellationToken::new();
        if let Some(policy) = self.config.restart {
            let keeper = Keeper {
                launcher,
                policy,
                current: Arc::clone(&current),
                declared: declared.clone(),
                restarts: restarts(ctx),
                abandon: self.abandon.clone(),
            };
            let unkept = is_unkept.clone().drop_guard();
            self.tasks.spawn(async move {
                let _unkept = unkept;
                keeper.run().await;
            });
        } else {
            is_unkept.cancel();
        }
        let running = Running {
            current,
            is_unkept,
            _process: KillOnDrop(self.release.clone()),
            _abandon: self.abandon.clone().drop_guard(),
        };
        Ok((running, declared))
    }

    /// The process that serves now.
    fn session(&self) -> Result<Arc<Session>, EngineError> {
        self.running.get()?.current.session()
    }

    /// Asks the process to free everything and to go.
    async fn take_leave(&self, session: &Session) -> Result<(), EngineError> {
        let (link, release) = (&session.link, &session.release);
        let limit = self.config.cleanup_timeout;
        let call = link.call(head("cleanup"), &(), SMALL_WINDOW);
        let cleaned = timeout(limit, async { call.await?.only::<Value>().await }).await;
        let failure = match cleaned {
            Ok(Ok(_)) => {
                link.go_away(
                    GoAwayCode::Shutdown,
                    "the worker has no more use for the engine",
                );
                release.leave.cancel();
                return Ok(());
            }
            Ok(Err(_)) if link.is_dead() => return Ok(()),
            Ok(Err(error)) => {
                release.leave.cancel();
                return Err(error);
            }
            Err(_) => ChildFailure::TooLate {
                what: "answer `cleanup`",
                limit,
            },
        };
        release.kill.cancel();
        Err(failure.to_error(&[]))
    }
}

fn restarts(ctx: &StartContext) -> Counter {
    let restarts = Counter::default();
    let help = "Attempts to start the engine's process again";
    let name = "genset_engine_process_restarts";
    ctx.metrics.register(name, help, restarts.clone());
    restarts
}

fn generate_head(ctx: &RequestContext) -> RequestHead {
    let millis = |left: Duration| u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
    RequestHead {
        endpoint: "generate".to_owned(),
        id: ctx.id().to_owned(),
        deadline_ms: ctx.time_left().map(millis),
        traceparent: ctx
            .trace()
            .map(|t| t.traceparent.clone())
            .unwrap_or_default(),
        tracestate: ctx
            .trace()
            .map(|t| t.tracestate.clone())
            .unwrap_or_default(),
        headers: ctx.headers().clone(),
        ..RequestHead::default()
    }
}

#[async_trait]
impl LLMEngine for SubprocessEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let start = async {
            tokio::select! {
                biased;
                () = self.abandon.cancelled() => Err(ChildFailure::Stopped.to_error(&[])),
                launched = self.launch(&ctx) => launched,
            }
        };
        self.running.start(start).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let session = self.session()?;
        let prompt_tokens = request.prompt_tokens().unwrap_or(ctx.prompt_tokens());
        let call = session
            .link
            .call(generate_head(&ctx), &request, self.config.window)
            .await?;
        Ok(Outputs::stream(
            call,
            ctx,
            session.vocab_size,
            prompt_tokens,
        ))
    }

    // `abort` has nothing to add: a request that is cancelled or dropped sends Cancel by itself, and the process aborts it.

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        let session = self.session()?;
        let deadline_ms = u64::try_from(ctx.deadline.as_millis()).unwrap_or(u64::MAX);
        let asked = DrainRequest { deadline_ms };
        let call = session
            .link
            .call(head("drain"), &asked, SMALL_WINDOW)
            .await?;
        call.only::<Value>().await.map(drop)
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        // A start that is under way ends, the first or a later one, and its process with it.
        self.abandon.cancel();
        // Kept to the end: dropping it kills the process, which may still be on its way out.
        let running = self.running.take();
        let mut result = Ok(());
        if let Some(running) = &running {
            running.is_unkept.cancelled().await;
            if let Ok(session) = running.current.session() {
                let stopped = ChildFailure::Stopped.to_error(&[]);
                session.link.end_calls(stopped);
                result = self.take_leave(&session).await;
            }
        }
        self.tasks.close();
        self.tasks.wait().await;
        result
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        Some(self)
    }
}

#[async_trait]
impl Control for SubprocessEngine {
    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let session = self.session()?;
        let call = session.link.call(head("control"), &request, SMALL_WINDOW);
        let reply = call.await?.only().await?;
        reply.ok_or_else(|| EngineError::internal("the engine's process gave no reply to control"))
    }
}
