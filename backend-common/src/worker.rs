//! The [`Worker`]: owns the life of one engine, from `start` to `cleanup`, and mediates its requests.
//!
//! `lifecycle` decides (pure), `shell` performs, `adapter` and `guard` enforce the rules of requests and streams, `admission` and
//! `in_flight` count requests, `canary` probes, `status` is what probes see, and `adapters` tracks the engine's adapters.
//! `controls`, `telemetry` and `model_server` are what their names say. The lifecycle depends on none of the others.

mod adapter;
mod adapters;
mod admission;
mod canary;
mod config;
mod controls;
mod effects;
mod guard;
mod in_flight;
mod lifecycle;
mod model_server;
mod operations;
mod shell;
mod signals;
mod status;
mod telemetry;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::task::TaskTracker;

pub use config::{CanaryConfig, RequestLimits, WorkerConfig};
pub use lifecycle::{
    Draining, Effect, Event, Fault, Listing, Outcome, Registering, State, StopCause, Suspended,
    step,
};
pub use status::WorkerStatus;

use crate::engine::{LLMEngine, StartContext};
use crate::error::EngineError;
use crate::handles::{MetricsRegistry, Progress};
use crate::ports::{Control, Registrar};

/// How long [`WorkerHandle::shutdown`] waits for the engine's aborted tasks; a task that blocks its thread cannot be aborted.
const TASK_END_TIMEOUT: Duration = Duration::from_secs(5);

/// One engine and everything needed to serve it.
///
/// # Examples
/// ```no_run
/// # use std::sync::Arc;
/// # use genset_backend_common::{LLMEngine, MetricsRegistry, ports::Registrar};
/// # use genset_backend_common::worker::{Worker, WorkerConfig};
/// # async fn serve(engine: Arc<dyn LLMEngine>, registrar: Arc<dyn Registrar>) {
/// let worker = Worker::new(1, engine, WorkerConfig::default(), registrar, MetricsRegistry::default());
/// let handle = worker.spawn();
/// handle.ready().await.expect("the engine starts");
/// let report = handle.shutdown().await;
/// assert_eq!(report.outcome.exit_code(), 0);
/// # }
/// ```
pub struct Worker {
    engine: Arc<dyn LLMEngine>,
    config: WorkerConfig,
    registrar: Arc<dyn Registrar>,
    start: StartContext,
}

impl Worker {
    /// Creates an idle worker with the id `worker_id` (below 2^53, unique in the cluster).
    #[must_use]
    pub fn new(
        worker_id: u64,
        engine: Arc<dyn LLMEngine>,
        config: WorkerConfig,
        registrar: Arc<dyn Registrar>,
        metrics: MetricsRegistry,
    ) -> Self {
        let start = StartContext {
            role: config.role,
            adapters: config.adapters.clone(),
            metrics,
            ..StartContext::detached(worker_id)
        };
        Self {
            engine,
            config,
            registrar,
            start,
        }
    }

    /// Starts the worker on the current tokio runtime.
    #[must_use = "a worker is stopped through its handle"]
    pub fn spawn(self) -> WorkerHandle {
        let tasks = TaskTracker::new();
        let calls = operations::EngineCalls::new(tasks.clone(), operations::Deadlines::default());
        let (stops, stops_seen) = watch::channel(0);
        let (states, state) = watch::channel(State::Created);
        let (reports, report) = watch::channel(None);
        let progress = self.start.progress.subscribe();
        let adapters = adapters::AdapterBoard::default();
        let control = controls::HandleControl {
            adapters: adapters.clone(),
            engine: Arc::downgrade(&self.engine),
            state: state.clone(),
            calls: calls.clone(),
        };
        let board = status::StatusBoard::new(self.start.worker_id);
        let status = board.subscribe();
        let shell = shell::Shell::new(self, calls, states, board, stops_seen, adapters);
        tasks.spawn(async move {
            reports.send_replace(Some(shell.run().await));
        });
        WorkerHandle {
            stops,
            state,
            status,
            report,
            progress,
            control,
            tasks,
        }
    }
}

crate::debug_as!(|it| Worker {
    start: it.start,
    ..
});

/// How a worker ended, with the error that ended it.
#[derive(Debug, Clone)]
pub struct Report {
    /// How it ended; determines the exit code.
    pub outcome: Outcome,
    /// The first error.
    pub error: Option<EngineError>,
}

/// A running worker. [`shutdown`](Self::shutdown) stops it and waits; dropping the handle only requests a stop.
#[derive(Debug)]
pub struct WorkerHandle {
    stops: watch::Sender<u32>,
    state: watch::Receiver<State>,
    status: watch::Receiver<WorkerStatus>,
    report: watch::Receiver<Option<Report>>,
    progress: watch::Receiver<Progress>,
    control: controls::HandleControl,
    tasks: TaskTracker,
}

impl WorkerHandle {
    /// Requests a stop, as a first signal does. A second call expires every deadline.
    pub fn stop(&self) {
        self.stops.send_modify(|stops| *stops += 1);
    }

    /// Requests a stop, unless one was requested or the worker is already stopping. Never expires deadlines; only a second
    /// [`stop`](Self::stop) does.
    pub fn stop_once(&self) {
        if self.goes_on() {
            self.stops
                .send_if_modified(|stops| std::mem::replace(stops, (*stops).max(1)) == 0);
        }
    }

    /// Returns the current state.
    #[must_use]
    pub fn state(&self) -> State {
        *self.state.borrow()
    }

    /// Subscribes to the state.
    #[must_use]
    pub fn states(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    /// Subscribes to the status for probes and operators.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<WorkerStatus> {
        self.status.clone()
    }

    /// Subscribes to the progress of `start`.
    #[must_use]
    pub fn progress(&self) -> watch::Receiver<Progress> {
        self.progress.clone()
    }

    /// Returns the handler of administrative requests; it fails with `Unavailable` while the worker does not serve.
    #[must_use]
    pub fn control(&self) -> Arc<dyn Control> {
        Arc::new(self.control.clone())
    }

    /// Waits until the worker serves.
    ///
    /// # Errors
    /// The report, if the worker stopped instead.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn ready(&self) -> Result<(), Report> {
        let mut state = self.state.clone();
        let reached = state
            .wait_for(|state| matches!(state, State::Serving(_) | State::Stopped(_)))
            .await;
        match reached.map(|state| *state) {
            Ok(State::Serving(_)) => Ok(()),
            _ => Err(self.stopped().await),
        }
    }

    /// Waits until the worker has stopped, by itself or on request.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn stopped(&self) -> Report {
        let mut report = self.report.clone();
        let report = match report.wait_for(Option::is_some).await {
            Ok(report) => report.clone(),
            Err(_) => None,
        };
        report.unwrap_or_else(|| Report {
            outcome: Outcome::CleanupFailed(Fault::Panic),
            error: Some(EngineError::internal(
                "the worker's own task ended without a report",
            )),
        })
    }

    /// Stops the worker like [`stop_once`](Self::stop_once), and waits until all its tasks have ended.
    ///
    /// # Cancel safety
    /// If the future is dropped, the worker continues to stop.
    pub async fn shutdown(self) -> Report {
        self.stop_once();
        self.join().await
    }

    /// Returns whether the worker has not begun to stop.
    fn goes_on(&self) -> bool {
        match self.state() {
            State::Created
            | State::Starting
            | State::Registering(_)
            | State::Serving(_)
            | State::Suspended(_) => true,
            State::Draining { .. } | State::CleaningUp { .. } | State::Stopped(_) => false,
        }
    }

    /// Waits until the worker has stopped and all its tasks have ended.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn join(&self) -> Report {
        let report = self.stopped().await;
        self.tasks.close();
        if tokio::time::timeout(TASK_END_TIMEOUT, self.tasks.wait())
            .await
            .is_err()
        {
            tracing::error!(
                tasks = self.tasks.len(),
                "tasks of the engine block their threads and cannot be ended"
            );
        }
        report
    }

    /// Returns the number of the worker's live tasks.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }
}

#[cfg(test)]
mod tests;
