//! One process with everything in it: worker, runtime and, as the input asks, the HTTP server or the terminal.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::EngineError;
use genset_backend_common::worker::{Report, Worker, WorkerHandle};
use genset_frontend::FrontendServer;
use genset_frontend::model::{Models, ServedModel};
use genset_runtime::{InstanceId, Runtime, RuntimeRegistrar, Signals};

use crate::args::{InputKind, RunConfig};
use crate::engine;
use crate::input::{self, Ending};

/// How long connections may take to send what is written, once every answer is.
const CONNECTION_GRACE: Duration = Duration::from_secs(5);

/// The exit code when a signal came before the work was done.
const CUT_SHORT: u8 = 3;

/// Time after which a start that is not done says how far it is.
const PROGRESS_AFTER: Duration = Duration::from_secs(2);

/// Runs until the input ends, a signal comes or the engine fails; returns the exit code.
///
/// # Errors
/// A configuration that cannot run, before anything was started.
pub(crate) async fn run(config: RunConfig) -> Result<u8, EngineError> {
    let signals = Signals::install().map_err(|error| {
        EngineError::internal(format!("signals cannot be handled: {error}")).with_source(error)
    })?;
    let runtime = config.worker.runtime()?;
    let name = config.worker.endpoint_name()?;
    let (engine, worker_config) = engine::build(&config)?;
    let server = match config.input {
        InputKind::Http => Some(bind(&runtime, &config).await?),
        InputKind::Text | InputKind::Stdin => None,
    };
    let registrar = Arc::new(RuntimeRegistrar::new(runtime.clone(), name));
    let id = InstanceId::random().0;
    let worker = Worker::new(
        id,
        engine,
        worker_config,
        registrar,
        runtime.metrics().clone(),
    )
    .spawn();
    let status = config.worker.status_server(&runtime, &worker).await?;
    let code = match server {
        Some(server) => serve_http(&config, worker, signals, server).await,
        None => serve_terminal(&config, &runtime, worker, signals).await,
    };
    drop(status);
    runtime.shutdown().await;
    Ok(code)
}

async fn bind(runtime: &Runtime, config: &RunConfig) -> Result<FrontendServer, EngineError> {
    let address = config.frontend.address;
    FrontendServer::bind(runtime, config.frontend.clone()).await.map_err(|error| {
        let problem = format!("cannot listen on {address}: {error}; choose another with --http-host and --http-port");
        EngineError::invalid_argument("--http-port", problem)
    })
}

async fn serve_http(
    config: &RunConfig,
    worker: WorkerHandle,
    mut signals: Signals,
    server: FrontendServer,
) -> u8 {
    tokio::select! {
        ready = ready(&worker, server.models()) => match ready {
            Ok(model) => input::print(&input::banner(config, &server, &model)),
            Err(report) => return end(report, &server).await,
        },
        name = signals.next() => stop(name, &worker, &server),
    }
    let report = loop {
        tokio::select! {
            report = worker.join() => break report,
            name = signals.next() => stop(name, &worker, &server),
        }
    };
    end(report, &server).await
}

fn stop(signal: &str, worker: &WorkerHandle, server: &FrontendServer) {
    tracing::info!("{signal}: draining; a second signal stops at once");
    server.drain();
    worker.stop();
}

async fn end(report: Report, server: &FrontendServer) -> u8 {
    server.shutdown(CONNECTION_GRACE).await;
    tell(&report)
}

/// Says how the worker ended, when not well; returns the exit code.
fn tell(report: &Report) -> u8 {
    let code = report.outcome.exit_code();
    match &report.error {
        Some(error) if code != 0 => eprintln!("error: {error}"),
        _ => tracing::info!(outcome = ?report.outcome, "stopped"),
    }
    code
}

async fn serve_terminal(
    config: &RunConfig,
    runtime: &Runtime,
    worker: WorkerHandle,
    mut signals: Signals,
) -> u8 {
    let models = Models::follow(
        runtime,
        config.frontend.selection,
        config.frontend.model_timeout,
    );
    let ended = tokio::select! {
        ready = ready(&worker, &models) => match ready {
            Ok(model) => input::run_terminal(config, model, &mut signals).await,
            Err(report) => return tell(&report),
        },
        _ = signals.next() => Ok(Ending::Signalled),
    };
    let report = worker.shutdown().await;
    models.shutdown().await;
    match (ended, config.input) {
        // A question without its whole answer; a chat, in contrast, is over when somebody says so.
        (Ok(Ending::Signalled), InputKind::Stdin) => tell(&report).max(CUT_SHORT),
        (Ok(Ending::Signalled | Ending::Done), _) => tell(&report),
        (Err(error), _) => {
            eprintln!("error: {error}");
            1
        }
    }
}

/// Waits until the worker serves and its model is ready; on the way, says how far a long start is.
async fn ready(worker: &WorkerHandle, models: &Models) -> Result<Arc<ServedModel>, Report> {
    let started = async {
        worker.ready().await?;
        match models.any().await {
            Some(model) => Ok(model),
            None => Err(worker.stopped().await),
        }
    };
    tokio::select! {
        biased;
        model = started => model,
        report = worker.stopped() => Err(report),
        never = show_progress(worker) => match never {},
    }
}

async fn show_progress(worker: &WorkerHandle) -> std::convert::Infallible {
    let mut progress = worker.progress();
    tokio::time::sleep(PROGRESS_AFTER).await;
    loop {
        let now = progress.borrow_and_update().clone();
        let percent = now
            .fraction
            .map(|fraction| format!(" {:.0} %", f64::from(fraction) * 100.0));
        let stage = if now.stage.is_empty() {
            "starting the engine"
        } else {
            &now.stage
        };
        eprintln!("{stage}{} ...", percent.unwrap_or_default());
        if progress.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        // At most a line a second, however often the engine reports.
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
