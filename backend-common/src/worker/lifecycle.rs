//! The lifecycle of a worker: an enum and one pure function. The shell (`super::shell`) performs the effects and feeds back their
//! answers.
//!
//! ```text
//! Created -> Starting -> Registering -> Serving -> Draining -> CleaningUp -> Stopped
//!                             ^            |
//!                             +-- Suspended+
//! ```
//!
//! `lifecycle/tests.rs` proves the invariants for every order of events, over the whole reachable state space.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "an event that a state does not expect changes nothing; the tests walk every pair"
)]

use crate::context::CancelReason;

/// The state of a worker. Each state owns exactly its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Nothing was called yet.
    Created,
    /// `start` runs.
    Starting,
    /// `start` returned `Ok`; the instance is made reachable, probed and listed, in this order.
    Registering(Registering),
    /// Clients may send requests.
    Serving(Listing),
    /// The engine is down and recovers by itself; nothing is listed. Once it is up, it is probed like a new one.
    Suspended(Suspended),
    /// New requests are refused; running ones finish.
    Draining {
        /// The current step.
        step: Draining,
        /// Why the worker stops.
        cause: StopCause,
        /// Whether work was, or must be, cut short.
        forced: bool,
    },
    /// `cleanup` runs.
    CleaningUp {
        /// Why the worker stops.
        cause: StopCause,
        /// Whether work was cut short.
        forced: bool,
    },
    /// The end.
    Stopped(Outcome),
}

/// The steps of becoming routable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Registering {
    /// The request plane starts to carry requests to the instance, which is not listed.
    Serving,
    /// A canary takes the path that clients use.
    Probing,
    /// The same, of an engine that was down. The worker then serves while it is listed again: clients may know it still if
    /// discovery is away.
    ProbingAgain,
    /// The instance is listed in discovery.
    Listing,
}

/// Whether discovery lists a serving instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Listing {
    /// Listed.
    Listed,
    /// Discovery lost it; it is being listed again.
    Relisting,
}

/// The steps of waiting for an engine to recover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Suspended {
    /// The instance is being unlisted.
    Unlisting,
    /// The engine is up again before the instance was unlisted.
    UpWhileUnlisting,
    /// Unlisted; the engine is down.
    Waiting,
}

/// The steps of draining.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Draining {
    /// The instance is being unlisted.
    Unlisting,
    /// Requests in flight finish, until the grace deadline.
    Finishing,
    /// The engine's `drain` runs.
    EngineDraining,
    /// The remaining requests were cancelled and deliver their terminals.
    Cancelling,
}

/// Why a worker stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StopCause {
    /// Requested by a signal or the owner.
    Requested,
    /// `start` failed.
    StartFailed(Fault),
    /// The instance could not be made reachable or listed.
    RegistrationFailed,
    /// The canary failed.
    CanaryFailed,
    /// The engine reported itself dead.
    EngineDied,
}

/// How a call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// It returned an error.
    Error,
    /// It panicked.
    Panic,
    /// Its deadline passed.
    Timeout,
}

/// How a worker ended. [`Outcome::exit_code`] is what a shell sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Stopped on request; every request finished and `cleanup` succeeded.
    Clean,
    /// Stopped on request; the grace deadline or a second signal cut work short.
    Forced,
    /// Stopped because of a fault.
    Failed(StopCause),
    /// `cleanup` failed.
    CleanupFailed(Fault),
}

impl Outcome {
    /// Returns the process's exit code: 0 clean, 1 failed, 3 forced. (2 is a usage error, outside the lifecycle.)
    #[must_use]
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Clean => 0,
            Self::Failed(_) | Self::CleanupFailed(_) => 1,
            Self::Forced => 3,
        }
    }
}

/// An input of the lifecycle: an answer to an effect, or an external event. A state ignores unexpected events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// The owner starts the worker.
    Begin,
    /// The owner or a signal requests a stop. A second one expires every deadline.
    Stop,
    /// Answer to `CallStart`.
    Started,
    /// Answer to `CallStart`.
    StartFailed(Fault),
    /// Answer to `Serve`.
    Reachable,
    /// Answer to `Serve` and `List`.
    RegistrationFailed,
    /// Answer to `Probe`.
    ProbePassed,
    /// Answer to `Probe`.
    ProbeFailed,
    /// Answer to `List` and `Relist`.
    Listed,
    /// Discovery lost the instance.
    LeaseLost,
    /// The engine reported itself dead, or stopped answering canaries.
    EngineDied,
    /// The engine reported that it is down and recovers. Counts from the first canary on; earlier, the canary detects it.
    EngineDown,
    /// The engine reported that it is up again.
    EngineUp,
    /// Answer to `Unlist`, even if discovery was unreachable.
    Unlisted,
    /// Answer to `AwaitInFlight`: nothing is in flight.
    Idle,
    /// Answer to `AwaitInFlight`: the grace deadline passed.
    GraceOver,
    /// Answer to `CallDrain`, with any result.
    Drained,
    /// Answer to `CancelInFlight`: every request has its terminal, or the wait timed out.
    Cancelled,
    /// Answer to `CallCleanup`.
    CleanedUp,
    /// Answer to `CallCleanup`.
    CleanupFailed(Fault),
}

/// What the shell must do, in order. Effects marked *answered* run until their answer comes or [`Effect::Interrupt`] drops them;
/// at most one of them runs at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Drop the running operation, if any; its answer will not come.
    Interrupt,
    /// Call the engine's `start`. *Answered* by `Started` or `StartFailed`.
    CallStart,
    /// Make the instance reachable and accept requests. *Answered* by `Reachable` or `RegistrationFailed`.
    Serve,
    /// Send a canary. *Answered* by `ProbePassed` or `ProbeFailed`.
    Probe,
    /// List the instance. *Answered* by `Listed` or `RegistrationFailed`.
    List,
    /// List the instance again under the same id, until it succeeds. *Answered* by `Listed`.
    Relist,
    /// Refuse new requests with a retryable error.
    CloseDoor,
    /// Accept requests again.
    OpenDoor,
    /// Unlist the instance. *Answered* by `Unlisted`.
    Unlist,
    /// Wait for the requests in flight. *Answered* by `Idle` or `GraceOver`.
    AwaitInFlight,
    /// Call the engine's `drain`. *Answered* by `Drained`.
    CallDrain,
    /// End every request in flight with this reason's error, and wait until each has its terminal. *Answered* by `Cancelled`.
    CancelInFlight(CancelReason),
    /// End every request in flight with this reason's error.
    AbortInFlight(CancelReason),
    /// Expire every deadline, from now on.
    ExpireDeadlines,
    /// End the service: the instance is no longer reachable.
    CloseService,
    /// Call the engine's `cleanup`. *Answered* by `CleanedUp` or `CleanupFailed`.
    CallCleanup,
}

/// Returns the next state, and the effects of the transition: the whole lifecycle.
#[must_use]
pub fn step(state: State, event: Event) -> (State, Vec<Effect>) {
    match state {
        State::Created => created(event),
        State::Starting => starting(event),
        State::Registering(at) => registering(at, event),
        State::Serving(listing) => serving(listing, event),
        State::Suspended(at) => suspended(at, event),
        State::Draining {
            step,
            cause,
            forced,
        } => draining(step, cause, forced, event),
        State::CleaningUp { cause, forced } => cleaning_up(cause, forced, event),
        State::Stopped(outcome) => (State::Stopped(outcome), Vec::new()),
    }
}

fn created(event: Event) -> (State, Vec<Effect>) {
    match event {
        Event::Begin => (State::Starting, vec![Effect::CallStart]),
        Event::Stop => (State::Stopped(Outcome::Clean), vec![]),
        _ => (State::Created, vec![]),
    }
}

fn starting(event: Event) -> (State, Vec<Effect>) {
    let interrupted = |cause| clean_up(cause, false, vec![Effect::Interrupt]);
    match event {
        Event::Started => (
            State::Registering(Registering::Serving),
            vec![Effect::Serve],
        ),
        Event::StartFailed(fault) => clean_up(StopCause::StartFailed(fault), false, vec![]),
        Event::EngineDied => interrupted(StopCause::EngineDied),
        Event::Stop => interrupted(StopCause::Requested),
        _ => (State::Starting, vec![]),
    }
}

fn registering(at: Registering, event: Event) -> (State, Vec<Effect>) {
    let unwind = |cause| match at {
        // Not listed, so nothing to unlist. In flight: a canary, and clients that knew the instance before it was down.
        Registering::Serving | Registering::Probing | Registering::ProbingAgain => {
            let mut effects = vec![Effect::Interrupt];
            effects.extend(close_door(cause));
            clean_up(cause, false, effects)
        }
        // Discovery may have listed the instance although the answer was lost.
        Registering::Listing => unlist(cause, vec![Effect::Interrupt]),
    };
    match (at, event) {
        (Registering::Serving, Event::Reachable) => (
            State::Registering(Registering::Probing),
            vec![Effect::Probe],
        ),
        (Registering::Probing, Event::ProbePassed) => {
            (State::Registering(Registering::Listing), vec![Effect::List])
        }
        (Registering::ProbingAgain, Event::ProbePassed) => {
            (State::Serving(Listing::Relisting), vec![Effect::Relist])
        }
        (Registering::Probing | Registering::ProbingAgain, Event::ProbeFailed) => {
            unwind(StopCause::CanaryFailed)
        }
        (Registering::Listing, Event::Listed) => (State::Serving(Listing::Listed), vec![]),
        (Registering::Serving | Registering::Listing, Event::RegistrationFailed) => {
            unwind(StopCause::RegistrationFailed)
        }
        (Registering::Probing | Registering::ProbingAgain, Event::EngineDown) => (
            State::Suspended(Suspended::Waiting),
            vec![
                Effect::Interrupt,
                Effect::CloseDoor,
                Effect::AbortInFlight(CancelReason::EngineDead),
            ],
        ),
        (Registering::Listing, Event::EngineDown) => suspend(),
        (_, Event::EngineDied) => unwind(StopCause::EngineDied),
        (_, Event::Stop) => unwind(StopCause::Requested),
        _ => (State::Registering(at), vec![]),
    }
}

fn serving(listing: Listing, event: Event) -> (State, Vec<Effect>) {
    match (listing, event) {
        (Listing::Listed, Event::LeaseLost) => {
            (State::Serving(Listing::Relisting), vec![Effect::Relist])
        }
        (Listing::Relisting, Event::Listed) => (State::Serving(Listing::Listed), vec![]),
        (_, Event::EngineDown) => suspend(),
        (_, Event::Stop) => unlist(StopCause::Requested, vec![Effect::Interrupt]),
        (_, Event::EngineDied) => unlist(StopCause::EngineDied, vec![Effect::Interrupt]),
        _ => (State::Serving(listing), vec![]),
    }
}

fn suspended(at: Suspended, event: Event) -> (State, Vec<Effect>) {
    use Suspended::{Unlisting, UpWhileUnlisting, Waiting};
    let draining = |step, cause| drains(step, cause, false);
    match (at, event) {
        (Unlisting, Event::Unlisted) => (State::Suspended(Waiting), vec![]),
        (Unlisting, Event::EngineUp) => (State::Suspended(UpWhileUnlisting), vec![]),
        (UpWhileUnlisting, Event::EngineDown) => (State::Suspended(Unlisting), vec![]),
        (UpWhileUnlisting, Event::Unlisted) | (Waiting, Event::EngineUp) => (
            State::Registering(Registering::ProbingAgain),
            vec![Effect::OpenDoor, Effect::Probe],
        ),
        // Unlisting already runs; draining waits for the same answer.
        (Unlisting | UpWhileUnlisting, Event::Stop) => {
            (draining(Draining::Unlisting, StopCause::Requested), vec![])
        }
        (Unlisting | UpWhileUnlisting, Event::EngineDied) => {
            (draining(Draining::Unlisting, StopCause::EngineDied), vec![])
        }
        (Waiting, Event::Stop) => (
            draining(Draining::Finishing, StopCause::Requested),
            vec![Effect::AwaitInFlight],
        ),
        (Waiting, Event::EngineDied) => cancel(StopCause::EngineDied, false, vec![]),
        _ => (State::Suspended(at), vec![]),
    }
}

fn draining(step: Draining, cause: StopCause, forced: bool, event: Event) -> (State, Vec<Effect>) {
    let stay = |cause, forced, effects| (drains(step, cause, forced), effects);
    match (step, event) {
        (Draining::Unlisting, Event::Unlisted) if forced || cause == StopCause::EngineDied => {
            cancel(cause, forced, vec![])
        }
        (Draining::Unlisting, Event::Unlisted) => (
            drains(Draining::Finishing, cause, forced),
            vec![Effect::AwaitInFlight],
        ),
        (Draining::Finishing, Event::Idle) => engine_drain(cause, forced),
        (Draining::Finishing, Event::GraceOver) => engine_drain(cause, true),
        (Draining::EngineDraining, Event::Drained) => cancel(cause, forced, vec![]),
        (Draining::Cancelling, Event::Cancelled) => clean_up(cause, forced, vec![]),
        (Draining::Finishing | Draining::EngineDraining, Event::Stop) => cancel(
            cause,
            true,
            vec![Effect::ExpireDeadlines, Effect::Interrupt],
        ),
        (Draining::Unlisting | Draining::Cancelling, Event::Stop) => {
            stay(cause, true, vec![Effect::ExpireDeadlines])
        }
        (Draining::Finishing | Draining::EngineDraining, Event::EngineDied) => {
            cancel(StopCause::EngineDied, forced, vec![Effect::Interrupt])
        }
        (Draining::Unlisting, Event::EngineDied) => stay(
            StopCause::EngineDied,
            forced,
            vec![Effect::AbortInFlight(CancelReason::EngineDead)],
        ),
        // The drain does not wait for recovery: its requests migrate.
        (
            Draining::Unlisting | Draining::Finishing | Draining::EngineDraining,
            Event::EngineDown,
        ) => stay(
            cause,
            forced,
            vec![Effect::AbortInFlight(CancelReason::EngineDead)],
        ),
        _ => stay(cause, forced, vec![]),
    }
}

fn cleaning_up(cause: StopCause, forced: bool, event: Event) -> (State, Vec<Effect>) {
    let outcome = match event {
        Event::CleanedUp if cause != StopCause::Requested => Outcome::Failed(cause),
        Event::CleanedUp if forced => Outcome::Forced,
        Event::CleanedUp => Outcome::Clean,
        Event::CleanupFailed(_) if cause != StopCause::Requested => Outcome::Failed(cause),
        Event::CleanupFailed(fault) => Outcome::CleanupFailed(fault),
        Event::Stop => {
            return (
                State::CleaningUp {
                    cause,
                    forced: true,
                },
                vec![Effect::ExpireDeadlines],
            );
        }
        _ => return (State::CleaningUp { cause, forced }, vec![]),
    };
    (State::Stopped(outcome), vec![])
}

fn drains(step: Draining, cause: StopCause, forced: bool) -> State {
    State::Draining {
        step,
        cause,
        forced,
    }
}

fn unlist(cause: StopCause, mut effects: Vec<Effect>) -> (State, Vec<Effect>) {
    effects.extend(close_door(cause));
    effects.push(Effect::Unlist);
    (drains(Draining::Unlisting, cause, false), effects)
}

/// Refuses new requests. If the engine is dead, it also ends the running ones, after closing the door.
fn close_door(cause: StopCause) -> Vec<Effect> {
    match cause {
        StopCause::EngineDied => vec![
            Effect::CloseDoor,
            Effect::AbortInFlight(CancelReason::EngineDead),
        ],
        StopCause::Requested
        | StopCause::StartFailed(_)
        | StopCause::RegistrationFailed
        | StopCause::CanaryFailed => vec![Effect::CloseDoor],
    }
}

/// Unlists an engine that is down, and ends its requests so that they migrate.
fn suspend() -> (State, Vec<Effect>) {
    let effects = vec![
        Effect::Interrupt,
        Effect::CloseDoor,
        Effect::AbortInFlight(CancelReason::EngineDead),
        Effect::Unlist,
    ];
    (State::Suspended(Suspended::Unlisting), effects)
}

fn engine_drain(cause: StopCause, forced: bool) -> (State, Vec<Effect>) {
    let state = drains(Draining::EngineDraining, cause, forced);
    (state, vec![Effect::CallDrain])
}

fn cancel(cause: StopCause, forced: bool, mut effects: Vec<Effect>) -> (State, Vec<Effect>) {
    let reason = match cause {
        StopCause::EngineDied => CancelReason::EngineDead,
        StopCause::Requested
        | StopCause::StartFailed(_)
        | StopCause::RegistrationFailed
        | StopCause::CanaryFailed => CancelReason::Shutdown,
    };
    effects.push(Effect::CancelInFlight(reason));
    (drains(Draining::Cancelling, cause, forced), effects)
}

fn clean_up(cause: StopCause, forced: bool, mut effects: Vec<Effect>) -> (State, Vec<Effect>) {
    effects.extend([Effect::CloseService, Effect::CallCleanup]);
    (State::CleaningUp { cause, forced }, effects)
}

#[cfg(test)]
mod tests;
