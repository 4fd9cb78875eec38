//! The shell around the lifecycle: performs its effects and feeds the answers back.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use super::adapter::Adapter;
use super::canary;
use super::config::WorkerConfig;
use super::controls::ControlAdapter;
use super::in_flight::InFlight;
use super::lifecycle::{Effect, Event, Listing, State, step};
use super::model_server::ModelServerMetrics;
use super::operations::{Deadlines, EngineCalls, Failure, call_port, port_panic};
use super::status::StatusBoard;
use super::telemetry::Telemetry;
use super::{Report, Worker};
use crate::card::ModelCard;
use crate::config::EngineConfig;
use crate::context::CancelReason;
use crate::engine::{DrainContext, LLMEngine, StartContext};
use crate::error::{EngineError, ErrorKind};
use crate::ports::{Offer, Registrar, Registration};
use crate::request::GenerateRequest;

/// How long cancelled requests may take to deliver their terminals.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);

/// Pauses between attempts to list again, doubling from the first to the last.
const RELIST_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// What an operation came back with.
enum Answer {
    Plain(Event),
    Started(Result<EngineConfig, Failure>),
    Reachable(Result<Box<dyn Registration>, EngineError>),
    Failed(Event, EngineError),
}

pub(super) struct Shell {
    engine: Arc<dyn LLMEngine>,
    config: WorkerConfig,
    registrar: Arc<dyn Registrar>,
    start: StartContext,
    tasks: TaskTracker,
    states: watch::Sender<State>,
    board: StatusBoard,
    stops: watch::Receiver<u32>,
    stops_handled: u32,
    telemetry: Telemetry,
    model_server: ModelServerMetrics,
    in_flight: InFlight,
    deadlines: Deadlines,
    calls: EngineCalls,
    error: Option<EngineError>,
    started: Option<(EngineConfig, ModelCard)>,
    registration: Option<Arc<dyn Registration>>,
    /// The one operation whose answer is awaited.
    operation: Option<BoxFuture<Answer>>,
    /// Ends when discovery loses the listed instance.
    lost: Option<BoxFuture<()>>,
    /// Ends when a serving engine no longer answers canaries.
    canary: Option<BoxFuture<EngineError>>,
    is_dead: bool,
    /// Whether the engine is down, and why.
    downs: watch::Receiver<Option<String>>,
}

impl Shell {
    pub(super) fn new(
        worker: Worker,
        tasks: TaskTracker,
        states: watch::Sender<State>,
        board: StatusBoard,
        stops: watch::Receiver<u32>,
    ) -> Self {
        let telemetry = Telemetry::register(&worker.start.metrics);
        let model_server = ModelServerMetrics::new(&telemetry, worker.start.load.subscribe());
        model_server.register(&worker.start.metrics);
        board.register(&worker.start.metrics);
        let downs = worker.start.health.downs();
        let deadlines = Deadlines::default();
        let calls = EngineCalls::new(tasks.clone(), deadlines.clone());
        Self {
            engine: worker.engine,
            config: worker.config,
            registrar: worker.registrar,
            start: worker.start,
            tasks,
            states,
            board,
            stops,
            stops_handled: 0,
            telemetry,
            model_server,
            in_flight: InFlight::default(),
            deadlines,
            calls,
            error: None,
            started: None,
            registration: None,
            operation: None,
            lost: None,
            canary: None,
            is_dead: false,
            downs,
        }
    }

    /// The whole life.
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

    /// The model's name, once the engine has started.
    fn model(&self) -> Option<&str> {
        self.started.as_ref().map(|(_, card)| card.name.as_str())
    }

    /// One line for an operator at each station of the life; the steps between are for debugging.
    fn log(&self, state: State) {
        let worker_id = self.start.worker_id;
        match state {
            State::Starting => tracing::info!(worker_id, "starting the engine"),
            State::Serving(Listing::Listed) => {
                tracing::info!(worker_id, model = self.model(), "serving");
            }
            State::Stopped(outcome) => tracing::info!(worker_id, ?outcome, "stopped"),
            State::Created
            | State::Registering(_)
            | State::Serving(Listing::Relisting)
            | State::Suspended(_)
            | State::Draining { .. }
            | State::CleaningUp { .. } => tracing::debug!(worker_id, ?state, "worker"),
        }
    }

    /// Starts or ends the watches that belong to a serving instance.
    fn watch_while(&mut self, state: State) {
        let (State::Serving(listing), Some(registration)) = (state, &self.registration) else {
            self.lost = None;
            self.canary = None;
            return;
        };
        self.lost = (listing == Listing::Listed).then(|| {
            let registration = Arc::clone(registration);
            Box::pin(until_lost(registration)) as BoxFuture<()>
        });
        if self.canary.is_none() {
            let watch = canary::watch(
                Arc::clone(registration),
                self.canary_request(),
                self.config.canary,
                self.in_flight.clone(),
                self.board.clone(),
            );
            self.canary = Some(Box::pin(watch));
        }
    }

    async fn next_event(&mut self) -> Event {
        loop {
            if self.stops_handled < *self.stops.borrow_and_update() {
                self.stops_handled += 1;
                return Event::Stop;
            }
            tokio::select! {
                biased;
                changed = self.stops.changed() => {
                    // Every handle is gone: nobody can stop the worker any more, so it stops by itself.
                    if changed.is_err() && self.stops_handled == 0 {
                        self.stops_handled = 1;
                        return Event::Stop;
                    }
                    if changed.is_err() {
                        return self.undisturbed_event().await;
                    }
                }
                event = Self::news(&mut self.operation, &mut self.lost, &mut self.canary, &mut self.downs, &self.start, self.is_dead) => {
                    return self.take_news(event);
                }
            }
        }
    }

    /// The next event when no stop can come.
    async fn undisturbed_event(&mut self) -> Event {
        let news = Self::news(
            &mut self.operation,
            &mut self.lost,
            &mut self.canary,
            &mut self.downs,
            &self.start,
            self.is_dead,
        )
        .await;
        self.take_news(news)
    }

    async fn news(
        operation: &mut Option<BoxFuture<Answer>>,
        lost: &mut Option<BoxFuture<()>>,
        canary: &mut Option<BoxFuture<EngineError>>,
        downs: &mut watch::Receiver<Option<String>>,
        start: &StartContext,
        is_dead: bool,
    ) -> News {
        tokio::select! {
            biased;
            reason = start.health.died(), if !is_dead => News::Died(EngineError::new(
                ErrorKind::Disconnected,
                format!("the engine reported itself dead: {reason}"),
            )),
            reason = next_down(downs) => News::Down(reason),
            error = or_pending(canary) => News::Died(error),
            () = or_pending(lost) => News::Lost,
            answer = or_pending(operation) => News::Answer(answer),
        }
    }

    fn take_news(&mut self, news: News) -> Event {
        match news {
            News::Died(error) => {
                self.is_dead = true;
                self.canary = None;
                self.fail(error);
                Event::EngineDied
            }
            News::Down(Some(reason)) => {
                tracing::warn!(reason, "the engine is down and mends itself");
                Event::EngineDown
            }
            News::Down(None) => {
                tracing::info!("the engine is up again");
                Event::EngineUp
            }
            News::Lost => {
                self.lost = None;
                tracing::warn!(
                    "discovery lost this instance; it is listed again under the same id"
                );
                Event::LeaseLost
            }
            News::Answer(answer) => {
                self.operation = None;
                self.take_answer(answer)
            }
        }
    }

    fn take_answer(&mut self, answer: Answer) -> Event {
        match answer {
            Answer::Plain(event) => event,
            Answer::Failed(event, error) => {
                self.fail(error);
                event
            }
            Answer::Started(Err(failure)) => {
                self.fail(failure.error);
                Event::StartFailed(failure.fault)
            }
            Answer::Started(Ok(config)) => match self.config.apply(config) {
                Ok(started) => {
                    self.model_server.started(&started.0);
                    self.started = Some(started);
                    Event::Started
                }
                Err(error) => {
                    self.fail(error);
                    Event::StartFailed(super::lifecycle::Fault::Error)
                }
            },
            Answer::Reachable(Ok(registration)) => {
                self.registration = Some(Arc::from(registration));
                Event::Reachable
            }
            Answer::Reachable(Err(error)) => {
                self.fail(error);
                Event::RegistrationFailed
            }
        }
    }

    /// Logs an error and keeps the first for the report.
    fn fail(&mut self, error: EngineError) {
        let source = std::error::Error::source(&error).map(ToString::to_string);
        tracing::error!(kind = %error.kind(), %error, source, "worker");
        self.error.get_or_insert(error);
    }

    async fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Interrupt => self.operation = None,
            Effect::CallStart => self.operation = Some(self.call_start()),
            Effect::Serve => self.operation = Some(self.serve()),
            Effect::Probe => self.operation = Some(self.probe()),
            Effect::List => self.operation = Some(self.list()),
            Effect::Relist => self.operation = Some(self.relist()),
            Effect::CloseDoor => self.in_flight.close_door(),
            Effect::OpenDoor => self.in_flight.open_door(),
            Effect::Unlist => self.operation = Some(self.unlist()),
            Effect::AwaitInFlight => self.operation = Some(self.await_in_flight()),
            Effect::CallDrain => self.operation = Some(self.call_drain()),
            Effect::CancelInFlight(reason) => self.operation = Some(self.cancel_in_flight(reason)),
            Effect::AbortInFlight(reason) => drop(self.abort_in_flight(reason)),
            Effect::ExpireDeadlines => self.deadlines.expire(),
            Effect::CloseService => self.close_service().await,
            Effect::CallCleanup => self.operation = Some(self.call_cleanup()),
        }
    }

    fn call_start(&self) -> BoxFuture<Answer> {
        let (engine, start) = (Arc::clone(&self.engine), self.start.clone());
        let (calls, limit) = (self.calls.clone(), self.config.start_timeout);
        Box::pin(async move {
            let call = async move { engine.start(start).await };
            Answer::Started(calls.call("start", limit, call).await)
        })
    }

    fn serve(&mut self) -> BoxFuture<Answer> {
        let Some((config, card)) = self.started.clone() else {
            let error = EngineError::internal("the engine has not started");
            return Box::pin(std::future::ready(Answer::Failed(
                Event::RegistrationFailed,
                error,
            )));
        };
        let adapter = Adapter::new(
            Arc::clone(&self.engine),
            config,
            self.config.limits,
            self.in_flight.clone(),
            self.telemetry.clone(),
            self.tasks.clone(),
        );
        let offer = Offer {
            worker_id: self.start.worker_id,
            card,
            artifacts: self.config.artifacts.clone(),
            admitted: adapter.admitted(),
            generate: Arc::new(adapter),
            control: Arc::new(ControlAdapter {
                engine: Arc::clone(&self.engine),
            }),
            kv_events: self.start.kv_events.clone(),
            load: self.start.load.clone(),
        };
        self.in_flight.open_door();
        let registrar = Arc::clone(&self.registrar);
        let (deadlines, limit) = (self.deadlines.clone(), self.config.register_timeout);
        Box::pin(async move {
            let call = async move { registrar.serve(offer).await };
            Answer::Reachable(call_port("request plane", &deadlines, limit, call).await)
        })
    }

    fn canary_request(&self) -> GenerateRequest {
        match &self.started {
            Some((config, _)) => canary::request(config),
            None => GenerateRequest::from_tokens("", vec![0]),
        }
    }

    /// An operation on the registration, which exists from `Reachable` on.
    fn on_registration<F>(
        &self,
        operation: impl FnOnce(Arc<dyn Registration>, Deadlines) -> F,
        missing: Event,
    ) -> BoxFuture<Answer>
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        match &self.registration {
            Some(registration) => {
                Box::pin(operation(Arc::clone(registration), self.deadlines.clone()))
            }
            None => Box::pin(std::future::ready(Answer::Plain(missing))),
        }
    }

    fn probe(&self) -> BoxFuture<Answer> {
        let (request, limit) = (self.canary_request(), self.config.canary.timeout);
        let probe = move |registration: Arc<dyn Registration>, _| async move {
            match canary::probe(&*registration, request, limit).await {
                Ok(()) => Answer::Plain(Event::ProbePassed),
                Err(error) => Answer::Failed(
                    Event::ProbeFailed,
                    EngineError::new(error.kind(), format!("the canary failed: {error}"))
                        .with_source(error),
                ),
            }
        };
        self.on_registration(probe, Event::ProbeFailed)
    }

    fn list(&self) -> BoxFuture<Answer> {
        let limit = self.config.register_timeout;
        let list = move |registration: Arc<dyn Registration>, deadlines: Deadlines| async move {
            let call = async move { registration.list().await };
            match call_port("discovery", &deadlines, limit, call).await {
                Ok(()) => Answer::Plain(Event::Listed),
                Err(error) => Answer::Failed(Event::RegistrationFailed, error),
            }
        };
        self.on_registration(list, Event::RegistrationFailed)
    }

    fn relist(&self) -> BoxFuture<Answer> {
        let limit = self.config.register_timeout;
        let relist = move |registration: Arc<dyn Registration>, deadlines: Deadlines| async move {
            let (mut pause, longest) = RELIST_PAUSES;
            loop {
                let call = async { registration.list().await };
                match call_port("discovery", &deadlines, limit, call).await {
                    Ok(()) => return Answer::Plain(Event::Listed),
                    Err(error) => tracing::warn!(%error, "cannot list the instance again yet"),
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(longest);
            }
        };
        self.on_registration(relist, Event::Listed)
    }

    fn unlist(&self) -> BoxFuture<Answer> {
        let limit = self.config.register_timeout;
        let unlist = move |registration: Arc<dyn Registration>, deadlines: Deadlines| async move {
            let call = async move { registration.unlist().await };
            if let Err(error) = call_port("discovery", &deadlines, limit, call).await {
                tracing::warn!(%error, "the instance may stay listed until its lease ends");
            }
            Answer::Plain(Event::Unlisted)
        };
        self.on_registration(unlist, Event::Unlisted)
    }

    fn await_in_flight(&self) -> BoxFuture<Answer> {
        let (in_flight, deadlines, grace) = (
            self.in_flight.clone(),
            self.deadlines.clone(),
            self.config.grace,
        );
        tracing::info!(
            in_flight = in_flight.count(),
            grace_s = grace.as_secs_f64(),
            "finishing requests"
        );
        Box::pin(async move {
            match deadlines.bound(grace, in_flight.idle()).await {
                Some(()) => Answer::Plain(Event::Idle),
                None => Answer::Plain(Event::GraceOver),
            }
        })
    }

    fn call_drain(&self) -> BoxFuture<Answer> {
        let engine = Arc::clone(&self.engine);
        let (calls, limit) = (self.calls.clone(), self.config.drain_timeout);
        Box::pin(async move {
            let call = async move { engine.drain(DrainContext { deadline: limit }).await };
            if let Err(failure) = calls.call("drain", limit, call).await {
                tracing::warn!(error = %failure.error, "the engine's drain failed; the shutdown goes on");
            }
            Answer::Plain(Event::Drained)
        })
    }

    fn abort_in_flight(&self, reason: CancelReason) -> usize {
        let cancelled = self.in_flight.cancel_all(reason);
        if cancelled > 0 {
            tracing::warn!(
                cancelled,
                ?reason,
                "requests cut short; their clients may send them again"
            );
        }
        cancelled
    }

    fn cancel_in_flight(&self, reason: CancelReason) -> BoxFuture<Answer> {
        self.abort_in_flight(reason);
        let (in_flight, deadlines) = (self.in_flight.clone(), self.deadlines.clone());
        Box::pin(async move {
            if deadlines
                .bound(CANCEL_TIMEOUT, in_flight.idle())
                .await
                .is_none()
            {
                tracing::warn!(
                    in_flight = in_flight.count(),
                    "clients do not read their last items"
                );
            }
            Answer::Plain(Event::Cancelled)
        })
    }

    async fn close_service(&mut self) {
        let Some(registration) = self.registration.take() else {
            return;
        };
        let limit = self.config.register_timeout;
        let call = async move {
            registration.close().await;
            Ok(())
        };
        let closed = tokio::select! {
            biased;
            closed = call_port("request plane", &self.deadlines, limit, call) => closed,
            never = expire_on_stop(self.stops.clone(), self.stops_handled, &self.deadlines) => match never {},
        };
        if let Err(error) = closed {
            tracing::warn!(%error, "the request plane did not close");
        }
    }

    fn call_cleanup(&self) -> BoxFuture<Answer> {
        let engine = Arc::clone(&self.engine);
        let (calls, limit) = (self.calls.clone(), self.config.cleanup_timeout);
        Box::pin(async move {
            calls.settled().await;
            // A stop may come before the task of `start` ran at all.
            if !calls.has_called() {
                return Answer::Plain(Event::CleanedUp);
            }
            let call = async move { engine.cleanup().await };
            match calls.call("cleanup", limit, call).await {
                Ok(()) => Answer::Plain(Event::CleanedUp),
                Err(failure) => Answer::Failed(Event::CleanupFailed(failure.fault), failure.error),
            }
        })
    }
}

enum News {
    Died(EngineError),
    /// It went down, for this reason, or came up.
    Down(Option<String>),
    Lost,
    Answer(Answer),
}

/// The next change of whether the engine is down.
async fn next_down(downs: &mut watch::Receiver<Option<String>>) -> Option<String> {
    match downs.changed().await {
        Ok(()) => downs.borrow_and_update().clone(),
        Err(_) => std::future::pending().await,
    }
}

async fn or_pending<T>(future: &mut Option<BoxFuture<T>>) -> T {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

/// Ends when discovery has lost the instance; never when the port cannot tell.
async fn until_lost(registration: Arc<dyn Registration>) {
    let lost = AssertUnwindSafe(async { registration.lost().await });
    if let Err(panic) = lost.catch_unwind().await {
        let error = port_panic("discovery", &*panic);
        tracing::error!(%error, "a lost lease will not be noticed");
        std::future::pending().await
    }
}

/// Where events are not taken: lets one more stop make every deadline now. The event itself is taken later.
async fn expire_on_stop(
    mut stops: watch::Receiver<u32>,
    stops_handled: u32,
    deadlines: &Deadlines,
) -> Infallible {
    if stops.wait_for(|stops| *stops > stops_handled).await.is_ok() {
        deadlines.expire();
    }
    std::future::pending().await
}
