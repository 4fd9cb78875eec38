//! Proves the invariants of the lifecycle over event sequences of any length: the product of state and observer is finite, so a
//! walk that visits every pair once covers all sequences.

use std::collections::{HashMap, HashSet, VecDeque};

use super::*;

const FAULTS: [Fault; 3] = [Fault::Error, Fault::Panic, Fault::Timeout];

fn all_events() -> Vec<Event> {
    use Event as E;
    let mut events = vec![
        E::Begin,
        E::Stop,
        E::Started,
        E::Reachable,
        E::RegistrationFailed,
        E::ProbePassed,
        E::ProbeFailed,
        E::Listed,
        E::LeaseLost,
        E::EngineDied,
        E::EngineDown,
        E::EngineUp,
        E::Unlisted,
        E::Idle,
        E::GraceOver,
        E::Drained,
        E::Cancelled,
        E::CleanedUp,
    ];
    events.extend(FAULTS.map(E::StartFailed));
    events.extend(FAULTS.map(E::CleanupFailed));
    events
}

/// Returns the possible answers to an effect; `None` for effects that complete at once.
fn answers(effect: Effect) -> Option<Vec<Event>> {
    use Event as E;
    Some(match effect {
        Effect::CallStart => [E::Started]
            .into_iter()
            .chain(FAULTS.map(E::StartFailed))
            .collect(),
        Effect::Serve => vec![E::Reachable, E::RegistrationFailed],
        Effect::Probe => vec![E::ProbePassed, E::ProbeFailed],
        Effect::List => vec![E::Listed, E::RegistrationFailed],
        Effect::Relist => vec![E::Listed],
        Effect::Unlist => vec![E::Unlisted],
        Effect::AwaitInFlight => vec![E::Idle, E::GraceOver],
        Effect::CallDrain => vec![E::Drained],
        Effect::CancelInFlight(_) => vec![E::Cancelled],
        Effect::CallCleanup => [E::CleanedUp]
            .into_iter()
            .chain(FAULTS.map(E::CleanupFailed))
            .collect(),
        Effect::Interrupt
        | Effect::CloseDoor
        | Effect::OpenDoor
        | Effect::AbortInFlight(_)
        | Effect::ExpireDeadlines
        | Effect::CloseService => return None,
    })
}

/// What an observer of the effects has seen; the invariants refer to it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Seen {
    start_calls: u8,
    cleanup_calls: u8,
    is_started: bool,
    is_reachable: bool,
    is_probed: bool,
    may_be_listed: bool,
    is_door_closed: bool,
    is_cancelled: bool,
    stops: u8,
    pending: Option<Effect>,
}

impl Seen {
    fn observe(mut self, before: State, event: Event, after: State, effects: &[Effect]) -> Self {
        if self
            .pending
            .and_then(answers)
            .is_some_and(|answers| answers.contains(&event))
            && before != after
        {
            self.pending = None;
        }
        self.is_started |= before == State::Starting && event == Event::Started;
        self.is_reachable |=
            before == State::Registering(Registering::Serving) && event == Event::Reachable;
        let probing = [Registering::Probing, Registering::ProbingAgain].map(State::Registering);
        self.is_probed |= probing.contains(&before) && event == Event::ProbePassed;
        self.stops = (self.stops + u8::from(event == Event::Stop)).min(2);
        // A probe from before the engine went down proves nothing about the recovered engine.
        self.is_probed &= !matches!(after, State::Suspended(_));
        for effect in effects {
            self.apply(*effect);
        }
        self.check(before, after);
        self
    }

    fn apply(&mut self, effect: Effect) {
        assert!(
            self.cleanup_calls == 0 || effect == Effect::ExpireDeadlines,
            "{effect:?} after cleanup"
        );
        // The shell relies on these two: it cannot handle an effect that comes too early or too late.
        if matches!(
            effect,
            Effect::Probe | Effect::List | Effect::Relist | Effect::Unlist
        ) {
            assert!(self.is_reachable, "{effect:?} of what cannot be reached");
        }
        match effect {
            Effect::Interrupt => self.pending = None,
            Effect::CallStart => self.start_calls += 1,
            Effect::Serve => assert!(self.is_started, "reachable before start returned Ok"),
            Effect::Probe => {}
            Effect::List | Effect::Relist => {
                assert!(self.is_probed, "listed before a canary passed");
                assert!(!self.is_door_closed, "listed while draining");
                self.may_be_listed = true;
            }
            Effect::CloseDoor => self.is_door_closed = true,
            Effect::OpenDoor => {
                assert!(!self.may_be_listed, "opened to those it was listed for");
                self.is_door_closed = false;
            }
            Effect::Unlist => {
                assert!(
                    self.is_door_closed,
                    "a request could still come in while the list says no"
                );
                self.may_be_listed = false;
            }
            Effect::AwaitInFlight | Effect::CallDrain => {
                assert!(!self.may_be_listed && self.is_door_closed);
                assert!(!self.is_cancelled, "grace after cancel");
            }
            Effect::CancelInFlight(_) => {
                assert!(!self.may_be_listed);
                self.is_cancelled = true;
            }
            Effect::AbortInFlight(_) | Effect::ExpireDeadlines => {}
            Effect::CloseService => {
                assert!(!self.may_be_listed, "unreachable while listed");
                self.is_reachable = false;
            }
            Effect::CallCleanup => {
                assert!(!self.may_be_listed, "cleaned up while listed");
                self.cleanup_calls += 1;
            }
        }
        if answers(effect).is_some() {
            assert_eq!(self.pending, None, "two operations at once: {effect:?}");
            self.pending = Some(effect);
        }
    }

    fn check(&self, before: State, after: State) {
        assert!(self.start_calls <= 1 && self.cleanup_calls <= self.start_calls);
        match after {
            State::Stopped(outcome) => {
                assert_eq!(
                    self.cleanup_calls, self.start_calls,
                    "cleanup iff start was called"
                );
                assert_eq!(self.pending, None, "an operation outlives the worker");
                if outcome == Outcome::Clean || outcome == Outcome::Forced {
                    assert!(self.stops > 0, "{outcome:?} without being asked");
                }
                if self.stops > 1 && before != after {
                    assert_ne!(
                        outcome,
                        Outcome::Clean,
                        "a second signal is never a clean end"
                    );
                }
            }
            State::Created | State::Serving(Listing::Listed) => assert_eq!(self.pending, None),
            State::Suspended(Suspended::Waiting) => {
                assert_eq!(self.pending, None);
                assert!(!self.may_be_listed && self.is_door_closed);
            }
            State::Suspended(Suspended::Unlisting | Suspended::UpWhileUnlisting) => {
                assert_eq!(self.pending, Some(Effect::Unlist));
            }
            State::Serving(Listing::Relisting) => assert_eq!(self.pending, Some(Effect::Relist)),
            State::Starting
            | State::Registering(_)
            | State::Draining { .. }
            | State::CleaningUp { .. } => {
                assert!(
                    self.pending.is_some(),
                    "nothing runs that could bring {after:?} to its end"
                );
            }
        }
    }
}

fn advance(state: State, seen: Seen, event: Event) -> (State, Seen) {
    let (after, effects) = step(state, event);
    (after, seen.observe(state, event, after, &effects))
}

/// Returns the events that a real shell can deliver: the pending operation's answers, and external events.
fn deliverable(seen: Seen) -> Vec<Event> {
    let mut events = vec![
        Event::Begin,
        Event::Stop,
        Event::LeaseLost,
        Event::EngineDied,
        Event::EngineDown,
        Event::EngineUp,
    ];
    events.extend(seen.pending.and_then(answers).unwrap_or_default());
    events
}

fn reachable() -> HashSet<(State, Seen)> {
    let start = (State::Created, Seen::default());
    let mut known = HashSet::from([start]);
    let mut queue = VecDeque::from([start]);
    while let Some((state, seen)) = queue.pop_front() {
        for event in deliverable(seen) {
            let next = advance(state, seen, event);
            if known.insert(next) {
                queue.push_back(next);
            }
        }
    }
    known
}

#[test]
fn the_invariants_hold_over_every_sequence_of_events() {
    let known = reachable();
    assert!(
        known.len() > 100,
        "the walk saw only {} states",
        known.len()
    );
    for outcome in [
        Outcome::Clean,
        Outcome::Forced,
        Outcome::Failed(StopCause::EngineDied),
    ] {
        assert!(
            known
                .iter()
                .any(|(state, _)| *state == State::Stopped(outcome)),
            "{outcome:?} never happens"
        );
    }
}

/// Events that no shell would send in a state (an answer that is not awaited) change nothing.
#[test]
fn an_answer_nobody_waits_for_changes_nothing() {
    for (state, seen) in reachable() {
        let expected = deliverable(seen);
        for event in all_events()
            .into_iter()
            .filter(|event| !expected.contains(event))
        {
            assert_eq!(
                step(state, event),
                (state, vec![]),
                "{state:?} on {event:?}"
            );
        }
    }
}

fn is_stopped(state: State) -> bool {
    matches!(state, State::Stopped(_))
}

fn is_at_rest(state: State) -> bool {
    let waiting = [
        State::Created,
        State::Serving(Listing::Listed),
        State::Suspended(Suspended::Waiting),
    ];
    is_stopped(state) || waiting.contains(&state)
}

/// From any state, a worker comes to rest through the answers of its operations alone, and a stopped worker reaches its end.
#[test]
fn stop_always_leads_to_stopped() {
    type Distances = HashMap<(State, Seen), usize>;
    fn distance(
        at: (State, Seen),
        is_end: fn(State) -> bool,
        memo: &mut Distances,
        depth: usize,
    ) -> usize {
        assert!(depth < 20, "no end in sight from {at:?}");
        if is_end(at.0) {
            return 0;
        }
        if let Some(known) = memo.get(&at) {
            return *known;
        }
        let (state, seen) = at;
        let answers = seen.pending.and_then(answers).unwrap_or_default();
        assert!(!answers.is_empty(), "{state:?} waits for nothing");
        let steps = answers
            .into_iter()
            .map(|event| distance(advance(state, seen, event), is_end, memo, depth + 1));
        let longest = 1 + steps.max().unwrap_or(0);
        memo.insert(at, longest);
        longest
    }
    let (mut to_rest, mut to_end) = (Distances::new(), Distances::new());
    for (state, seen) in reachable() {
        // Nine answers: a start that succeeds, and a listing that fails.
        assert!(distance((state, seen), is_at_rest, &mut to_rest, 0) <= 9);
        let stopped = advance(state, seen, Event::Stop);
        assert!(distance(stopped, is_stopped, &mut to_end, 0) <= 8);
    }
}

#[test]
fn losing_the_lease_lists_again_and_never_restarts() {
    let serving = State::Serving(Listing::Listed);
    let (relisting, effects) = step(serving, Event::LeaseLost);
    assert_eq!(effects, [Effect::Relist]);
    assert_eq!(step(relisting, Event::Listed), (serving, vec![]));
}

#[test]
fn an_engine_that_comes_up_again_is_probed_before_it_is_listed() {
    let mut state = State::Serving(Listing::Listed);
    let mut all = Vec::new();
    for event in [
        Event::EngineDown,
        Event::Unlisted,
        Event::EngineUp,
        Event::ProbePassed,
        Event::Listed,
    ] {
        let (next, effects) = step(state, event);
        state = next;
        all.extend(effects);
    }
    assert_eq!(state, State::Serving(Listing::Listed));
    let expected = [
        Effect::Interrupt,
        Effect::CloseDoor,
        Effect::AbortInFlight(CancelReason::EngineDead),
        Effect::Unlist,
        Effect::OpenDoor,
        Effect::Probe,
        Effect::Relist,
    ];
    assert_eq!(all, expected);
}

/// A request that came in between would stay at an engine that is gone.
#[test]
fn requests_at_an_engine_that_is_gone_end_behind_the_closed_door_before_anything_is_waited_for() {
    let registering = [
        Registering::Probing,
        Registering::ProbingAgain,
        Registering::Listing,
    ];
    let states = registering.map(State::Registering);
    for state in states.into_iter().chain([State::Serving(Listing::Listed)]) {
        for event in [Event::EngineDied, Event::EngineDown] {
            let (_, effects) = step(state, event);
            let expected = [
                Effect::Interrupt,
                Effect::CloseDoor,
                Effect::AbortInFlight(CancelReason::EngineDead),
            ];
            assert_eq!(effects[..3], expected, "{state:?} on {event:?}");
        }
    }
}

#[test]
fn an_engine_that_is_down_while_it_drains_is_not_waited_for() {
    for at in [
        Draining::Unlisting,
        Draining::Finishing,
        Draining::EngineDraining,
    ] {
        let state = State::Draining {
            step: at,
            cause: StopCause::Requested,
            forced: false,
        };
        let abort = Effect::AbortInFlight(CancelReason::EngineDead);
        assert_eq!(step(state, Event::EngineDown), (state, vec![abort]));
    }
}

#[test]
fn exit_codes_tell_clean_forced_and_failed_apart() {
    let codes = [
        Outcome::Clean,
        Outcome::Failed(StopCause::EngineDied),
        Outcome::Forced,
    ]
    .map(Outcome::exit_code);
    assert_eq!(codes, [0, 1, 3]);
    assert_eq!(Outcome::CleanupFailed(Fault::Panic).exit_code(), 1);
}
