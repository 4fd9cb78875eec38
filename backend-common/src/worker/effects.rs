//! The effects of the lifecycle that take time: calls of the engine and of the ports, and waits for requests in flight.
//!
//! Each is an [`Operation`] that completes with its [`Answer`]; dropping it cancels it. The shell runs one at a time. Operations
//! that need a reachable instance are methods of [`Reachable`], so they cannot be called before there is one.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::TaskTracker;

use super::adapter::Adapter;
use super::adapters::AdapterBoard;
use super::canary;
use super::config::WorkerConfig;
use super::controls::ControlAdapter;
use super::in_flight::InFlight;
use super::lifecycle::Event;
use super::operations::{Deadlines, EngineCalls, call_port};
use super::signals::Stops;
use super::status::StatusBoard;
use super::telemetry::Telemetry;
use crate::card::ModelCard;
use crate::config::EngineConfig;
use crate::context::CancelReason;
use crate::engine::{DrainContext, LLMEngine, StartContext};
use crate::error::EngineError;
use crate::log_limit::OncePerMinute;
use crate::ports::{Offer, Registrar, Registration};

/// How long cancelled requests may take to deliver their terminals.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);

/// Pauses between attempts to list again, doubling from the first to the last.
const RELIST_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// An operation that the shell awaits.
pub(super) type Operation = Pin<Box<dyn Future<Output = Answer> + Send>>;

/// The result of an operation.
pub(super) enum Answer {
    Event(Event),
    Failed(Event, EngineError),
    Started(Started),
    Reachable(Reachable),
}

/// A started engine's declaration, with the operator's overrides.
#[derive(Clone)]
pub(super) struct Started {
    pub(super) config: EngineConfig,
    pub(super) card: ModelCard,
}

/// The state that operations need.
pub(super) struct Effects {
    pub(super) engine: Arc<dyn LLMEngine>,
    pub(super) config: WorkerConfig,
    pub(super) registrar: Arc<dyn Registrar>,
    pub(super) start: StartContext,
    pub(super) tasks: TaskTracker,
    pub(super) telemetry: Telemetry,
    pub(super) in_flight: InFlight,
    pub(super) adapters: AdapterBoard,
    pub(super) deadlines: Deadlines,
    pub(super) calls: EngineCalls,
}

impl Effects {
    pub(super) fn call_start(&self) -> Operation {
        let (engine, start) = (Arc::clone(&self.engine), self.start.clone());
        let (calls, config) = (self.calls.clone(), self.config.clone());
        let (limit, adapters) = (config.start_timeout, self.adapters.clone());
        let load = start.load.clone();
        Box::pin(async move {
            let call = async move {
                config.validate()?;
                let declared = engine.start(start).await?;
                let (declared, card) = config.apply(declared)?;
                load.declare_blocks(declared.kv_total_blocks.unwrap_or(0));
                adapters.begin(&*engine, &config.adapters, &card).await?;
                let config = declared;
                Ok(Started { config, card })
            };
            match calls.call("start", limit, call).await {
                Ok(started) => Answer::Started(started),
                Err(failure) => Answer::Failed(Event::StartFailed(failure.fault), failure.error),
            }
        })
    }

    /// Makes the instance reachable, and starts to accept requests.
    pub(super) fn serve(&self, started: Started) -> Operation {
        let adapter = Adapter::new(
            Arc::clone(&self.engine),
            started.config.clone(),
            self.config.limits,
            self.in_flight.clone(),
            self.telemetry.clone(),
            self.tasks.clone(),
        );
        let offer = Offer {
            worker_id: self.start.worker_id,
            card: started.card.clone(),
            artifacts: self.config.artifacts.clone(),
            admitted: adapter.admitted(),
            generate: Arc::new(adapter),
            control: Arc::new(ControlAdapter {
                engine: Arc::clone(&self.engine),
                adapters: self.adapters.clone(),
                calls: self.calls.clone(),
            }),
            kv_events: self.start.kv_events.clone(),
            kv_transfers: self.start.kv_transfers.clone(),
            load: self.start.load.clone(),
            recent: self.telemetry.recent.clone(),
            adapters: self.adapters.subscribe(),
        };
        self.in_flight.open_door();
        let registrar = Arc::clone(&self.registrar);
        let (deadlines, limit) = (self.deadlines.clone(), self.config.register_timeout);
        Box::pin(async move {
            let call = async move { registrar.serve(offer).await };
            match call_port("request plane", &deadlines, limit, call).await {
                Ok(registration) => Answer::Reachable(Reachable {
                    started,
                    registration: Arc::from(registration),
                }),
                Err(error) => Answer::Failed(Event::RegistrationFailed, error),
            }
        })
    }

    pub(super) fn await_in_flight(&self) -> Operation {
        let (in_flight, deadlines) = (self.in_flight.clone(), self.deadlines.clone());
        let grace = self.config.grace;
        tracing::info!(
            in_flight = in_flight.count(),
            grace_s = grace.as_secs_f64(),
            "finishing requests"
        );
        Box::pin(async move {
            Answer::Event(match deadlines.bound(grace, in_flight.idle()).await {
                Some(()) => Event::Idle,
                None => Event::GraceOver,
            })
        })
    }

    pub(super) fn call_drain(&self) -> Operation {
        let engine = Arc::clone(&self.engine);
        let (calls, limit) = (self.calls.clone(), self.config.drain_timeout);
        Box::pin(async move {
            let call = async move { engine.drain(DrainContext { deadline: limit }).await };
            if let Err(failure) = calls.call("drain", limit, call).await {
                tracing::warn!(error = %failure.error, "the engine's drain failed; the shutdown goes on");
            }
            Answer::Event(Event::Drained)
        })
    }

    /// Ends every request in flight immediately.
    pub(super) fn abort_in_flight(&self, reason: CancelReason) {
        let cancelled = self.in_flight.cancel_all(reason);
        if cancelled > 0 {
            tracing::warn!(
                cancelled,
                ?reason,
                "requests cut short; their clients may send them again"
            );
        }
    }

    pub(super) fn cancel_in_flight(&self, reason: CancelReason) -> Operation {
        self.abort_in_flight(reason);
        let (in_flight, deadlines) = (self.in_flight.clone(), self.deadlines.clone());
        Box::pin(async move {
            let idle = deadlines.bound(CANCEL_TIMEOUT, in_flight.idle()).await;
            if idle.is_none() {
                tracing::warn!(
                    in_flight = in_flight.count(),
                    "clients do not read their last items"
                );
            }
            Answer::Event(Event::Cancelled)
        })
    }

    pub(super) fn call_cleanup(&self) -> Operation {
        let engine = Arc::clone(&self.engine);
        let (calls, limit) = (self.calls.clone(), self.config.cleanup_timeout);
        Box::pin(async move {
            calls.settled().await;
            // A stop may come before the task of `start` has run.
            if !calls.has_called() {
                return Answer::Event(Event::CleanedUp);
            }
            let call = async move { engine.cleanup().await };
            match calls.call("cleanup", limit, call).await {
                Ok(()) => Answer::Event(Event::CleanedUp),
                Err(failure) => Answer::Failed(Event::CleanupFailed(failure.fault), failure.error),
            }
        })
    }
}

/// An instance that is reachable on the request plane.
#[derive(Clone)]
pub(super) struct Reachable {
    pub(super) started: Started,
    pub(super) registration: Arc<dyn Registration>,
}

impl Reachable {
    pub(super) fn probe(&self, effects: &Effects) -> Operation {
        let registration = Arc::clone(&self.registration);
        let request = canary::request(&self.started);
        let limit = effects.config.canary.timeout;
        let (engine, adapters) = (Arc::clone(&effects.engine), effects.adapters.clone());
        let (calls, start_limit) = (effects.calls.clone(), effects.config.start_timeout);
        Box::pin(async move {
            if adapters.has_any() {
                let restore = async move {
                    adapters.restore(&*engine).await;
                    Ok(())
                };
                if let Err(failure) = calls.call("load_adapter", start_limit, restore).await {
                    tracing::error!(error = %failure.error, "adapters cannot be loaded again");
                }
            }
            match canary::probe(&*registration, request, limit).await {
                Ok(()) => Answer::Event(Event::ProbePassed),
                Err(error) => Answer::Failed(Event::ProbeFailed, error),
            }
        })
    }

    /// Sends canaries while the engine is silent; completes with the error of the last one.
    pub(super) fn watch_canaries(
        &self,
        effects: &Effects,
        board: &StatusBoard,
    ) -> impl Future<Output = EngineError> + Send + use<> {
        canary::watch(
            self.clone(),
            effects.config.canary,
            effects.in_flight.clone(),
            board.clone(),
        )
    }

    pub(super) fn list(&self, effects: &Effects) -> Operation {
        let registration = Arc::clone(&self.registration);
        let (deadlines, limit) = (effects.deadlines.clone(), effects.config.register_timeout);
        Box::pin(async move {
            let call = async { registration.list().await };
            match call_port("discovery", &deadlines, limit, call).await {
                Ok(()) => Answer::Event(Event::Listed),
                Err(error) => Answer::Failed(Event::RegistrationFailed, error),
            }
        })
    }

    pub(super) fn relist(&self, effects: &Effects) -> Operation {
        let registration = Arc::clone(&self.registration);
        let (deadlines, limit) = (effects.deadlines.clone(), effects.config.register_timeout);
        Box::pin(async move {
            let (mut pause, longest) = RELIST_PAUSES;
            let logged = OncePerMinute::default();
            loop {
                let call = async { registration.list().await };
                match call_port("discovery", &deadlines, limit, call).await {
                    Ok(()) => return Answer::Event(Event::Listed),
                    Err(error) => {
                        if let Some(unlogged) = logged.unlogged("not listed") {
                            tracing::warn!(%error, unlogged, "cannot list the instance again yet; further failures are only counted for a minute");
                        }
                    }
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(longest);
            }
        })
    }

    pub(super) fn unlist(&self, effects: &Effects) -> Operation {
        let registration = Arc::clone(&self.registration);
        let (deadlines, limit) = (effects.deadlines.clone(), effects.config.register_timeout);
        Box::pin(async move {
            let call = async { registration.unlist().await };
            if let Err(error) = call_port("discovery", &deadlines, limit, call).await {
                tracing::warn!(%error, "the instance may stay listed until its lease ends");
            }
            Answer::Event(Event::Unlisted)
        })
    }

    /// Ends the service. One more stop expires its deadline.
    pub(super) async fn close(self, effects: &Effects, stops: &Stops) {
        let call = async move {
            self.registration.close().await;
            Ok(())
        };
        let limit = effects.config.register_timeout;
        let closed = tokio::select! {
            biased;
            closed = call_port("request plane", &effects.deadlines, limit, call) => closed,
            never = stops.expire(&effects.deadlines) => match never {},
        };
        if let Err(error) = closed {
            tracing::warn!(%error, "the request plane did not close");
        }
    }
}
