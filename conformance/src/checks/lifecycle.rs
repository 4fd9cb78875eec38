//! LC: construct and start.
//!
//! Changed from the catalogue, with the reason:
//! - LC04: `start` returns the config once, so it cannot be read a second time. The promise is that two engines with the same
//!   settings declare the same; values that depend on free memory (numbers of blocks and sequences) may differ.
//! - LC07: options belong to the engine's own constructor, which a factory hides. The only option that the kit can choose is
//!   the role; an engine that starts in every role has no refusal to judge.
//! - LC08: the Worker's deadline drops the future of `start`. So `start` must never block the thread for long, even if another
//!   engine has the device, and must end if the engine is alone.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::task::Poll;
use std::time::Duration;

use genset_backend_common::{
    EngineConfig, EngineError, ErrorKind, Role, StartContext, worker::WorkerConfig,
};

use super::leaks;
use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::patience::Patience;
use crate::runner::ensure_virtual_time;
use crate::starvation::CheckThread;
use crate::subject::Subject;
use crate::trial::{Live, Progress, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("LC01", Core, Tokens, "start declares a model, a context and limits that a Worker can serve",
        clause: "EngineConfig::validate",
        breaks: "a worker registers a model that nobody can route to", sane_config),
    check!("LC02", Core, Tokens, "a second start is refused or changes nothing",
        clause: "LLMEngine::start",
        breaks: "a retried start takes the device's memory twice", second_start),
    check!("LC03", Core, Tokens, "generate before start is refused with EngineShutdown",
        clause: "LLMEngine::generate, Errors",
        breaks: "early traffic crashes the worker", generate_before_start),
    check!("LC04", Core, Tokens, "engines built alike declare the same",
        clause: "EngineConfig",
        breaks: "model cards that disagree, and routing that flaps between them", same_config),
    check!("LC05", Core, Tokens, "dropping the future of start, then cleanup, leaves nothing running",
        clause: "LLMEngine::start, Cancel safety",
        breaks: "a worker that is told to stop during a load leaks the load", dropped_start),
    check!(alone "LC06", Core, Tokens, "building an engine and dropping it leaves no thread, file or child behind",
        clause: "LLMEngine, construction is cheap and without side effects",
        breaks: "a process that only lists its engines holds a device", build_and_drop),
    check!("LC07", Strict, Tokens, "a start that an option makes impossible is refused as the operator's mistake",
        clause: "ErrorKind",
        breaks: "operators cannot tell a wrong flag from a crash", impossible_role),
    check!("LC08", Strict, Tokens, "start never holds the thread for long, alone or beside another engine, and ends",
        clause: "LLMEngine::start, Cancel safety",
        breaks: "a load that hangs cannot be given up, and blocks the rollout", start_yields),
    check!("LC09", Core, Tokens, "an engine that declares virtual_time waits for nothing but tokio::time",
        clause: "Capabilities::virtual_time",
        breaks: "tests on a paused clock that fail everywhere, and nowhere for their own reason", virtual_time),
    check!(alone "LC10", Core, Tokens, "a start that is dropped or fails leaves no thread, file or child behind",
        clause: "LLMEngine::start, Cancel safety; cleanup",
        breaks: "a worker that tries again and again to load runs out of threads and files", starts_given_up),
];

async fn virtual_time(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    if !live.config.capabilities.virtual_time {
        skip!(NotDeclared, "the engine does not declare virtual_time");
    }
    live.put_away().await?;
    // On a thread of its own; this thread belongs to the check.
    ensure_virtual_time(trial.factory())
}

async fn sane_config(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let config = &live.config;
    if let Err(error) = config.validate() {
        fail!("the config is not valid: {error}");
    }
    ensure!(config.max_num_seqs != Some(0), "max_num_seqs is 0");
    ensure!(
        config.max_num_batched_tokens != Some(0),
        "max_num_batched_tokens is 0"
    );
    ensure!(config.kv_total_blocks != Some(0), "kv_total_blocks is 0");
    ensure!(
        config.kv_total_blocks.is_none() || config.kv_block_size.is_some(),
        "there are KV blocks, but no kv_block_size"
    );
    if let Some(Err(error)) = config.canary.as_ref().map(|canary| config.check(canary)) {
        fail!("the engine's own canary is refused: {error}");
    }
    Ok(())
}

async fn second_start(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let before = leaks::tasks();
    let again = live.subject.engine.start(StartContext::detached(2));
    let again = trial.starting("a second start", again).await?;
    if let Ok(config) = again {
        ensure!(
            config == live.config,
            "a second start succeeded and declared something else"
        );
    }
    leaks::tasks_end(&trial, "a second start", before).await?;
    let answer = live.answer(live.request(4, 4)).await?;
    ensure!(
        answer.finished().is_some(),
        "after a second start the engine fails: {:?}",
        answer.error()
    );
    Ok(())
}

/// An engine that was not started, but can receive requests.
fn unstarted(trial: &Trial) -> Live {
    Live::unstarted(trial.clone(), 1024)
}

async fn generate_before_start(trial: Trial) -> CheckResult {
    let live = unstarted(&trial);
    let error = live.refusal(live.request(3, 1)).await?;
    ensure!(
        error.kind() == ErrorKind::EngineShutdown,
        "expected engine_shutdown, got {}: {error}",
        error.kind()
    );
    Ok(())
}

async fn same_config(trial: Trial) -> CheckResult {
    let configs = [
        config_of_a_start(&trial).await?,
        config_of_a_start(&trial).await?,
    ];
    let [first, second] = configs.map(|config| EngineConfig {
        kv_total_blocks: None,
        max_num_seqs: None,
        max_num_batched_tokens: None,
        // MT04 judges the ranks.
        data_parallel_size: 1,
        ..config
    });
    ensure!(
        first == second,
        "two engines built alike declare {first:?} and {second:?}"
    );
    Ok(())
}

/// The config of a new engine, which is gone when this returns: two may not fit on the device at once.
pub(super) async fn config_of_a_start(trial: &Trial) -> Result<EngineConfig, Stop> {
    let live = trial.start().await?;
    live.put_away().await?;
    Ok(live.config)
}

/// Where a start is dropped.
#[derive(Debug, Clone, Copy)]
enum Cut {
    Polls(u32),
    After(Duration),
}

async fn dropped_start(trial: Trial) -> CheckResult {
    let cuts = [
        Cut::Polls(1),
        Cut::Polls(2),
        Cut::After(Duration::from_millis(2)),
        Cut::After(Duration::from_millis(50)),
    ];
    for cut in cuts {
        let before = leaks::tasks();
        let subject = trial.build();
        start_until(&subject, cut).await;
        let what = "cleanup after a dropped start";
        if let Err(error) = clean_up_early(&trial, what, &subject).await? {
            fail!("cleanup failed after start was dropped ({cut:?}): {error}");
        }
        trial.release(&subject);
        drop(subject);
        leaks::tasks_end(&trial, "a dropped start", before).await?;
    }
    Ok(())
}

/// Begins a start and drops it at `cut`, or when it is done.
async fn start_until(subject: &Subject, cut: Cut) {
    let mut start = subject.engine.start(StartContext::detached(1));
    match cut {
        Cut::After(time) => drop(tokio::time::timeout(time, start).await),
        Cut::Polls(polls) => {
            let mut polled = 0;
            std::future::poll_fn(|cx| {
                polled += 1;
                if start.as_mut().poll(cx).is_ready() || polled >= polls {
                    return Poll::Ready(());
                }
                cx.waker().wake_by_ref();
                Poll::Pending
            })
            .await;
        }
    }
}

async fn starts_given_up(trial: Trial) -> CheckResult {
    for cut in [Cut::Polls(1), Cut::After(Duration::from_millis(2))] {
        let what = format!("a start that is dropped ({cut:?}), and cleaned up,");
        leaks::leaves_nothing(&what, || async {
            let subject = trial.build();
            start_until(&subject, cut).await;
            put_away(&trial, &subject).await
        })
        .await?;
    }
    leaks::leaves_nothing("a start that fails, and is cleaned up,", || async {
        let subject = trial.build();
        // It was cleaned up, so its start may fail; SH04 judges the result.
        drop(trial.cleaning("cleanup", subject.engine.cleanup()).await?);
        let start = subject.engine.start(StartContext::detached(1));
        drop(trial.starting("a start after cleanup", start).await);
        put_away(&trial, &subject).await
    })
    .await
}

async fn put_away(trial: &Trial, subject: &Subject) -> CheckResult {
    // Other checks judge the result.
    drop(clean_up_early(trial, "cleanup", subject).await?);
    trial.release(subject);
    Ok(())
}

/// Cleans up an engine whose start did not come to its end. A thread that loads may have to do so first, and the cleanup that
/// sets the usual limit was after a whole start. So this one has the time that a Worker waits.
async fn clean_up_early(
    trial: &Trial,
    what: &str,
    subject: &Subject,
) -> Result<Result<(), EngineError>, Stop> {
    let worker = WorkerConfig::default();
    let limit = trial.limits().cleanup.max(worker.cleanup_timeout);
    let cleaned = trial.within(what, limit, subject.engine.cleanup()).await;
    // As after any cleanup, the next one begins the silence anew.
    trial.note_wait();
    cleaned
}

async fn build_and_drop(trial: Trial) -> CheckResult {
    let before = leaks::tasks();
    leaks::leaves_nothing("building and dropping an engine", || async {
        let subject = trial.build();
        trial.release(&subject);
        drop(subject);
        Ok(())
    })
    .await?;
    leaks::tasks_end(&trial, "building an engine", before).await
}

async fn impossible_role(trial: Trial) -> CheckResult {
    let mut is_refused = false;
    for role in [Role::Prefill, Role::Decode] {
        let subject = trial.build_as(role);
        let ctx = StartContext {
            role,
            ..StartContext::detached(1)
        };
        let started = trial.starting("start", subject.engine.start(ctx)).await?;
        if let Err(error) = started {
            is_refused = true;
            let is_users = matches!(
                error.kind(),
                ErrorKind::InvalidArgument | ErrorKind::Unsupported
            );
            ensure!(
                is_users,
                "start as {role:?} is refused with {}: {error}",
                error.kind()
            );
        }
        drop(trial.cleaning("cleanup", subject.engine.cleanup()).await?);
        trial.release(&subject);
    }
    if !is_refused {
        skip!(
            NotDeclared,
            "the engine starts in every role, and its own options are hidden in the factory"
        );
    }
    Ok(())
}

/// Runs alone, and beside an engine that holds a unique resource: a device, a port, a lock file. The second engine may be
/// refused or wait, but must not block its thread.
async fn start_yields(trial: Trial) -> CheckResult {
    let (first, second) = (trial.build(), trial.build());
    let start = watched_start(&trial, &first, "start");
    trial.starting("start", start).await??;
    let beside = watched_start(&trial, &second, "start beside a running engine");
    match tokio::time::timeout(trial.limits().call, beside).await {
        Ok(watched) => watched,
        Err(_still_waiting) => Ok(()),
    }
}

/// Watches every poll of `start` from another thread, in real time: the check's own thread could be blocked.
async fn watched_start(trial: &Trial, subject: &Subject, what: &str) -> CheckResult {
    let mut start = subject.engine.start(StartContext::detached(1));
    // A fraction of the check's limit, so that the failure names this promise.
    let limit = trial.limits().wall / 10;
    let own = CheckThread::default();
    own.is_this();
    let is_soon = std::future::poll_fn(|cx| {
        let (done, is_done) = sync_channel::<()>(1);
        let polls = own.clone();
        let watch = std::thread::Builder::new()
            .name("conformance-watch".into())
            .spawn(move || comes_within(limit, &is_done, || polls.starved()));
        let poll = start.as_mut().poll(cx);
        let _ = done.send(());
        let is_soon = watch.is_ok_and(|watch| watch.join().is_ok_and(|came| came.is_ok()));
        match poll {
            _ if !is_soon => Poll::Ready(false),
            Poll::Ready(_started) => Poll::Ready(true),
            Poll::Pending => Poll::Pending,
        }
    })
    .await;
    ensure!(
        is_soon,
        "{what} held its thread for {} s of real time",
        limit.as_secs_f64()
    );
    Ok(())
}

/// The number of times that a poll's limit is checked.
const LOOKS: u32 = 8;

/// Receives a message before the sending thread has had this much time. `starved` is how long that thread has waited for a CPU
/// so far; that time does not count.
pub(super) fn comes_within(
    limit: Duration,
    word: &Receiver<()>,
    starved: impl Fn() -> Duration,
) -> Result<(), RecvTimeoutError> {
    let (mut patience, mut noted) = (Patience::new(limit), starved());
    let part = limit / LOOKS;
    loop {
        match word.recv_timeout(part) {
            Err(RecvTimeoutError::Timeout) => {}
            came => return came,
        }
        let now = starved();
        let waited = now.saturating_sub(std::mem::replace(&mut noted, now));
        if patience.look(Progress::default(), part, waited).is_some() {
            return Err(RecvTimeoutError::Timeout);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// The number of looks for a missing message, from a thread that waits for a CPU for this share of the time.
    fn looks(share: u32) -> u32 {
        let (limit, looks) = (Duration::from_millis(8), AtomicU32::new(0));
        let (_silent, word) = sync_channel(1);
        let starved = || limit / LOOKS / 4 * share * looks.fetch_add(1, Ordering::Relaxed);
        assert!(comes_within(limit, &word, starved).is_err());
        // The first look comes before the wait.
        looks.load(Ordering::Relaxed) - 1
    }

    #[test]
    fn a_poll_that_waits_for_a_processor_has_the_same_time_to_run() {
        assert_eq!(looks(0), LOOKS);
        assert_eq!(looks(2), LOOKS * 2);
        assert_eq!(looks(3), LOOKS * 4);
    }

    #[test]
    fn word_that_is_there_comes_at_once() {
        let (done, word) = sync_channel(1);
        done.send(()).unwrap();
        let came = comes_within(Duration::from_secs(1), &word, || Duration::ZERO);
        assert_eq!(came, Ok(()));
    }
}
