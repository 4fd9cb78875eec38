//! [`Launch`]: the server as a supervised program: from a plan to a healthy server, or to the error that explains why there is
//! none.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::OnceLock;
use std::time::Duration;

use genset_backend_common::{EngineError, ProgressReporter};
use genset_process::{End, LineLimits, Process, Program, Started, Terms};
use tokio::process::Command;
use tokio_util::task::TaskTracker;

use crate::adapters::{AtStart, Served};
use crate::command::{Plan, lora_modules};
use crate::config::LauncherConfig;
use crate::failure::ServerFailure;
use crate::health;
use crate::key::ApiKey;
use crate::kv::{KvFollower, KvSource};
use crate::lines::log;
use crate::load::ServerLoad;
use crate::ports::Ports;
use crate::probe;
use crate::server::Server;

/// How long the server may take to exit before it is killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(15);

/// The maximum number of the server's last lines in an error.
const KEPT_LINES: usize = 20;

/// Everything needed to start the server, any number of times.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) config: LauncherConfig,
    pub(crate) plan: Plan,
    /// The adapters that each server is started with.
    pub(crate) adapters: AtStart,
    pub(crate) tasks: TaskTracker,
    pub(crate) progress: ProgressReporter,
    /// Follows the load of each server.
    pub(crate) load: Arc<ServerLoad>,
    /// Where the server publishes KV events, if it does.
    pub(crate) kv_source: Option<Arc<KvSource>>,
    /// The followers of each server's KV events, one per rank; set once the first server has reported its ranks.
    pub(crate) kv_followers: Arc<OnceLock<Vec<KvFollower>>>,
}

/// The server's name in messages, and its time limits.
pub(crate) fn terms(config: &LauncherConfig) -> Terms {
    Terms {
        name: format!("the {} server", config.kind.title()),
        stopped: ServerFailure::Stopped.to_error(config.kind.title(), &[]),
        start_timeout: config.start_timeout,
        exit_timeout: EXIT_TIMEOUT,
        restart: config.restart,
    }
}

impl Launch {
    /// Starts the program with its ports and its key, and logs its output.
    fn run(&self, plan: &Plan, ports: Ports, key: &ApiKey) -> io::Result<Process> {
        let mut command = Command::new(&plan.program);
        self.config.inherited_env.apply(command.as_std_mut());
        command
            .args(plan.args(ports.http))
            // Without it, Python buffers its output when that is a pipe.
            .env("PYTHONUNBUFFERED", "1")
            .envs(&self.config.env)
            .envs(plan.env.iter().map(|(name, value)| (name, value)))
            .envs(ports.side_channel.iter().flat_map(side_channel));
        // The server reads its key from this file.
        let settings = key.give(plan.dialect.flags().key, &mut command)?;
        let settings_path = settings.iter().map(|file| file.path().to_owned());
        let kv_folder = self
            .kv_source
            .iter()
            .map(|source| source.folder().to_owned());
        let leftovers: Vec<PathBuf> = settings_path.chain(kv_folder).collect();
        let kept = (settings, ports);
        let mut process = Process::spawn(command, Duration::ZERO, &leftovers, kept)?;
        let limits = LineLimits {
            kept: KEPT_LINES,
            keeps_stdout: true,
            log: self.config.log_limit,
        };
        let server = self.config.kind.name();
        process.follow(&self.tasks, limits, move |_, line| log(server, line));
        Ok(process)
    }

    /// Ends the requests of a failed server now: to kill and reap it may take a while.
    fn at_once(&self, server: &Server, failure: ServerFailure) -> ServerFailure {
        server.fail(failure.to_error(self.config.kind.title(), &[]));
        failure
    }
}

impl Program for Launch {
    type Session = Server;
    type Declared = ();
    type Failure = ServerFailure;

    fn spawn(&self) -> Result<Started<Server, ()>, EngineError> {
        let config = &self.config;
        let adapters = self.adapters.list();
        let plan = self.plan.clone().with_args(lora_modules(&adapters));
        let title = config.kind.title();
        self.progress.report(&format!("starting {title}"), None);
        let ports = Ports::free(&plan)?;
        let port = ports.http;
        tracing::info!(port, "starting {title}: {}", plan.line());
        let key = ApiKey::random();
        let process = self
            .run(&plan, ports, &key)
            .map_err(|error| probe::spawn_error(config, &plan.program, &plan.line(), error))?;
        let mut server = Server::new(plan.dialect, port, &key, self.tasks.clone());
        server.adapters = Served::of_start(adapters);
        let server = Arc::new(server);
        let (asked, tail) = (Arc::clone(&server), process.tail());
        let (dialect, progress) = (plan.dialect, self.progress.clone());
        let begin = async move {
            health::awaited(&asked.client, dialect, &tail, &progress).await;
            Ok(())
        };
        Ok((process, server, Box::pin(begin)))
    }

    async fn ended(&self, process: &mut Process, server: &Server) -> ServerFailure {
        self.at_once(server, process.ended().await.into())
    }

    async fn watch(&self, server: &Server) -> ServerFailure {
        let (interval, limit) = (self.config.health_interval, self.config.health_timeout);
        let failure = tokio::select! {
            failure = health::watched(server, interval, limit) => failure,
            never = self.load.follow(&server.client) => match never {},
            never = self.load.follow_gate(&server.gate) => match never {},
        };
        self.at_once(server, failure)
    }

    fn too_late(&self) -> ServerFailure {
        ServerFailure::TooLate {
            limit: self.config.start_timeout,
        }
    }

    fn dismiss(&self, process: &Process) {
        process.terminate();
    }

    fn error(&self, failure: ServerFailure, _: Option<End>, lines: &[String]) -> EngineError {
        failure.to_error(self.config.kind.title(), lines)
    }

    fn close(&self, server: &Server, error: EngineError) {
        server.fail(error);
    }

    fn readmit(&self, server: &Arc<Server>, (): &(), (): &()) -> Result<(), EngineError> {
        for follower in self.kv_followers.get().into_iter().flatten() {
            self.tasks.spawn(follower.clone().run(Arc::clone(server)));
        }
        Ok(())
    }
}

/// The variables that tell vLLM where other servers' connectors ask it for KV blocks.
fn side_channel(address: &SocketAddr) -> [(&'static str, String); 2] {
    [
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", address.ip().to_string()),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", address.port().to_string()),
    ]
}
