//! The shell around the lifecycle: performs its effects and feeds back the answers.
//!
//! It decides nothing: `lifecycle::step` does. `effects` contains the operations, `signals` the external events.

use std::future::pending;
use std::sync::Arc;

use tokio::sync::watch;

use super::adapters::AdapterBoard;
use super::effects::{Answer, Effects, Operation, Reachable, Started};
use super::in_flight::InFlight;
use super::lifecycle::{Effect, Event, Listing, State, step};
use super::model_server::ModelServerMetrics;
use super::operations::EngineCalls;
use super::signals::{Signal, Signals};
use super::status::StatusBoard;
use super::telemetry::Telemetry;
use super::{Report, Worker};
use crate::error::EngineError;

/// The current parts of the instance. Each variant extends the previous one.
enum Instance {
    /// The engine has not started.
    Unstarted,
    /// The instance is not reachable: not yet, or no longer.
    Started(Started),
    /// The instance is reachable on the request plane.
    Reachable(Reachable),
}

impl Instance {
    fn started(&self) -> Option<&Started> {
        match self {
            Self::Unstarted => None,
            Self::Started(started) | Self::Reachable(Reachable { started, .. }) => Some(started),
        }
    }
}

pub(super) struct Shell {
    effects: Effects,
    signals: Signals,
    /// The operation whose answer is awaited; pending if there is none.
    operation: Operation,
    instance: Instance,
    states: watch::Sender<State>,
    board: StatusBoard,
    model_server: ModelServerMetrics,
    /// The first error, for the report.
    error: Option<EngineError>,
}

impl Shell {
    pub(super) fn new(
        worker: Worker,
        calls: EngineCalls,
        states: watch::Sender<State>,
        board: StatusBoard,
        stops: watch::Receiver<u32>,
        adapters: AdapterBoard,
    ) -> Self {
        let telemetry = Telemetry::register(&worker.start.metrics);
        let model_server = ModelServerMetrics::new(&telemetry, worker.start.load.subscribe());
        model_server.register(&worker.start.metrics);
        board.register(&worker.start.metrics);
        let signals = Signals::new(stops, worker.start.health.clone());
        let in_flight = InFlight::new(worker.start.health.clone());
        let effects = Effects {
            engine: worker.engine,
            config: worker.config,
            registrar: worker.registrar,
            start: worker.start,
            tasks: calls.tasks.clone(),
            telemetry,
            in_flight,
            adapters,
            deadlines: calls.deadlines.clone(),
            calls,
        };
        Self {
            effects,
            signals,
            operation: Box::pin(pending()),
            instance: Instance::Unstarted,
            states,
            board,
            model_server,
            error: None,
        }
    }

    /// Runs the whole lifecycle.
    pub(super) async fn run(mut self) -> Report {
        let (mut state, mut effects) = step(State::Created, Event::Begin);
        loop {
            self.log(state);
            self.watch_while(state);
            for effect in effects {
                self.perform(effect).await;
            }
            self.board.enter(state, self.model());
            self.states.send_replace(state);
            if let State::Stopped(outcome) = state {
                return Report {
                    outcome,
                    error: self.error,
                };
            }
            loop {
                let event = self.next_event().await;
                let (next, next_effects) = step(state, event);
                if next != state || !next_effects.is_empty() {
                    (state, effects) = (next, next_effects);
                    break;
                }
            }
        }
    }

    /// Returns the model's name, once the engine has started.
    fn model(&self) -> Option<&str> {
        let started = self.instance.started();
        started.map(|started| started.card.name.as_str())
    }

    /// Logs one line for operators in each state; the steps in between at debug level.
    fn log(&self, state: State) {
        // The usual format of instance ids.
        let instance = format!("{:014x}", self.effects.start.worker_id);
        match state {
            State::Starting => tracing::info!(%instance, "starting the engine"),
            State::Serving(Listing::Listed) => {
                tracing::info!(%instance, model = self.model(), "serving");
            }
            State::Stopped(outcome) => tracing::info!(%instance, ?outcome, "stopped"),
            State::Created
            | State::Registering(_)
            | State::Serving(Listing::Relisting)
            | State::Suspended(_)
            | State::Draining { .. }
            | State::CleaningUp { .. } => tracing::debug!(%instance, ?state, "worker"),
        }
    }

    /// Starts or stops the monitors of a serving instance.
    fn watch_while(&mut self, state: State) {
        let (State::Serving(listing), Instance::Reachable(instance)) = (state, &self.instance)
        else {
            self.signals.forget_listing();
            self.signals.forget_canaries();
            return;
        };
        match listing {
            Listing::Listed => {
                let registration = Arc::clone(&instance.registration);
                self.signals.watch_listing(registration);
            }
            Listing::Relisting => self.signals.forget_listing(),
        }
        let watch = || instance.watch_canaries(&self.effects, &self.board);
        self.signals.watch_canaries(watch);
    }

    async fn next_event(&mut self) -> Event {
        let (event, error) = tokio::select! {
            biased;
            signal = self.signals.next() => signal,
            answer = &mut self.operation => {
                self.operation = Box::pin(pending());
                self.take(answer)
            }
        };
        if let Some(error) = error {
            self.fail(error);
        }
        event
    }

    fn take(&mut self, answer: Answer) -> Signal {
        match answer {
            Answer::Event(event) => (event, None),
            Answer::Failed(event, error) => (event, Some(error)),
            Answer::Started(started) => {
                self.model_server.started(&started.config);
                self.instance = Instance::Started(started);
                (Event::Started, None)
            }
            Answer::Reachable(reachable) => {
                self.instance = Instance::Reachable(reachable);
                (Event::Reachable, None)
            }
        }
    }

    /// Logs an error and keeps the first one for the report.
    fn fail(&mut self, error: EngineError) {
        let told = error.to_string();
        let source = std::error::Error::source(&error).map(ToString::to_string);
        // Many errors include what their cause says.
        let source = source.filter(|source| !told.contains(source));
        tracing::error!(kind = %error.kind(), %error, source, "worker");
        self.error.get_or_insert(error);
    }

    async fn perform(&mut self, effect: Effect) {
        let effects = &self.effects;
        self.operation = match effect {
            Effect::Interrupt => Box::pin(pending()),
            Effect::CallStart => effects.call_start(),
            Effect::Serve => effects.serve(self.started().clone()),
            Effect::Probe => self.reachable().probe(effects),
            Effect::List => self.reachable().list(effects),
            Effect::Relist => self.reachable().relist(effects),
            Effect::Unlist => self.reachable().unlist(effects),
            Effect::AwaitInFlight => effects.await_in_flight(),
            Effect::CallDrain => effects.call_drain(),
            Effect::CancelInFlight(reason) => effects.cancel_in_flight(reason),
            Effect::CallCleanup => effects.call_cleanup(),
            Effect::CloseDoor => return effects.in_flight.close_door(),
            Effect::OpenDoor => return effects.in_flight.open_door(),
            Effect::AbortInFlight(reason) => return effects.abort_in_flight(reason),
            Effect::ExpireDeadlines => return effects.deadlines.expire(),
            Effect::CloseService => return self.close_service().await,
        };
    }

    /// Returns the started engine.
    #[expect(
        clippy::expect_used,
        reason = "the lifecycle's tests walk all it can do: it makes reachable what has started"
    )]
    fn started(&self) -> &Started {
        let started = self.instance.started();
        started.expect("invariant: `Serve` comes after `Started`")
    }

    /// Returns the reachable instance.
    #[expect(
        clippy::panic,
        reason = "the lifecycle's tests walk all it can do: it probes, lists and unlists what is reachable"
    )]
    fn reachable(&self) -> &Reachable {
        match &self.instance {
            Instance::Reachable(reachable) => reachable,
            Instance::Unstarted | Instance::Started(_) => {
                panic!("invariant: the effect comes after `Reachable` and before `CloseService`")
            }
        }
    }

    /// Ends the service, if there is one.
    async fn close_service(&mut self) {
        if let Instance::Reachable(reachable) = &self.instance {
            let reachable = reachable.clone();
            self.instance = Instance::Started(reachable.started.clone());
            reachable.close(&self.effects, self.signals.stops()).await;
        }
    }
}
