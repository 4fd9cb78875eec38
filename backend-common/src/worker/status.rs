//! A Worker's status for probes and operators: its state, since when, and whether its canaries pass.

use std::sync::Arc;
use std::time::SystemTime;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;

use super::lifecycle::State;
use crate::handles::MetricsRegistry;

/// A Worker as probes and operators see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerStatus {
    /// The instance's id.
    pub worker_id: u64,
    /// Its state in the lifecycle.
    pub state: State,
    /// When it entered the state.
    pub since: SystemTime,
    /// The model it serves; `None` until the engine has started.
    pub model: Option<String>,
    /// The number of consecutive failed canaries; 0 while the engine answers.
    pub failed_canaries: u32,
}

impl WorkerStatus {
    /// Returns whether it should get requests: it serves, and its last canary did not fail.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(self.state, State::Serving(_)) && self.failed_canaries == 0
    }

    /// Returns the state's name, in `snake_case`.
    #[must_use]
    pub fn state_name(&self) -> &'static str {
        name_of(self.state)
    }
}

/// Returns the name of a state; its steps share the name.
fn name_of(state: State) -> &'static str {
    match state {
        State::Created => "created",
        State::Starting => "starting",
        State::Registering(_) => "registering",
        State::Serving(_) => "serving",
        State::Suspended(_) => "suspended",
        State::Draining { .. } => "draining",
        State::CleaningUp { .. } => "cleaning_up",
        State::Stopped(_) => "stopped",
    }
}

/// Where the Worker's parts write the status. Clones share state.
#[derive(Debug, Clone)]
pub(super) struct StatusBoard {
    status: Arc<watch::Sender<WorkerStatus>>,
    ready: Gauge,
    canary_failures: Counter,
}

impl StatusBoard {
    pub(super) fn new(worker_id: u64) -> Self {
        let status = WorkerStatus {
            worker_id,
            state: State::Created,
            since: SystemTime::now(),
            model: None,
            failed_canaries: 0,
        };
        Self {
            status: Arc::new(watch::Sender::new(status)),
            ready: Gauge::default(),
            canary_failures: Counter::default(),
        }
    }

    pub(super) fn register(&self, registry: &MetricsRegistry) {
        registry.register(
            "genset_worker_ready",
            "1 while the worker wants requests, else 0",
            self.ready.clone(),
        );
        registry.register(
            "genset_worker_canary_failures",
            "Canaries that failed while the worker served",
            self.canary_failures.clone(),
        );
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<WorkerStatus> {
        self.status.subscribe()
    }

    pub(super) fn enter(&self, state: State, model: Option<&str>) {
        self.change(|status| {
            if status.state_name() != name_of(state) {
                status.since = SystemTime::now();
                if matches!(state, State::Serving(_)) {
                    // It was probed just now: failures from before it was down do not count.
                    status.failed_canaries = 0;
                }
            }
            status.state = state;
            status.model = model.map(str::to_owned);
        });
    }

    pub(super) fn canary_failed(&self) {
        self.canary_failures.inc();
        self.change(|status| status.failed_canaries += 1);
    }

    /// Records a sign of life from the engine.
    pub(super) fn canary_passed(&self) {
        if self.status.borrow().failed_canaries > 0 {
            self.change(|status| status.failed_canaries = 0);
        }
    }

    fn change(&self, change: impl FnOnce(&mut WorkerStatus)) {
        self.status.send_modify(|status| {
            change(status);
            self.ready.set(i64::from(status.is_ready()));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::lifecycle::{Listing, Registering, Suspended};
    use super::*;

    #[test]
    fn an_engine_that_came_up_again_is_ready_at_once() {
        let board = StatusBoard::new(1);
        let status = board.subscribe();
        let is_ready = || status.borrow().is_ready();
        board.enter(State::Serving(Listing::Listed), Some("m"));
        board.canary_failed();
        board.enter(State::Serving(Listing::Relisting), Some("m"));
        assert!(!is_ready(), "it was told again, and not heard");
        for state in [
            State::Suspended(Suspended::Unlisting),
            State::Registering(Registering::ProbingAgain),
        ] {
            board.enter(state, Some("m"));
            assert!(!is_ready());
        }
        board.enter(State::Serving(Listing::Listed), Some("m"));
        assert!(is_ready());
    }
}
