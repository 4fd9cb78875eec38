//! Stopping a worker with running requests: grace, deadlines, the second signal, the dropped handle.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::time::Instant;

use super::fakes::Act::{Hang, Panic};
use super::fakes::Call::{Cleanup, Close, Drain, Unlist};
use super::fakes::{Call, World};
use super::fakes::{config, ended, served, serving, slowly, spawn, stalling, stop_cleanly};
use super::transcript::{End, read};
use crate::error::ErrorKind;
use crate::output::{FinishReason, OutputStream};
use crate::worker::{Draining, Fault, Outcome, State, StopCause, WorkerHandle};

/// What a second signal leaves of a deadline.
const AT_ONCE: Duration = Duration::from_millis(100);

/// Waits until a worker is in this step of draining.
pub(super) async fn drains(handle: &WorkerHandle, at: Draining) {
    let mut states = handle.states();
    let is_there = |state: &State| matches!(state, State::Draining { step, .. } if *step == at);
    states.wait_for(is_there).await.unwrap();
}

/// A serving worker with a request that produced one token and then stalled.
async fn stuck() -> (Arc<World>, WorkerHandle, OutputStream) {
    let (world, handle) = stalling(config()).await;
    let mut outputs = world.send("stuck").await.unwrap();
    outputs.next().await.unwrap().unwrap();
    (world, handle, outputs)
}

#[tokio::test(start_paused = true)]
async fn requests_in_flight_finish_within_the_grace() {
    let (world, handle) = served(config()).await;
    world.answer_with(|request, ctx| Ok(slowly(request, ctx, Duration::from_secs(5))));
    let outputs = world.send("r").await.unwrap();
    handle.stop();
    let answer = read(outputs).await;
    assert_eq!(answer.tokens, [0, 1, 2, 3]);
    assert_eq!(ended(&handle).await.outcome, Outcome::Clean);
}

#[tokio::test(start_paused = true)]
async fn what_outlives_the_grace_ends_with_an_error_that_may_move() {
    let (_world, handle, outputs) = stuck().await;
    let asked = Instant::now();
    handle.stop();
    let end = read(outputs).await.end;
    assert_eq!(end, End::Failed(ErrorKind::EngineShutdown));
    assert!(ErrorKind::EngineShutdown.policy().is_migratable);
    assert_eq!(asked.elapsed(), config().grace);
    assert_eq!(ended(&handle).await.outcome, Outcome::Forced);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_holds_a_worker_for_a_moment_only() {
    let (_world, handle, outputs) = stuck().await;
    let asked = Instant::now();
    handle.stop();
    assert_eq!(ended(&handle).await.outcome, Outcome::Forced);
    assert_eq!(asked.elapsed(), config().grace + Duration::from_secs(5));
    let end = read(outputs).await.end;
    assert_eq!(end, End::Failed(ErrorKind::EngineShutdown));
}

#[tokio::test(start_paused = true)]
async fn new_requests_are_refused_while_draining_and_told_to_come_back() {
    let (world, handle, outputs) = stuck().await;
    handle.stop();
    drains(&handle, Draining::Finishing).await;
    let seen = world.count(Call::Generate);
    let error = world.send("late").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::EngineShutdown);
    assert!(error.details().retry_after.is_some());
    assert_eq!(world.count(Call::Generate), seen);
    drop(outputs);
    assert_eq!(ended(&handle).await.outcome, Outcome::Clean);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_admission_ends_with_the_grace() {
    let mut config = config();
    config.limits.max_running = 1;
    let (world, handle) = stalling(config).await;
    let running = world.send("running").await.unwrap();
    let waiting = world.send("waiting");
    let (refused, end, report) = tokio::join!(waiting, read(running), async {
        handle.stop();
        ended(&handle).await
    });
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::EngineShutdown);
    assert_eq!(end.end, End::Failed(ErrorKind::EngineShutdown));
    assert_eq!(report.outcome, Outcome::Forced);
}

#[tokio::test(start_paused = true)]
async fn a_second_signal_makes_the_deadline_of_every_call_now() {
    let table: &[(Call, Outcome)] = &[
        (Unlist, Outcome::Forced),
        (Drain, Outcome::Forced),
        (Close, Outcome::Forced),
        (Cleanup, Outcome::CleanupFailed(Fault::Timeout)),
    ];
    for (held_in, outcome) in table {
        let world = World::new();
        world.plan(*held_in, [Hang]);
        let handle = serving(&world, config()).await;
        handle.stop();
        world.called(*held_in).await;
        let asked = Instant::now();
        handle.stop();
        let report = ended(&handle).await;
        assert_eq!(report.outcome, *outcome, "{held_in:?}");
        if matches!(held_in, Cleanup) {
            let error = report.error.as_ref().unwrap();
            assert!(error.message().contains("second signal"), "{error}");
        }
        assert!(
            asked.elapsed() <= AT_ONCE,
            "{held_in:?}: {:?}",
            asked.elapsed()
        );
        assert_eq!(world.count(Cleanup), 1, "{held_in:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_second_signal_cuts_the_grace_short() {
    let (world, handle, outputs) = stuck().await;
    handle.stop();
    drains(&handle, Draining::Finishing).await;
    let asked = Instant::now();
    handle.stop();
    let end = read(outputs).await.end;
    assert_eq!(end, End::Failed(ErrorKind::EngineShutdown));
    assert_eq!(ended(&handle).await.outcome, Outcome::Forced);
    assert_eq!(asked.elapsed(), Duration::ZERO);
    assert_eq!(world.count(Drain), 0);
}

#[tokio::test(start_paused = true)]
async fn a_second_signal_waits_no_longer_for_clients_that_do_not_read() {
    let (_world, handle, _unread) = stuck().await;
    handle.stop();
    drains(&handle, Draining::Cancelling).await;
    let asked = Instant::now();
    handle.stop();
    assert_eq!(ended(&handle).await.outcome, Outcome::Forced);
    assert_eq!(asked.elapsed(), AT_ONCE);
}

#[tokio::test(start_paused = true)]
async fn two_signals_at_once_are_both_heard() {
    let (_world, handle, _unread) = stuck().await;
    let asked = Instant::now();
    handle.stop();
    handle.stop();
    assert_eq!(ended(&handle).await.outcome, Outcome::Forced);
    assert!(asked.elapsed() <= AT_ONCE * 2, "{:?}", asked.elapsed());
}

#[tokio::test(start_paused = true)]
async fn shutdown_after_stop_is_no_second_signal() {
    let (world, handle) = served(config()).await;
    world.answer_with(|request, ctx| Ok(slowly(request, ctx, Duration::from_secs(1))));
    let outputs = world.send("r").await.unwrap();
    handle.stop();
    let (report, answer) = tokio::join!(handle.shutdown(), read(outputs));
    assert_eq!(report.outcome, Outcome::Clean);
    assert_eq!(answer.tokens, [0, 1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn shutdown_hurries_no_worker_that_fails_by_itself() {
    let world = World::new();
    world.plan(Unlist, [Hang]);
    let handle = serving(&world, config()).await;
    world.kill_engine();
    world.called(Unlist).await;
    let asked = Instant::now();
    let report = handle.shutdown().await;
    assert_eq!(report.outcome, Outcome::Failed(StopCause::EngineDied));
    assert_eq!(asked.elapsed(), config().register_timeout);
}

#[tokio::test(start_paused = true)]
async fn shutdown_leaves_no_task_behind() {
    let (_world, handle) = served(config()).await;
    let tasks = handle.tasks.clone();
    assert_eq!(handle.shutdown().await.outcome, Outcome::Clean);
    assert!(tasks.is_empty());
}

#[tokio::test(start_paused = true)]
async fn dropping_the_handle_stops_the_worker() {
    let (world, handle) = served(config()).await;
    let mut states = handle.states();
    drop(handle);
    let stopped = State::Stopped(Outcome::Clean);
    states.wait_for(|state| *state == stopped).await.unwrap();
    assert_eq!(world.count(Cleanup), 1);
}

#[tokio::test(start_paused = true)]
async fn a_handle_dropped_after_a_stop_is_no_second_signal() {
    let (world, handle) = served(config()).await;
    world.answer_with(|request, ctx| Ok(slowly(request, ctx, Duration::from_secs(1))));
    let outputs = world.send("r").await.unwrap();
    let mut states = handle.states();
    handle.stop();
    drains(&handle, Draining::Finishing).await;
    drop(handle);
    let End::Finished { reason, .. } = read(outputs).await.end else {
        panic!("the request finishes within its grace")
    };
    assert_eq!(reason, FinishReason::Length);
    let stopped = State::Stopped(Outcome::Clean);
    states.wait_for(|state| *state == stopped).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_abort_that_hangs_or_panics_holds_up_nobody() {
    for act in [Hang, Panic] {
        let (world, handle, outputs) = stuck().await;
        world.plan(Call::Abort, [act]);
        drop(outputs);
        stop_cleanly(&handle).await;
        assert_eq!(world.aborted_ids(), ["stuck"]);
    }
}

#[tokio::test(start_paused = true)]
async fn everything_asked_of_a_stopped_worker_is_answered() {
    let world = World::new();
    let handle = spawn(&world, config());
    handle.ready().await.unwrap();
    stop_cleanly(&handle).await;
    handle.stop();
    assert_eq!(handle.ready().await.unwrap_err().outcome, Outcome::Clean);
    assert_eq!(handle.stopped().await.outcome, Outcome::Clean);
    let late = world.send("late").await;
    assert_eq!(late.unwrap_err().kind(), ErrorKind::EngineShutdown);
    assert_eq!(handle.shutdown().await.outcome, Outcome::Clean);
}
