//! The OpenAI server, with a worker in the same process or for workers of other processes.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::worker::{Outcome, Report, State, WorkerHandle};
use genset_backend_common::{EngineError, ErrorKind};
use genset_frontend::model::Models;
use genset_frontend::{BindError, FrontendServer};
use genset_runtime::Signals;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::sync::watch;

use super::{FAILED, Node, NotReady, ready, shut_down, tell};
use crate::args::{EngineKind, RunConfig};
use crate::input;

/// How long connections may take to send buffered data after the last answer.
const CONNECTION_GRACE: Duration = Duration::from_secs(5);

/// An upper bound for the files that a process has open besides its connections.
pub(crate) const SPARE_FILES: usize = 256;

/// Runs a server and its worker in one process.
///
/// # Errors
/// A configuration that cannot run; returned before anything is started.
pub(super) async fn run_with_worker(
    node: &Node,
    kind: EngineKind,
    signals: Signals,
) -> Result<u8, EngineError> {
    let server = bind(node).await?;
    let (worker, _status) = node.spawn_worker(kind).await?;
    let (states, models) = (worker.states(), server.models().clone());
    tokio::select! {
        biased;
        never = tell_of_the_end(states, &models) => match never {},
        code = serve(&node.config, worker, signals, server) => Ok(code),
    }
}

/// Runs a server for the workers that discovery lists.
///
/// # Errors
/// A configuration that cannot run; returned before anything is started.
pub(super) async fn run_alone(node: &Node, mut signals: Signals) -> Result<u8, EngineError> {
    let server = Arc::new(bind(node).await?);
    let asked = Arc::clone(&server);
    let is_draining = move || asked.is_draining();
    let status = node.status_without_worker(server.models(), is_draining);
    let _status = status.await?;
    input::announce(&input::banner_without_model(&node.config, &server));
    let name = signals.next().await;
    tracing::info!("{name}: draining; a second signal stops at once");
    server.drain();
    let is_over = async {
        tokio::select! {
            () = tokio::time::sleep(node.config.worker.grace) => {}
            name = signals.next() => tracing::info!("{name}: stopping at once"),
        }
    };
    // New clients get an error response meanwhile: the listener closes after the last answer.
    let is_drained = async {
        server.idle().await;
        server.shutdown(Duration::MAX).await
    };
    let outcome = tokio::select! {
        biased;
        _ = is_drained => Outcome::Clean,
        () = is_over => {
            server.cut_short();
            server.shutdown(CONNECTION_GRACE).await;
            Outcome::Forced
        }
    };
    tracing::info!(?outcome, "stopped");
    Ok(outcome.exit_code())
}

/// Every connection uses a file descriptor: raises the process's limit as far as the system allows.
fn raise_file_limit(max_connections: usize) {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let allowed = limit.maximum.and_then(|files| usize::try_from(files).ok());
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files could not be raised");
    }
    if let Some(files) =
        allowed.filter(|files| *files < max_connections.saturating_add(SPARE_FILES))
    {
        tracing::warn!(
            files,
            max_connections,
            "the system allows fewer open files than connections; raise its limit or lower --max-connections"
        );
    }
}

async fn bind(node: &Node) -> Result<FrontendServer, EngineError> {
    let config = &node.config.frontend;
    raise_file_limit(config.max_connections);
    let bound = FrontendServer::bind(&node.runtime, config.clone()).await;
    bound.map_err(refused)
}

/// The error of a server that cannot listen, with the flag at fault.
fn refused(error: BindError) -> EngineError {
    match error {
        BindError::Address { .. } => {
            let problem = format!("{error}; choose another with --http-host and --http-port");
            EngineError::invalid_argument("--http-port", problem)
        }
        BindError::Keys(error) => EngineError::invalid_argument("--api-keys", error),
        BindError::Config(error) => EngineError::new(ErrorKind::InvalidArgument, error.to_string()),
    }
}

/// Whether a server could listen on `address` now.
///
/// # Errors
/// As when it starts.
pub(crate) fn check_address(address: SocketAddr) -> Result<(), EngineError> {
    match TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(source) => Err(refused(BindError::Address { address, source })),
    }
}

/// Stops answers from waiting for another instance once the worker cleans up: this process ends with the worker, before another
/// instance could arrive.
async fn tell_of_the_end(mut states: watch::Receiver<State>, models: &Models) -> Infallible {
    let is_over = |state: &State| match state {
        State::CleaningUp { .. } | State::Stopped(_) => true,
        State::Created
        | State::Starting
        | State::Registering(_)
        | State::Serving(_)
        | State::Suspended(_)
        | State::Draining { .. } => false,
    };
    drop(states.wait_for(is_over).await);
    models.expect_nobody();
    std::future::pending().await
}

async fn serve(
    config: &RunConfig,
    worker: WorkerHandle,
    mut signals: Signals,
    server: FrontendServer,
) -> u8 {
    let mut is_draining = tokio::select! {
        ready = ready(&worker, server.models()) => match ready {
            Ok(model) => {
                input::announce(&input::banner(config, &server, &model));
                false
            }
            Err(NotReady::Stopped(report)) => return end(report, &server).await,
            Err(NotReady::Unservable(error)) => {
                let report = shut_down(&worker, &mut signals).await;
                let code = end(report, &server).await;
                input::complain(error);
                return code.max(FAILED);
            }
        },
        name = signals.next() => {
            drain(name, &worker, &server);
            true
        }
    };
    let report = loop {
        tokio::select! {
            report = worker.join() => break report,
            name = signals.next() => match std::mem::replace(&mut is_draining, true) {
                false => drain(name, &worker, &server),
                true => {
                    tracing::info!("{name}: stopping at once");
                    worker.stop();
                }
            },
        }
    };
    end(report, &server).await
}

fn drain(signal: &str, worker: &WorkerHandle, server: &FrontendServer) {
    tracing::info!("{signal}: draining; a second signal stops at once");
    server.drain();
    worker.stop();
}

async fn end(report: Report, server: &FrontendServer) -> u8 {
    // A client that does not read its answer does not change how the worker ended.
    server.shutdown(CONNECTION_GRACE).await;
    tell(&report)
}
