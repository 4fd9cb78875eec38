//! A fault at every transition: the worker's later calls, and its outcome.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use tokio::time::Instant;

use super::drain::drains;
use super::fakes::Act::{Error, Hang, Panic, Succeed};
use super::fakes::Call::{
    Cleanup, Close, Drain, Generate, List, Lost, Probe, Serve, Start, Unlist,
};
use super::fakes::{Act, Call, World};
use super::fakes::{
    config, counting, ended, raw, raw_items, reaches, served, serving, spawn, stalling,
    stop_cleanly,
};
use super::transcript::{End, read};
use crate::config::EngineConfig;
use crate::error::{EngineError, ErrorKind};
use crate::output::{Finish, Output, OutputStream, TokenChunk, Violation};
use crate::worker::Outcome::{Clean, CleanupFailed, Failed};
use crate::worker::StopCause::{CanaryFailed, EngineDied, RegistrationFailed, StartFailed};
use crate::worker::{Draining, Fault, Listing, Outcome, State, StopCause, Suspended};

/// The calls of a worker that serves and is then stopped.
const WHOLE_LIFE: [Call; 9] = [
    Start, Serve, Probe, Generate, List, Unlist, Drain, Close, Cleanup,
];

const UNTIL_PROBE: [Call; 5] = [Start, Serve, Probe, Close, Cleanup];

const UNTIL_ANSWER: [Call; 6] = [Start, Serve, Probe, Generate, Close, Cleanup];

const DIED_LISTED: [Call; 8] = [Start, Serve, Probe, Generate, List, Unlist, Close, Cleanup];

#[tokio::test(start_paused = true)]
async fn a_fault_on_the_way_to_serving_unwinds_what_was_done() {
    let start_failed = [Fault::Error, Fault::Panic, Fault::Timeout].map(StartFailed);
    let table: [(Call, [StopCause; 3], &[Call]); 5] = [
        (Start, start_failed, &[Start, Cleanup]),
        (Serve, [RegistrationFailed; 3], &[Start, Serve, Cleanup]),
        (Probe, [CanaryFailed; 3], &UNTIL_PROBE),
        (Generate, [CanaryFailed; 3], &UNTIL_ANSWER),
        // A failed listing may still have reached discovery.
        (List, [RegistrationFailed; 3], &WHOLE_LIFE),
    ];
    for (call, causes, calls) in table {
        for (act, cause) in [Error, Panic, Hang].into_iter().zip(causes) {
            let world = World::new();
            world.plan(call, [act]);
            let handle = spawn(&world, config());
            let not_ready = handle.ready().await.unwrap_err();
            let report = ended(&handle).await;
            assert_eq!(report.outcome, Failed(cause), "{call:?} {act:?}");
            assert_eq!(not_ready.outcome, Failed(cause), "{call:?} {act:?}");
            assert!(report.error.is_some(), "{call:?} {act:?}");
            assert_eq!(world.calls(), calls, "{call:?} {act:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_canary_whose_stream_goes_wrong_is_never_listed() {
    type Answer = fn() -> OutputStream;
    let table: &[(&str, Answer, ErrorKind)] = &[
        (
            "ends without a terminal",
            || raw_items([]),
            ErrorKind::StreamIncomplete,
        ),
        (
            "hangs",
            || raw(stream::pending()),
            ErrorKind::DeadlineExceeded,
        ),
        (
            "ends with an error",
            || {
                let error = EngineError::new(ErrorKind::Unavailable, "no device");
                raw_items([Err(error)])
            },
            ErrorKind::Unavailable,
        ),
        (
            "panics",
            || raw(stream::poll_fn(|_| panic!("bad"))),
            ErrorKind::Internal,
        ),
    ];
    for (name, answer, kind) in table {
        let (world, answer) = (World::new(), *answer);
        world.answer_with(move |_, _| Ok(answer()));
        let handle = spawn(&world, config());
        let report = ended(&handle).await;
        assert_eq!(report.outcome, Failed(CanaryFailed), "{name}");
        assert_eq!(report.error.unwrap().kind(), *kind, "{name}");
        assert_eq!(world.count(List), 0, "{name}");
        assert_eq!(world.count(Cleanup), 1, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_canary_that_breaks_a_rule_names_it_in_one_line() {
    type Answer = fn() -> Vec<Result<Output, EngineError>>;
    let rules: [(Violation, Answer); 4] = [
        (Violation::EndedWithoutTerminal, Vec::new),
        (Violation::TokenOutOfRange, || {
            vec![Ok(Output::Tokens(TokenChunk::from(u32::MAX)))]
        }),
        (Violation::FalseCancel, || {
            vec![Ok(Output::Finished(Box::new(
                Finish::cancelled().into_finished(1, 0),
            )))]
        }),
        (Violation::Panic, || panic!("bad")),
    ];
    for (rule, answer) in rules {
        let world = World::new();
        world.declare(EngineConfig::new("m", 16).with_vocab_size(10));
        world.answer_with(move |_, _| Ok(raw_items(answer())));
        let report = ended(&spawn(&world, config())).await;
        assert_eq!(report.outcome, Failed(CanaryFailed), "{rule}");
        let told = report.error.unwrap().to_string();
        for part in ["the canary failed", rule.name(), rule.what()] {
            assert!(told.contains(part), "{rule}: {told}");
        }
        assert_eq!(told.lines().count(), 1, "{told}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_config_that_makes_no_sense_counts_as_a_failed_start() {
    let world = World::new();
    world.declare(EngineConfig::new(" ", 16));
    let handle = spawn(&world, config());
    let report = ended(&handle).await;
    assert_eq!(report.outcome, Failed(StartFailed(Fault::Error)));
    assert_eq!(
        report.error.unwrap().at().map(|at| at.name()),
        Some("model")
    );
    assert_eq!(world.calls(), [Start, Cleanup]);
}

#[tokio::test(start_paused = true)]
async fn a_worker_with_a_setting_that_cannot_work_does_not_start_its_engine() {
    let world = World::new();
    let mut config = config();
    config.limits.max_running = 0;
    let report = ended(&spawn(&world, config)).await;
    assert_eq!(report.outcome, Failed(StartFailed(Fault::Error)));
    assert_eq!(
        report.error.unwrap().at().map(|at| at.name()),
        Some("max_running")
    );
    assert_eq!(world.calls(), [Cleanup]);
}

#[tokio::test(start_paused = true)]
async fn a_fault_while_stopping_never_keeps_a_worker_from_its_end() {
    let table: &[(Call, Act, Outcome)] = &[
        (Drain, Succeed, Clean),
        (Unlist, Error, Clean),
        (Unlist, Panic, Clean),
        (Unlist, Hang, Clean),
        (Drain, Error, Clean),
        (Drain, Panic, Clean),
        (Drain, Hang, Clean),
        (Close, Panic, Clean),
        (Close, Hang, Clean),
        (Cleanup, Error, CleanupFailed(Fault::Error)),
        (Cleanup, Panic, CleanupFailed(Fault::Panic)),
        (Cleanup, Hang, CleanupFailed(Fault::Timeout)),
    ];
    for (call, act, outcome) in table {
        let world = World::new();
        world.plan(*call, [*act]);
        let handle = serving(&world, config()).await;
        handle.stop();
        let report = ended(&handle).await;
        assert_eq!(report.outcome, *outcome, "{call:?} {act:?}");
        assert_eq!(world.calls(), WHOLE_LIFE, "{call:?} {act:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_stops_at_once_wherever_it_is_on_the_way_to_serving() {
    let table: &[(Call, &[Call])] = &[
        (Start, &[Start, Cleanup]),
        (Serve, &[Start, Serve, Cleanup]),
        (Probe, &UNTIL_PROBE),
        (Generate, &UNTIL_ANSWER),
        (List, &WHOLE_LIFE),
    ];
    for (held_in, calls) in table {
        let world = World::new();
        world.plan(*held_in, [Hang]);
        let handle = spawn(&world, config());
        world.called(*held_in).await;
        let asked = Instant::now();
        handle.stop();
        let report = ended(&handle).await;
        assert_eq!(report.outcome, Clean, "{held_in:?}");
        assert!(report.error.is_none(), "{held_in:?}");
        assert_eq!(world.calls(), *calls, "{held_in:?}");
        assert_eq!(asked.elapsed(), Duration::ZERO, "{held_in:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_stopped_before_it_began_calls_nothing() {
    let world = World::new();
    let handle = spawn(&world, config());
    handle.stop();
    assert_eq!(ended(&handle).await.outcome, Clean);
    assert_eq!(world.calls(), []);
}

/// One thread, so that the scheduler alone determines the order of tasks.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn cleanup_waits_until_an_interrupted_start_was_dropped() {
    let world = World::new();
    world.plan(Start, [Hang]);
    let handle = spawn(&world, config());
    world.called(Start).await;
    handle.stop();
    assert_eq!(ended(&handle).await.outcome, Clean);
    assert_eq!(world.calls(), [Start, Cleanup]);
    assert!(!world.cleanup_met_start());
}

#[tokio::test(start_paused = true)]
async fn a_lost_lease_is_listed_again_until_discovery_answers_and_nothing_restarts() {
    let world = World::new();
    world.plan(List, [Succeed, Error, Hang, Panic, Error]);
    let handle = serving(&world, config()).await;
    world.lose_lease();
    reaches(&handle, State::Serving(Listing::Relisting)).await;
    let answer = read(world.send("meanwhile").await.unwrap()).await;
    assert_eq!(answer.tokens, [0, 1, 2, 3], "requests are served meanwhile");
    reaches(&handle, State::Serving(Listing::Listed)).await;
    stop_cleanly(&handle).await;
    let counts = [Start, Serve, Probe, List, Unlist, Cleanup].map(|call| world.count(call));
    assert_eq!(counts, [1, 1, 1, 6, 1, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_lease_may_be_lost_again_and_again() {
    let (world, handle) = served(config()).await;
    for times in 2..5 {
        world.lose_lease();
        world.called_times(List, times).await;
    }
    stop_cleanly(&handle).await;
    assert_eq!((world.count(Start), world.count(List)), (1, 4));
}

#[tokio::test(start_paused = true)]
async fn a_port_that_fails_to_watch_the_lease_ends_no_worker() {
    let world = World::new();
    world.plan(Lost, [Panic]);
    let handle = serving(&world, config()).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(handle.state(), State::Serving(Listing::Listed));
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_stops_while_it_lists_again() {
    let world = World::new();
    world.plan(List, [Succeed, Hang]);
    let handle = serving(&world, config()).await;
    world.lose_lease();
    reaches(&handle, State::Serving(Listing::Relisting)).await;
    stop_cleanly(&handle).await;
    let ending = [List, List, Unlist, Drain, Close, Cleanup];
    assert!(world.calls().ends_with(&ending), "{:?}", world.calls());
}

#[tokio::test(start_paused = true)]
async fn an_engine_may_die_anywhere_on_the_way_to_serving() {
    let table: &[(Call, &[Call])] = &[
        (Start, &[Start, Cleanup]),
        (Serve, &[Start, Serve, Cleanup]),
        (Probe, &UNTIL_PROBE),
        (Generate, &UNTIL_ANSWER),
        (List, &DIED_LISTED),
    ];
    for (held_in, calls) in table {
        let world = World::new();
        world.plan(*held_in, [Hang]);
        let handle = spawn(&world, config());
        world.called(*held_in).await;
        world.kill_engine();
        let report = ended(&handle).await;
        assert_eq!(report.outcome, Failed(EngineDied), "{held_in:?}");
        let error = report.error.unwrap();
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{held_in:?}");
        assert_eq!(world.calls(), *calls, "{held_in:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_dies_ends_every_stream_at_once_with_an_error_that_may_move() {
    let (world, handle) = stalling(config()).await;
    // Discovery hangs too, so the worker must not wait for it.
    world.plan(Unlist, [Hang]);
    let streams = streams(&world, 3).await;
    let killed = Instant::now();
    world.kill_engine();
    for stream in streams {
        let end = read(stream).await.end;
        assert_eq!(end, End::Failed(ErrorKind::Disconnected));
    }
    assert_eq!(killed.elapsed(), Duration::ZERO);
    assert!(ErrorKind::Disconnected.policy().is_migratable);
    assert_eq!(ended(&handle).await.outcome, Failed(EngineDied));
    assert_eq!(world.calls().iter().filter(|c| **c != Generate).count(), 7);
    assert_eq!(world.count(Drain), 0, "a dead engine is not asked to drain");
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_is_down_is_unlisted_and_probed_before_it_is_listed_again() {
    let (world, handle) = stalling(config()).await;
    let streams = streams(&world, 3).await;
    world.set_down(true);
    for stream in streams {
        let end = read(stream).await.end;
        assert_eq!(end, End::Failed(ErrorKind::Disconnected));
    }
    reaches(&handle, State::Suspended(Suspended::Waiting)).await;
    assert!(!handle.status().borrow().is_ready());
    let refused = world.send("meanwhile").await;
    let error = refused.err().unwrap();
    assert!(error.policy().is_migratable && error.details().retry_after.is_some());
    world.answer_with(|request, ctx| Ok(counting(request, ctx)));
    world.set_down(false);
    reaches(&handle, State::Serving(Listing::Listed)).await;
    let answer = read(world.send("after").await.unwrap()).await;
    assert_eq!(answer.tokens, [0, 1, 2, 3]);
    stop_cleanly(&handle).await;
    let counts = [Start, Serve, Probe, List, Unlist, Cleanup].map(|call| world.count(call));
    assert_eq!(counts, [1, 1, 2, 2, 2, 1]);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_comes_up_while_discovery_is_away_serves_and_is_listed_later() {
    let (world, handle) = served(config()).await;
    world.plan(Unlist, [Hang]);
    world.plan(List, [Error, Hang, Error]);
    world.set_down(true);
    reaches(&handle, State::Suspended(Suspended::Waiting)).await;
    world.set_down(false);
    reaches(&handle, State::Serving(Listing::Relisting)).await;
    let answer = read(world.send("meanwhile").await.unwrap()).await;
    assert_eq!(answer.tokens, [0, 1, 2, 3]);
    reaches(&handle, State::Serving(Listing::Listed)).await;
    stop_cleanly(&handle).await;
    let counts = [Start, Probe, List, Unlist, Cleanup].map(|call| world.count(call));
    assert_eq!(counts, [1, 2, 1 + 4, 2, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_worker_whose_engine_is_down_can_stop_and_die() {
    let (world, handle) = served(config()).await;
    world.set_down(true);
    reaches(&handle, State::Suspended(Suspended::Waiting)).await;
    stop_cleanly(&handle).await;

    let (world, handle) = served(config()).await;
    world.set_down(true);
    reaches(&handle, State::Suspended(Suspended::Waiting)).await;
    world.kill_engine();
    assert_eq!(ended(&handle).await.outcome, Failed(EngineDied));
    assert_eq!(world.count(Cleanup), 1);
}

#[tokio::test(start_paused = true)]
async fn an_engine_may_die_in_every_step_of_stopping() {
    let table: &[(Call, Outcome, &[Call])] = &[
        (Unlist, Failed(EngineDied), &DIED_LISTED),
        (Drain, Failed(EngineDied), &WHOLE_LIFE),
        // By then only cleanup is still called.
        (Close, Clean, &WHOLE_LIFE),
        (Cleanup, CleanupFailed(Fault::Timeout), &WHOLE_LIFE),
    ];
    for (held_in, outcome, calls) in table {
        let world = World::new();
        world.plan(*held_in, [Hang]);
        let handle = serving(&world, config()).await;
        handle.stop();
        world.called(*held_in).await;
        world.kill_engine();
        assert_eq!(ended(&handle).await.outcome, *outcome, "{held_in:?}");
        assert_eq!(world.calls(), *calls, "{held_in:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_dies_while_requests_finish_ends_them() {
    let (world, handle) = stalling(config()).await;
    let streams = streams(&world, 2).await;
    handle.stop();
    drains(&handle, Draining::Finishing).await;
    world.kill_engine();
    for stream in streams {
        let end = read(stream).await.end;
        assert_eq!(end, End::Failed(ErrorKind::Disconnected));
    }
    assert_eq!(ended(&handle).await.outcome, Failed(EngineDied));
}

#[tokio::test(start_paused = true)]
async fn the_first_error_is_the_one_reported() {
    let world = World::new();
    world.plan(Start, [Error]);
    world.plan(Cleanup, [Panic]);
    let report = ended(&spawn(&world, config())).await;
    assert_eq!(report.outcome, Failed(StartFailed(Fault::Error)));
    assert!(report.error.unwrap().message().contains("Start fails"));
}

async fn streams(world: &Arc<World>, count: usize) -> Vec<OutputStream> {
    let mut streams = Vec::new();
    for index in 0..count {
        streams.push(world.send(&format!("r{index}")).await.unwrap());
    }
    streams
}
