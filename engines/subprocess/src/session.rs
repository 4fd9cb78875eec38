//! [`Session`]: one life of the engine's process, and [`Launcher`], which begins one.

use std::num::NonZeroU32;
use std::sync::Arc;

use genset_backend_common::wire::RequestHead;
use genset_backend_common::{
    EngineConfig, EngineError, HealthReporter, ProgressReporter, Role, StartContext,
};
use genset_process::Process;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use crate::call::Call;
use crate::config::SubprocessConfig;
use crate::events::Sinks;
use crate::failure::ChildFailure;
use crate::link::Link;
use crate::process::spawn;
use crate::supervisor::{Release, Supervisor};
use crate::tasks;

/// Items of the small endpoints that may be on their way.
pub(crate) const SMALL_WINDOW: u32 = 16;
/// Events that may be on their way.
const EVENT_WINDOW: u32 = 1024;

/// A process that has started, from its start to its end. Ended when dropped.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) link: Arc<Link>,
    pub(crate) vocab_size: Option<NonZeroU32>,
    pub(crate) release: Release,
    _process: KillOnDrop,
}

#[derive(Debug)]
pub(crate) struct KillOnDrop(pub(crate) Release);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.0.kill.cancel();
    }
}

/// What it takes to start the process, as often as that is done.
#[derive(Debug, Clone)]
pub(crate) struct Launcher {
    pub(crate) config: Arc<SubprocessConfig>,
    pub(crate) tasks: TaskTracker,
    /// The engine's; each process gets one below it.
    pub(crate) release: Release,
    pub(crate) sinks: Sinks,
    pub(crate) health: HealthReporter,
    progress: ProgressReporter,
    asked: StartRequest,
}

/// The request of the endpoint `start`.
#[derive(Debug, Clone, Copy, Serialize)]
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

impl Launcher {
    pub(crate) fn new(
        config: &SubprocessConfig,
        tasks: &TaskTracker,
        release: &Release,
        ctx: &StartContext,
    ) -> Self {
        Self {
            config: Arc::new(config.clone()),
            tasks: tasks.clone(),
            release: release.clone(),
            sinks: Sinks::new(ctx, config.restart.is_some()),
            health: ctx.health.clone(),
            progress: ctx.progress.clone(),
            asked: StartRequest {
                worker_id: ctx.worker_id,
                role: ctx.role,
            },
        }
    }

    /// Starts the process and waits until its engine has started.
    ///
    /// # Errors
    /// How it failed; the process is gone, or about to go.
    ///
    /// # Cancel safety
    /// Dropping the future ends the process.
    pub(crate) async fn launch(&self) -> Result<(Session, EngineConfig), EngineError> {
        self.config.validate()?;
        self.progress.report("starting the engine's process", None);
        let (process, socket) = spawn(&self.config, &self.tasks)?;
        let release = self.release.child();
        let kill = KillOnDrop(release.clone());
        let link = Arc::new(Link::new());
        self.supervise(process, &link, &release);
        let limit = self.config.start_timeout;
        let begun = self.begin(socket, &link, &release);
        let declared = match timeout(limit, begun).await {
            Ok(declared) => declared?,
            Err(_) => {
                let what = "answer `start`";
                return Err(give_up(&link, ChildFailure::TooLate { what, limit }).await);
            }
        };
        self.sinks.know_ranks(&declared);
        self.watch_over(&link).await?;
        let session = Session {
            link,
            vocab_size: declared.vocab_size,
            release,
            _process: kill,
        };
        Ok((session, declared))
    }

    /// Hands the process to its supervisor.
    fn supervise(&self, process: Process, link: &Arc<Link>, release: &Release) {
        let supervisor = Supervisor {
            process,
            link: Arc::clone(link),
            health: self.health.clone(),
            is_mended: self.config.restart.is_some(),
            release: release.clone(),
            exit_timeout: self.config.exit_timeout,
        };
        self.tasks.spawn(supervisor.run());
    }

    /// Greets the process and has it start.
    async fn begin(
        &self,
        mut socket: UnixStream,
        link: &Arc<Link>,
        release: &Release,
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
        let (writer, leave) = (Arc::clone(link), release.leave.clone());
        self.tasks
            .spawn(async move { tasks::write(&writer, write, &leave).await });
        let call = link.call(head("start"), &self.asked, SMALL_WINDOW).await?;
        started(call, &self.progress).await
    }

    /// From now on the process must answer heartbeats, and what it publishes is passed on.
    async fn watch_over(&self, link: &Arc<Link>) -> Result<(), EngineError> {
        let (watched, config) = (Arc::clone(link), Arc::clone(&self.config));
        self.tasks
            .spawn(async move { tasks::watch(&watched, &config).await });
        let events = link.call(head("events"), &(), EVENT_WINDOW).await?;
        let follow = self.sinks.clone().follow(events, Arc::clone(link));
        self.tasks.spawn(follow);
        Ok(())
    }
}

/// Ends the process because it did not do what it should, and gives the error.
async fn give_up(link: &Link, failure: ChildFailure) -> EngineError {
    link.report(failure);
    link.closed.cancelled().await;
    link.over()
}

pub(crate) fn head(endpoint: &str) -> RequestHead {
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
