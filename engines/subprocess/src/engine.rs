//! [`SubprocessEngine`]: the process as an engine.

use std::num::NonZeroU32;
use std::sync::Arc;

use genset_backend_common::wire::{GoAwayCode, RequestHead};
use genset_backend_common::{
    Adapter, ControlReply, ControlRequest, DrainContext, EngineConfig, EngineControls, EngineError,
    EngineState, GenerateRequest, LLMEngine, OutputStream, ProgressReporter, RequestContext, Role,
    SleepLevel, StartContext, async_trait,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::time::{Duration, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tracing::Level;

use crate::call::Call;
use crate::config::SubprocessConfig;
use crate::events::Sinks;
use crate::failure::ChildFailure;
use crate::lines::{Tail, follow};
use crate::link::Link;
use crate::oom::OomKills;
use crate::outputs::Outputs;
use crate::process::Process;
use crate::supervisor::{Release, Supervisor};
use crate::tasks;

/// Items of the small endpoints that may be on their way.
const SMALL_WINDOW: u32 = 16;
/// Events that may be on their way.
const EVENT_WINDOW: u32 = 1024;

/// An engine that runs in a process of its own and speaks `docs/subprocess-protocol.md` over a socket.
///
/// The process starts in [`start`](LLMEngine::start) and is gone, with everything it started, when
/// [`cleanup`](LLMEngine::cleanup) returns. However it ends before that, every request under way ends with an error that
/// says how, and may go on elsewhere.
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
    link: Arc<Link>,
    vocab_size: Option<NonZeroU32>,
    /// Ends the process if this is dropped before `cleanup`.
    _process: KillOnDrop,
}

#[derive(Debug)]
struct KillOnDrop(Release);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.0.kill.cancel();
    }
}

/// The request of the endpoint `start`.
#[derive(Serialize)]
struct StartRequest {
    worker_id: u64,
    role: Role,
}

/// An item of the endpoint `start`; the last one is the config.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum StartItem {
    Progress {
        stage: String,
        #[serde(default)]
        fraction: Option<f32>,
    },
    Config(Box<EngineConfig>),
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
        ctx.progress.report("starting the engine's process", None);
        let process = Process::spawn(&self.config)?;
        let kill = KillOnDrop(self.release.clone());
        let link = Arc::new(Link::new());
        let socket = self.supervise(process, &link, ctx);
        let limit = self.config.start_timeout;
        let begun = self.begin(socket, &link, ctx);
        let declared = match timeout(limit, begun).await {
            Ok(declared) => declared?,
            Err(_) => {
                let what = "answer `start`";
                return Err(give_up(&link, ChildFailure::TooLate { what, limit }).await);
            }
        };
        self.watch_over(&link, ctx).await?;
        let running = Running {
            link,
            vocab_size: declared.vocab_size,
            _process: kill,
        };
        Ok((running, declared))
    }

    /// Hands the process to its supervisor, and gives its socket.
    fn supervise(&self, process: Process, link: &Arc<Link>, ctx: &StartContext) -> UnixStream {
        let tail = Arc::new(Tail::new(self.config.stderr_lines));
        let Process {
            group,
            mut child,
            socket,
            pid,
        } = process;
        let readers = self.follow_lines(&mut child, pid, &tail);
        let supervisor = Supervisor {
            group,
            child,
            oom_kills: OomKills::of(pid),
            link: Arc::clone(link),
            tail,
            readers,
            health: ctx.health.clone(),
            release: self.release.clone(),
            exit_timeout: self.config.exit_timeout,
        };
        self.tasks.spawn(supervisor.run());
        socket
    }

    /// Greets the process and has it start.
    async fn begin(
        &self,
        mut socket: UnixStream,
        link: &Arc<Link>,
        ctx: &StartContext,
    ) -> Result<EngineConfig, EngineError> {
        let limit = self.config.hello_timeout;
        let greeting = tasks::greet(&mut socket, self.config.max_frame_bytes);
        let what = "greet over GENSET_ENGINE_FD (does the program serve an engine?)";
        let greeted = timeout(limit, greeting).await;
        let (max_frame_bytes, decoder) =
            match greeted.unwrap_or(Err(ChildFailure::TooLate { what, limit })) {
                Ok(greeted) => greeted,
                Err(failure) => return Err(give_up(link, failure).await),
            };
        link.set_max_frame_bytes(max_frame_bytes);
        let (read, write) = socket.into_split();
        let reader = Arc::clone(link);
        self.tasks
            .spawn(async move { tasks::read(&reader, read, decoder).await });
        let (writer, leave) = (Arc::clone(link), self.release.leave.clone());
        self.tasks
            .spawn(async move { tasks::write(&writer, write, &leave).await });
        let asked = StartRequest {
            worker_id: ctx.worker_id,
            role: ctx.role,
        };
        let call = link.call(head("start"), &asked, SMALL_WINDOW).await?;
        started(call, &ctx.progress).await
    }

    fn follow_lines(
        &self,
        child: &mut tokio::process::Child,
        pid: u32,
        tail: &Arc<Tail>,
    ) -> Vec<AbortOnDropHandle<()>> {
        let mut readers = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            let reader = self.tasks.spawn(follow(stdout, Level::INFO, pid, None));
            readers.push(AbortOnDropHandle::new(reader));
        }
        if let Some(stderr) = child.stderr.take() {
            let tail = Arc::clone(tail);
            let reader = async move { follow(stderr, Level::WARN, pid, Some(&tail)).await };
            readers.push(AbortOnDropHandle::new(self.tasks.spawn(reader)));
        }
        readers
    }

    /// From now on the process must answer heartbeats, and what it publishes is passed on.
    async fn watch_over(&self, link: &Arc<Link>, ctx: &StartContext) -> Result<(), EngineError> {
        let (watched, config) = (Arc::clone(link), self.config.clone());
        self.tasks
            .spawn(async move { tasks::watch(&watched, &config).await });
        let events = link.call(head("events"), &(), EVENT_WINDOW).await?;
        let sinks = Sinks::new(ctx);
        self.tasks.spawn(sinks.follow(events));
        Ok(())
    }

    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let running = self.running.get()?;
        let call = running.link.call(head("control"), &request, SMALL_WINDOW);
        let reply = call.await?.only().await?;
        reply.ok_or_else(|| EngineError::internal("the engine's process gave no reply to control"))
    }

    async fn do_control(&self, request: ControlRequest) -> Result<(), EngineError> {
        match self.control(request).await? {
            ControlReply::Done => Ok(()),
            other @ (ControlReply::Adapters { .. } | ControlReply::Profile { .. }) => {
                Err(unexpected(&other))
            }
        }
    }

    /// Asks the process to free everything and to go.
    async fn take_leave(&self, link: &Arc<Link>) -> Result<(), EngineError> {
        let limit = self.config.cleanup_timeout;
        let call = link.call(head("cleanup"), &(), SMALL_WINDOW);
        let cleaned = timeout(limit, async { call.await?.only::<Value>().await }).await;
        let failure = match cleaned {
            Ok(Ok(_)) => {
                link.go_away(
                    GoAwayCode::Shutdown,
                    "the worker has no more use for the engine",
                );
                self.release.leave.cancel();
                return Ok(());
            }
            Ok(Err(_)) if link.is_dead() => return Ok(()),
            Ok(Err(error)) => {
                self.release.leave.cancel();
                return Err(error);
            }
            Err(_) => ChildFailure::TooLate {
                what: "answer `cleanup`",
                limit,
            },
        };
        self.release.kill.cancel();
        Err(failure.to_error(&[]))
    }
}

/// Ends the process because it did not do what it should, and gives the error.
async fn give_up(link: &Link, failure: ChildFailure) -> EngineError {
    link.report(failure);
    link.closed.cancelled().await;
    link.over()
}

fn unexpected(reply: &ControlReply) -> EngineError {
    EngineError::internal(format!(
        "the engine's process answered a control request with {reply:?}, which is not what was asked"
    ))
}

fn head(endpoint: &str) -> RequestHead {
    RequestHead {
        endpoint: endpoint.to_owned(),
        ..RequestHead::default()
    }
}

/// Follows a start to its end; the last item says what the engine can do.
async fn started(mut call: Call, progress: &ProgressReporter) -> Result<EngineConfig, EngineError> {
    let mut declared = None;
    while let Some(item) = call.item().await? {
        match item {
            StartItem::Progress { stage, fraction } => progress.report(&stage, fraction),
            StartItem::Config(config) => declared = Some(config),
        }
    }
    let Some(mut declared) = declared else {
        return Err(EngineError::internal(
            "the engine's process ended `start` without a config",
        ));
    };
    // A socket does not follow a paused clock.
    declared.capabilities.virtual_time = false;
    declared.validate()?;
    Ok(*declared)
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
        let mut declared = None;
        let start = async {
            let (running, config) = tokio::select! {
                biased;
                () = self.abandon.cancelled() => return Err(ChildFailure::Stopped.to_error(&[])),
                launched = self.launch(&ctx) => launched?,
            };
            declared = Some(config);
            Ok(running)
        };
        self.running.start(start).await?;
        declared.ok_or_else(|| EngineError::internal("started without a config"))
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let running = self.running.get()?;
        let prompt_tokens = request.prompt_tokens().unwrap_or(ctx.prompt_tokens());
        let call = running
            .link
            .call(generate_head(&ctx), &request, self.config.window)
            .await?;
        Ok(Outputs::stream(
            call,
            ctx,
            running.vocab_size,
            prompt_tokens,
        ))
    }

    // `abort` has nothing to add: a request that is cancelled or dropped sends Cancel by itself, and the process aborts it.

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        let running = self.running.get()?;
        let deadline_ms = u64::try_from(ctx.deadline.as_millis()).unwrap_or(u64::MAX);
        let asked = DrainRequest { deadline_ms };
        let call = running
            .link
            .call(head("drain"), &asked, SMALL_WINDOW)
            .await?;
        call.only::<Value>().await.map(drop)
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        // A start that is under way ends, and its process with it.
        self.abandon.cancel();
        // Kept to the end: dropping it kills the process, which may still be on its way out.
        let running = self.running.take();
        let result = match &running {
            Some(running) => {
                running.link.end_calls(ChildFailure::Stopped.to_error(&[]));
                self.take_leave(&running.link).await
            }
            None => Ok(()),
        };
        self.tasks.close();
        self.tasks.wait().await;
        result
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        Some(self)
    }
}

#[async_trait]
impl EngineControls for SubprocessEngine {
    async fn sleep(&self, level: SleepLevel) -> Result<(), EngineError> {
        self.do_control(ControlRequest::Sleep { level }).await
    }

    async fn wake(&self) -> Result<(), EngineError> {
        self.do_control(ControlRequest::Wake).await
    }

    async fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        self.do_control(ControlRequest::ClearPrefixCache).await
    }

    async fn load_adapter(&self, adapter: Adapter) -> Result<(), EngineError> {
        self.do_control(ControlRequest::LoadAdapter { adapter })
            .await
    }

    async fn unload_adapter(&self, name: &str) -> Result<(), EngineError> {
        let name = name.to_owned();
        self.do_control(ControlRequest::UnloadAdapter { name })
            .await
    }

    async fn adapters(&self) -> Result<Vec<Adapter>, EngineError> {
        match self.control(ControlRequest::ListAdapters).await? {
            ControlReply::Adapters { adapters } => Ok(adapters),
            other @ (ControlReply::Done | ControlReply::Profile { .. }) => Err(unexpected(&other)),
        }
    }

    async fn update_weights(&self, source: Value) -> Result<(), EngineError> {
        self.do_control(ControlRequest::UpdateWeights { source })
            .await
    }

    async fn start_profile(&self) -> Result<(), EngineError> {
        self.do_control(ControlRequest::StartProfile).await
    }

    async fn stop_profile(&self) -> Result<String, EngineError> {
        match self.control(ControlRequest::StopProfile).await? {
            ControlReply::Profile { location } => Ok(location),
            other @ (ControlReply::Done | ControlReply::Adapters { .. }) => Err(unexpected(&other)),
        }
    }
}
