//! SH: drain and shutdown.
//!
//! Changed from the catalogue, with the reason:
//! - SH04: the kit cannot make the first start of a good engine fail, so it starts an engine that was cleaned up. The engine
//!   may choose the result of that start; LC05 covers a start that was dropped midway.
//! - SH06: the Worker refuses new work: it unlists the instance before it drains. An engine may serve requests that arrive
//!   after a drain, or refuse them with a kind that clients retry.

use std::future::ready;
use std::pin::{Pin, pin};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use futures_util::future::{Either, MaybeDone, join, join_all, maybe_done, select};
use genset_backend_common::output::Violation;
use genset_backend_common::{
    CancelReason, DrainContext, EngineError, ErrorKind, FinishReason, GenerateRequest, StartContext,
};
use tokio::time::timeout;

use super::growth::{Holdings, Slack, leaks};
use super::leaks as holdings;
use super::lifecycle::comes_within;
use super::pressure::{end_of_cancelled, long_request, slots};
use crate::answer::Answer;
use crate::check::{Check, CheckResult, Stop, check, ensure, fail};
use crate::running::Running;
use crate::starvation::CheckThread;
use crate::subject::Subject;
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("SH01", Core, Tokens, "cleanup after start succeeds",
        clause: "LLMEngine::cleanup",
        breaks: "every stop of a worker hangs or counts as a crash", cleanup_after_start),
    check!("SH02", Core, Tokens, "a second cleanup is harmless",
        clause: "LLMEngine::cleanup",
        breaks: "a signal during the shutdown frees twice", cleanup_twice),
    check!("SH03", Core, Tokens, "cleanup without start is harmless",
        clause: "LLMEngine::cleanup",
        breaks: "a worker that fails before its start hides why", cleanup_without_start),
    check!("SH04", Core, Tokens, "cleanup after a start that could not succeed is harmless",
        clause: "LLMEngine::cleanup",
        breaks: "a failed load crashes on the way out and hides why it failed", cleanup_after_failed_start),
    check!("SH05", Core, Tokens, "cleanup with requests in flight leaves no stream without its end",
        clause: "LLMEngine::cleanup; generate, Contract",
        breaks: "clients hang when a worker stops", cleanup_in_flight),
    check!("SH06", Core, Tokens, "drain lets requests in flight finish, and what is refused after it can be retried",
        clause: "LLMEngine::drain",
        breaks: "every rollout cuts answers short", drain_in_flight),
    check!("SH07", Core, Tokens, "a second drain, and a drain after cleanup, return",
        clause: "LLMEngine::drain",
        breaks: "a shutdown that waits for a drain that is long over", drain_again),
    check!("SH08", Strict, Tokens, "cleanups at the same time all return",
        clause: "LLMEngine::cleanup",
        breaks: "a stop signal during a failing start deadlocks", concurrent_cleanups),
    check!(alone "SH09", Core, Tokens, "a cleaned-up engine leaves no task, thread, file, port or child behind",
        clause: "LLMEngine::cleanup",
        breaks: "a process that runs engine after engine runs out of memory", nothing_left),
    check!("SH10", Core, Tokens, "another engine works in the same process afterwards",
        clause: "LLMEngine::cleanup",
        breaks: "a worker cannot load another model without a new process", next_engine),
    check!("SH11", Core, Tokens, "generate after cleanup is refused with EngineShutdown",
        clause: "LLMEngine::generate, Errors",
        breaks: "late requests crash a stopping worker, or are not sent elsewhere", generate_after_cleanup),
    check!("SH12", Core, Tokens, "dropping a started engine without cleanup returns soon",
        clause: "LLMEngine::cleanup; Drop never blocks",
        breaks: "a panic in a worker becomes a process that never exits", drop_without_cleanup),
    check!(alone "SH13", Soak, Tokens, "fifty engines, started, used and stopped one after the other, leave memory flat",
        clause: "LLMEngine::cleanup",
        breaks: "a process that swaps models grows until it is killed", fifty_lives),
    check!("SH14", Core, Tokens, "cleanup ends the requests that wait too",
        clause: "LLMEngine::cleanup; generate, Contract",
        breaks: "clients at the end of a busy worker's queue hang when it stops", cleanup_with_waiters),
    check!("SH15", Core, Tokens, "drain returns soon after requests were cancelled or dropped",
        clause: "LLMEngine::drain",
        breaks: "a worker whose clients have left uses up all its grace, at every rollout", drain_after_cancels),
    check!("SH16", Core, Tokens, "cleanup waits for no reader, and a stream that is held over it comes to its end",
        clause: "LLMEngine::cleanup",
        breaks: "one client that has stopped reading keeps a worker from stopping, until it is killed", cleanup_beside_held_streams),
];

/// A cleanup that must succeed.
async fn clean_up(trial: &Trial, what: &str, subject: &Subject) -> CheckResult {
    match trial.cleaning(what, subject.engine.cleanup()).await? {
        Ok(()) => Ok(()),
        Err(error) => fail!("{what} failed: {error} ({})", error.kind()),
    }
}

/// A drain while nothing runs.
async fn drain(live: &Live, what: &str) -> Result<Result<(), EngineError>, Stop> {
    let (drained, ()) = live.drain_while(what, ready(Ok(()))).await?;
    Ok(drained)
}

async fn cleanup_after_start(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    clean_up(&trial, "cleanup", &live.subject).await
}

async fn cleanup_twice(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let _ = live.answer(live.request(4, 4)).await?;
    live.put_away().await?;
    clean_up(&trial, "a second cleanup", &live.subject).await
}

async fn cleanup_without_start(trial: Trial) -> CheckResult {
    clean_up(&trial, "cleanup without start", &trial.build()).await
}

async fn cleanup_after_failed_start(trial: Trial) -> CheckResult {
    let engine = trial.build().engine;
    drop(trial.cleaning("cleanup", engine.cleanup()).await?);
    let start = engine.start(StartContext::detached(1));
    drop(trial.starting("start after cleanup", start).await?);
    match trial
        .cleaning("cleanup after a failed start", engine.cleanup())
        .await?
    {
        Ok(()) => Ok(()),
        Err(error) => fail!("cleanup after a failed start failed: {error}"),
    }
}

/// Requests whose first tokens have come, all with more to come.
async fn in_flight(live: &Live, count: usize) -> Result<Vec<Running>, Stop> {
    let mut all = Vec::new();
    for _ in 0..count {
        let mut running = live.generate(live.busy_request(0, 64)).await?;
        running.read_tokens(1).await?;
        all.push(running);
    }
    Ok(all)
}

/// Reads the streams to their ends, with this limit for each item.
async fn finish_all(all: Vec<Running>, limit: Duration) -> Result<Vec<Answer>, Stop> {
    join_all(all.into_iter().map(|running| running.finish_within(limit)))
        .await
        .into_iter()
        .collect()
}

/// The limit for an item, or for a call of `generate`, during a cleanup: it may end what is open as its last step.
fn beside_cleanup(trial: &Trial) -> Duration {
    let limits = trial.limits();
    limits.call.max(limits.cleanup)
}

async fn cleanup_in_flight(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let all = in_flight(&live, live.at_once(3)).await?;
    // Reads the streams meanwhile, as clients do. SH16 covers clients that do not.
    let cleanup = trial.cleaning("cleanup", live.subject.engine.cleanup());
    let (cleaned, answers) = join(cleanup, finish_all(all, beside_cleanup(&trial))).await;
    // SH01 judges whether it succeeds.
    drop(cleaned?);
    for answer in answers? {
        ensure!(
            answer.violation != Some(Violation::EndedWithoutTerminal),
            "cleanup left a stream without its terminal"
        );
        ensure!(
            answer.reason() != Some(FinishReason::Cancelled),
            "cleanup ended a stream as cancelled, although nobody cancelled it"
        );
        if let Some(error) = answer.error() {
            ensure!(
                error.policy().is_retryable,
                "cleanup ended a stream with {}, which no client retries: {error}",
                error.kind()
            );
        }
    }
    Ok(())
}

/// Requests beyond those that run at once.
const WAITING: u32 = 4;

/// A call of `generate` that has returned or waits: an engine may let a request wait in it for a seat.
type Sent<F> = Pin<Box<MaybeDone<F>>>;

/// What `generate` returns.
type Accepted = Result<Result<Running, EngineError>, Stop>;

/// The whole answer to a request that was sent, with this limit for each item; `None` if it was refused. A full engine may
/// refuse; CC07 judges how.
async fn end_of<F: Future<Output = Accepted>>(
    mut sent: Sent<F>,
    limit: Duration,
) -> Result<Option<Answer>, Stop> {
    sent.as_mut().await;
    match sent.as_mut().take_output() {
        Some(Ok(Ok(running))) => running.finish_within(limit).await.map(Some),
        Some(Err(stop)) => Err(stop),
        Some(Ok(Err(_))) | None => Ok(None),
    }
}

async fn cleanup_with_waiters(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let limit = beside_cleanup(&trial);
    let sent = (0..slots(&live) + WAITING).map(|seed| {
        let request = live.busy_request(u64::from(seed), 64);
        let ctx = live.context(&request);
        Box::pin(maybe_done(live.try_generate_within(limit, request, ctx)))
    });
    let mut sent: Vec<Sent<_>> = sent.collect();
    drop(timeout(trial.limits().cancel / 4, join_all(&mut sent)).await);
    let cleanup = trial.cleaning("cleanup", live.subject.engine.cleanup());
    let ends = join_all(sent.into_iter().map(|sent| end_of(sent, limit)));
    let (cleaned, answers) = join(cleanup, ends).await;
    // SH01 judges whether it succeeds.
    drop(cleaned?);
    for answer in answers {
        let Some(answer) = answer? else {
            continue;
        };
        ensure!(
            answer.violation != Some(Violation::EndedWithoutTerminal),
            "cleanup left the stream of a request that waited without its terminal"
        );
    }
    Ok(())
}

/// Requests whose clients do not read during the cleanup: one has begun, the other was never polled.
async fn cleanup_beside_held_streams(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut held = live.generate(live.busy_request(0, 64)).await?;
    held.read_tokens(1).await?;
    let unread = live.busy_request(1, 64);
    let ctx = live.context(&unread);
    let accepted = live.try_generate_within(beside_cleanup(&trial), unread, ctx);
    let mut unread: Sent<_> = Box::pin(maybe_done(accepted));
    drop(timeout(trial.limits().cancel / 4, &mut unread).await);
    let cleanup = live.subject.engine.cleanup();
    let cleanup = pin!(trial.cleaning("cleanup while nobody reads", cleanup));
    let cleaned = match select(cleanup, &mut unread).await {
        Either::Left((cleaned, _)) => cleaned,
        Either::Right(((), cleanup)) => cleanup.await,
    };
    // SH01 judges whether it succeeds.
    drop(cleaned?);
    let limit = trial.limits().call;
    let (held, unread) = join(held.finish(), end_of(unread, limit)).await;
    for answer in [Some(held?), unread?].into_iter().flatten() {
        ensure!(
            answer.violation != Some(Violation::EndedWithoutTerminal),
            "a stream that was held over the cleanup has no terminal"
        );
    }
    Ok(())
}

async fn drain_after_cancels(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    for seed in 0..6 {
        let mut running = live.generate(long_request(&live, seed)).await?;
        if seed % 3 > 0 {
            running.read_tokens(1).await?;
        }
        if seed % 2 == 0 {
            drop(running);
            continue;
        }
        running.ctx.cancel(CancelReason::Client);
        live.abort(&running.ctx).await?;
        drop(end_of_cancelled(&live, running).await?);
    }
    let deadline = trial.limits().call * 2;
    let call = live.subject.engine.drain(DrainContext { deadline });
    let what = "drain after requests were cancelled and dropped";
    // SH06 judges the result.
    drop(trial.within(what, trial.limits().cancel, call).await?);
    Ok(())
}

async fn drain_in_flight(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let all = in_flight(&live, live.at_once(3)).await?;
    let reading = finish_all(all, trial.limits().call);
    let (drained, answers) = live.drain_while("drain", reading).await?;
    if let Err(error) = drained {
        fail!("drain failed: {error}");
    }
    for answer in answers {
        let is_whole = answer
            .reason()
            .is_some_and(|reason| reason != FinishReason::Cancelled);
        ensure!(
            is_whole,
            "drain cut a request in flight short: {:?}",
            answer.items.last()
        );
    }
    let request = live.request(4, 4);
    let ctx = live.context(&request);
    if let Some(error) = live.outcome(request, ctx).await?.error() {
        ensure!(
            error.policy().is_retryable,
            "a request after drain is refused with {}, which no client retries: {error}",
            error.kind()
        );
    }
    Ok(())
}

async fn drain_again(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    drop(drain(&live, "drain").await?);
    drop(drain(&live, "a second drain").await?);
    clean_up(&trial, "cleanup after two drains", &live.subject).await?;
    drop(drain(&live, "drain after cleanup").await?);
    Ok(())
}

async fn concurrent_cleanups(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let cleanups = (0..4).map(|_| clean_up(&trial, "one of four cleanups", &live.subject));
    join_all(cleanups).await.into_iter().collect()
}

async fn nothing_left(trial: Trial) -> CheckResult {
    let before = holdings::tasks();
    holdings::leaves_nothing("starting, using and cleaning up an engine", || {
        use_up(trial.clone())
    })
    .await?;
    holdings::tasks_end(&trial, "the engine", before).await
}

/// The whole life of an engine: one request answered, one dropped, cleanup, and the engine itself dropped.
async fn use_up(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    drop(live.answer(live.request(4, 4)).await?);
    drop(in_flight(&live, 1).await?);
    live.put_away().await?;
    Ok(())
}

/// The number of lives before the first look, in which caches and pools fill.
const WARM_LIVES: u32 = 10;
const LIVES: u32 = 40;
/// The number of rounds of lives that must all grow: other tests in this process do not grow three times.
const ROUNDS: usize = 3;
/// The slack: a leak of one resource per life adds forty, a mebibyte per life forty mebibytes.
const LIVES_SLACK: Slack = Slack {
    things: 20,
    memory_kib: 24 * 1024,
};

async fn fifty_lives(trial: Trial) -> CheckResult {
    live_and_die(&trial, WARM_LIVES).await?;
    let mut looks = vec![Holdings::now()];
    for _ in 0..ROUNDS {
        live_and_die(&trial, LIVES).await?;
        looks.push(Holdings::now());
        if leaks(&looks, LIVES_SLACK).is_empty() {
            return Ok(());
        }
    }
    fail!(
        "after each {LIVES} engines one after the other there were more: {}",
        leaks(&looks, LIVES_SLACK).join(", ")
    )
}

async fn live_and_die(trial: &Trial, times: u32) -> CheckResult {
    for _ in 0..times {
        use_up(trial.clone()).await?;
    }
    Ok(())
}

async fn next_engine(trial: Trial) -> CheckResult {
    for place in ["the first engine", "the engine after it"] {
        let live = trial.start().await?;
        let answer = live.answer(live.request(4, 4)).await?;
        ensure!(
            answer.finished().is_some(),
            "{place} fails: {:?}",
            answer.error()
        );
        live.put_away().await?;
    }
    Ok(())
}

async fn generate_after_cleanup(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.put_away().await?;
    let request: GenerateRequest = live.request(4, 4);
    let error = live.refusal(request).await?;
    ensure!(
        error.kind() == ErrorKind::EngineShutdown,
        "expected engine_shutdown, got {}: {error}",
        error.kind()
    );
    Ok(())
}

/// Drops the engine as engines are dropped, in an async context, but on a thread that can be given up.
async fn drop_without_cleanup(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    drop(live.answer(live.request(4, 4)).await?);
    trial.release(&live.subject);
    let runtime = tokio::runtime::Handle::current();
    let (done, is_done) = sync_channel::<()>(1);
    let dropping = CheckThread::default();
    let own = dropping.clone();
    let thread = std::thread::Builder::new()
        .name("conformance-drop".into())
        .spawn(move || {
            own.is_this();
            runtime.block_on(async { drop(live) });
            let _ = done.send(());
        });
    ensure!(thread.is_ok(), "the kit cannot start a thread");
    // In real time, whatever the runtime's clock: a thread cannot wait on a paused one.
    let limit = trial.limits().cancel;
    match comes_within(limit, &is_done, || dropping.starved()) {
        Ok(()) => Ok(()),
        Err(RecvTimeoutError::Disconnected) => fail!("dropping a started engine panics"),
        Err(RecvTimeoutError::Timeout) => {
            fail!(
                "dropping a started engine took longer than {} s",
                limit.as_secs_f64()
            )
        }
    }
}
