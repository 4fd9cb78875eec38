//! [`Launch`]: the server as a program that is supervised: from a plan to a server that is healthy, or the error that says why
//! there is none.

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

use crate::command::Plan;
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

/// What it takes to start the server, as often as that is done.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) config: LauncherConfig,
    pub(crate) plan: Plan,
    pub(crate) tasks: TaskTracker,
    pub(crate) progress: ProgressReporter,
    /// Follows the load of each server.
    pub(crate) load: Arc<ServerLoad>,
    /// Where it publishes KV events, if it does.
    pub(crate) kv_source: Option<Arc<KvSource>>,
    /// Who follow the KV events of each server, one a rank; known once the first has told of itself.
    pub(crate) kv_followers: Arc<OnceLock<Vec<KvFollower>>>,
}

/// The server in messages, and how long it may take for what.
pub(crate) fn terms(config: &LauncherConfig) -> Terms {
    Terms {
        name: format!("the {} server", config.kind.title()),
        stopped: ServerFailure::Stopped.to_error(config.kind.title(), &[]),
        start_timeout: config.start_timeout,
        exit_timeout: config.exit_timeout,
        restart: config.restart,
    }
}

impl Launch {
    /// Starts the program, listening on its ports for who has the key. What it prints goes to the log.
    fn run(&self, ports: Ports, key: &ApiKey) -> io::Result<Process> {
        let mut command = Command::new(&self.plan.program);
        self.config.inherited_env.apply(command.as_std_mut());
        command
            .args(self.plan.args(ports.http))
            // Without it, Python holds its lines back while it has a pipe to write to.
            .env("PYTHONUNBUFFERED", "1")
            .envs(&self.config.env)
            .envs(self.plan.env.iter().map(|(name, value)| (name, value)))
            .envs(ports.side_channel.iter().flat_map(side_channel));
        // The server reads its key there.
        let settings = key.give(self.plan.dialect.flags().key, &mut command)?;
        let settings_path = settings.iter().map(|file| file.path().to_owned());
        let kv_folder = self
            .kv_source
            .iter()
            .map(|source| source.folder().to_owned());
        let leftovers: Vec<PathBuf> = settings_path.chain(kv_folder).collect();
        let kept = (settings, ports);
        let mut process = Process::spawn(command, Duration::ZERO, &leftovers, kept)?;
        let limits = LineLimits {
            kept: self.config.log_lines,
            keeps_stdout: true,
            log: self.config.log_limit,
        };
        let server = self.config.kind.name();
        process.follow(&self.tasks, limits, move |_, line| log(server, line));
        Ok(process)
    }

    /// Ends the requests of a server that has failed: to kill and reap it may take a while.
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
        let (config, plan) = (&self.config, &self.plan);
        let title = config.kind.title();
        self.progress.report(&format!("starting {title}"), None);
        let ports = Ports::free(plan)?;
        let port = ports.http;
        tracing::info!(port, "starting {title}: {}", plan.line());
        let key = ApiKey::random();
        let process = self
            .run(ports, &key)
            .map_err(|error| probe::spawn_error(config, &plan.program, &plan.line(), error))?;
        let server = Arc::new(Server::new(plan.dialect, port, &key, self.tasks.clone()));
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

/// What vLLM is told about where the connectors of others ask it for KV blocks.
fn side_channel(address: &SocketAddr) -> [(&'static str, String); 2] {
    [
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", address.ip().to_string()),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", address.port().to_string()),
    ]
}
