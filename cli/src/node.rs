//! What runs in this process: a worker, an input, or both, on one runtime.

mod http;
mod terminal;

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::EngineError;
use genset_backend_common::worker::{Report, Worker, WorkerHandle};
use genset_frontend::model::{Models, ServedModel};
use genset_runtime::{
    InstanceId, Reach, Readiness, Runtime, RuntimeRegistrar, Signals, StatusServer, exit_code,
};

pub(crate) use self::http::{SPARE_FILES, check_address};
use crate::args::{EngineKind, InputKind, OutputKind, RunConfig};
use crate::bench::progress::PROGRESS_AFTER;
use crate::{engine, input};

/// The exit code if the process did not do what it was started for.
const FAILED: u8 = 1;

/// The exit code if a signal came before the work was done.
const CUT_SHORT: u8 = 3;

/// Runs until the input ends, a signal arrives or the engine fails; returns the exit code.
///
/// # Errors
/// A configuration that cannot run; returned before anything is started.
pub(crate) async fn run(config: RunConfig) -> Result<u8, EngineError> {
    let signals = Signals::install().and_then(|signals| match config.input {
        InputKind::Http | InputKind::Dyn(_) => signals.with_hangup(),
        InputKind::Text | InputKind::Stdin | InputKind::Batch(_) => Ok(signals),
    });
    let signals = signals.map_err(|error| {
        EngineError::internal(format!("signals cannot be handled: {error}")).with_source(error)
    })?;
    crate::signals::take_both();
    let runtime = config.worker.network.runtime(reach(&config)).await?;
    let node = Node {
        config,
        runtime: runtime.clone(),
    };
    let code = node.run(signals).await;
    runtime.shutdown().await;
    code
}

fn reach(config: &RunConfig) -> Reach {
    match (&config.input, &config.output) {
        (InputKind::Dyn(_), _) | (_, OutputKind::Dyn(_)) => Reach::OtherProcesses,
        (
            InputKind::Http | InputKind::Text | InputKind::Stdin | InputKind::Batch(_),
            OutputKind::Engine(_),
        ) => Reach::ThisProcess,
    }
}

/// A process.
struct Node {
    config: RunConfig,
    runtime: Runtime,
}

impl Node {
    async fn run(&self, signals: Signals) -> Result<u8, EngineError> {
        match (&self.config.input, &self.config.output) {
            (InputKind::Dyn(_), OutputKind::Engine(kind)) => self.run_worker(*kind, signals).await,
            (InputKind::Http, OutputKind::Engine(kind)) => {
                http::run_with_worker(self, *kind, signals).await
            }
            (InputKind::Http, OutputKind::Dyn(_)) => http::run_alone(self, signals).await,
            (
                InputKind::Text | InputKind::Stdin | InputKind::Batch(_),
                OutputKind::Engine(kind),
            ) => terminal::run_with_worker(self, *kind, signals).await,
            (InputKind::Text | InputKind::Stdin | InputKind::Batch(_), OutputKind::Dyn(_)) => {
                terminal::run_alone(self, signals).await
            }
            (InputKind::Dyn(_), OutputKind::Dyn(_)) => Err(EngineError::internal(
                "in=dyn with out=dyn was not refused with the other words",
            )),
        }
    }

    /// Runs a worker that other processes call.
    async fn run_worker(&self, kind: EngineKind, signals: Signals) -> Result<u8, EngineError> {
        let (engine, worker) = engine::build(kind, &self.config)?;
        let name = self.config.name.clone();
        let args = &self.config.worker;
        Ok(genset_runtime::run_worker(&self.runtime, name, engine, worker, args, signals).await)
    }

    /// The status server of a process without a worker, if the flags ask for one. It is ready while there is a model and the
    /// process does not drain.
    async fn status_without_worker(
        &self,
        models: &Models,
        is_draining: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Option<StatusServer>, EngineError> {
        let models = models.clone();
        let is_ready: Readiness = Arc::new(move || !is_draining() && !models.all().is_empty());
        let status = &self.config.worker.status;
        status.listen(&self.runtime, is_ready.into(), None).await
    }

    /// Starts a worker for requests from this process and, depending on the flags, from others, and its status server.
    async fn spawn_worker(
        &self,
        kind: EngineKind,
    ) -> Result<(WorkerHandle, Option<StatusServer>), EngineError> {
        let (engine, worker) = engine::build(kind, &self.config)?;
        let (runtime, name) = (&self.runtime, &self.config.name);
        let registrar = Arc::new(RuntimeRegistrar::new(runtime.clone(), name.clone()));
        let metrics = runtime.metrics().clone();
        let worker = Worker::new(InstanceId::random().0, engine, worker, registrar, metrics);
        let worker = worker.spawn();
        let args = &self.config.worker;
        let status = args.status_server(runtime, &worker, name).await?;
        Ok((worker, status))
    }
}

/// Stops the worker, unless it is already stopping, and waits for it. On a signal, all its deadlines expire at once.
async fn shut_down(worker: &WorkerHandle, signals: &mut Signals) -> Report {
    worker.stop_once();
    loop {
        tokio::select! {
            report = worker.join() => return report,
            name = signals.next() => {
                tracing::info!("{name}: stopping at once");
                worker.stop();
            }
        }
    }
}

/// Reports a worker that failed; returns the exit code.
fn tell(report: &Report) -> u8 {
    let code = exit_code(report);
    match &report.error {
        Some(error) if code != 0 => input::complain(error),
        _ => tracing::info!(outcome = ?report.outcome, "stopped"),
    }
    code
}

/// Why a worker's own model cannot receive requests.
enum NotReady {
    /// The worker stopped.
    Stopped(Report),
    /// It serves, but its model's files or settings allow no requests. They belong to this process, so waiting would not fix
    /// them.
    Unservable(EngineError),
}

/// Waits until the worker serves and its model is ready. Reports the progress of a long start.
async fn ready(worker: &WorkerHandle, models: &Models) -> Result<Arc<ServedModel>, NotReady> {
    let started = async {
        worker.ready().await.map_err(NotReady::Stopped)?;
        let mut status = worker.status();
        let named = status.wait_for(|status| status.model.is_some()).await;
        let name = named.ok().and_then(|status| status.model.clone());
        let name = name.unwrap_or_default();
        let model = models.named(&name).await;
        model.map_err(|error| NotReady::Unservable(unservable(&name, error)))
    };
    tokio::select! {
        biased;
        model = started => model,
        report = worker.stopped() => Err(NotReady::Stopped(report)),
        never = show_progress(worker) => match never {},
    }
}

/// Adds the name of the model to the error.
fn unservable(name: &str, error: EngineError) -> EngineError {
    let message = format!("the model {name} cannot be served: {error}");
    EngineError::new(error.kind(), message).with_source(error)
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
        input::note(format_args!("{stage}{} ...", percent.unwrap_or_default()));
        if progress.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        // At most one line per second, however often the engine reports.
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
