//! [`drive`]: sends a load to a server, at fixed times or with a fixed number of concurrent sessions, and counts the results.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use genset_backend_common::EngineError;
use genset_simulate::{Load, Session, Turn};
use tokio::runtime::Handle;
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::client::FailureKind;
use super::prompts::Said;
use super::tally::{Asked, Slo, Tally};
use super::target::Target;
use crate::bench::progress::{PROGRESS_AFTER, PROGRESS_EVERY, Progress};
use crate::signals::take_interrupt;

/// The interval at which a wait for an arrival checks whether to give up.
const LOOK: Duration = Duration::from_millis(100);

/// Spreads the seeds that people choose: the golden ratio.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// The number of sessions generated ahead of use.
const SESSIONS_READY: usize = 16;

/// The pause after a request that found no server, so that a closed load does not become a storm.
const AFTER_FAILURE: Duration = Duration::from_millis(100);

/// When sessions begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrivals {
    /// At their own times, regardless of the server.
    Open,
    /// This many at once. A new session starts when another ends, and no turn waits.
    Closed(u32),
}

/// What to send.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) load: Arc<Load>,
    pub(super) seed: u64,
    pub(super) arrivals: Arrivals,
    /// No session or turn begins after this time.
    pub(super) duration: Option<Duration>,
    /// The number of requests, if it is known.
    pub(super) requests: Option<u64>,
    pub(super) slo: Slo,
}

/// The results of a plan.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) tally: Tally,
    /// From the first request to the end of the last answer, or the whole time if there was no answer.
    pub(super) took: Duration,
    /// Whether Ctrl-C ended the run early.
    pub(super) is_cut: bool,
}

impl Measured {
    /// The results if Ctrl-C came before anything was measured.
    pub(super) fn nothing() -> Self {
        Self {
            tally: Tally::default(),
            took: Duration::ZERO,
            is_cut: true,
        }
    }
}

/// Sends everything in a plan and waits for the answers, or until Ctrl-C.
///
/// # Errors
/// `Internal`: signal handlers cannot be installed.
pub(super) async fn drive(
    target: &Arc<Target>,
    plan: &Plan,
    label: &'static str,
) -> Result<Measured, EngineError> {
    take_interrupt();
    let began = Instant::now();
    let driver = Arc::new(Driver {
        target: Arc::clone(target),
        began,
        until: plan.duration.map(|duration| began + duration),
        thinks: plan.arrivals == Arrivals::Open,
        tally: Mutex::new(Tally::new(plan.slo)),
        stop: CancellationToken::new(),
        tasks: TaskTracker::new(),
    });
    match plan.arrivals {
        Arrivals::Open => {
            let (driver, plan) = (Arc::clone(&driver), plan.clone());
            let runtime = Handle::current();
            let tasks = driver.tasks.clone();
            tasks.spawn_blocking(move || driver.arrive(&plan, &runtime));
        }
        Arrivals::Closed(concurrency) => driver.keep_busy(plan, concurrency),
    }
    driver.tasks.close();
    let is_cut = tokio::select! {
        () = driver.tasks.wait() => false,
        () = tell(&driver, plan, label) => false,
        signal = tokio::signal::ctrl_c() => {
            signal.map_err(|error| {
                EngineError::internal("Ctrl-C cannot be listened to").with_source(error)
            })?;
            true
        }
    };
    driver.stop.cancel();
    driver.tasks.wait().await;
    let tally = std::mem::take(&mut *driver.tally());
    let took = tally.took().unwrap_or_else(|| began.elapsed());
    Ok(Measured {
        tally,
        took,
        is_cut,
    })
}

/// Shows the progress of a long run; never returns.
async fn tell(driver: &Driver, plan: &Plan, label: &'static str) {
    sleep(PROGRESS_AFTER).await;
    let mut progress = Progress::of_rounds(label);
    loop {
        let done = driver.done();
        match (plan.duration, plan.requests) {
            (Some(duration), None) => {
                let all = duration.as_secs();
                progress.set(driver.began.elapsed().as_secs().min(all), all);
            }
            (_, Some(all)) => progress.set(done, all),
            (None, None) => {}
        }
        sleep(PROGRESS_EVERY).await;
    }
}

/// Sends the requests of a plan.
struct Driver {
    target: Arc<Target>,
    began: Instant,
    until: Option<Instant>,
    /// Whether turns wait as long as the load says.
    thinks: bool,
    tally: Mutex<Tally>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

/// A request that is ready to send.
struct Ready {
    body: Bytes,
    asked: Asked,
}

/// A session in progress.
struct Conversation {
    said: Said,
    turns: std::vec::IntoIter<Turn>,
    prompt_tokens: u64,
}

impl Driver {
    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of requests that ended.
    fn done(&self) -> u64 {
        let tally = self.tally();
        tally.answered + tally.lost.values().map(|lost| lost.count).sum::<u64>()
    }

    fn is_over(&self) -> bool {
        self.stop.is_cancelled() || self.until.is_some_and(|until| Instant::now() >= until)
    }

    /// Starts every session at its time. Runs on its own thread, whose sleeps are more precise than the milliseconds of tokio's
    /// timers. Serializes a session's first request before its time comes.
    fn arrive(self: Arc<Self>, plan: &Plan, runtime: &Handle) {
        for session in plan.load.sessions(plan.seed) {
            let due = self.began + session.at;
            let mut conversation = Conversation::new(session, plan.seed);
            let Some(ready) = conversation.next(&self.target) else {
                continue;
            };
            while Instant::now() < due {
                if self.is_over() {
                    return;
                }
                let left = due.saturating_duration_since(Instant::now());
                std::thread::park_timeout(left.min(LOOK));
            }
            if self.is_over() {
                return;
            }
            let driver = Arc::clone(&self);
            let one = driver.converse(conversation, ready, Some(due));
            self.tasks.spawn_on(one, runtime);
        }
    }

    /// Keeps this many sessions in progress.
    fn keep_busy(self: &Arc<Self>, plan: &Plan, concurrency: u32) {
        let (sender, sessions) = mpsc::channel(SESSIONS_READY);
        let (plan, seed) = (plan.clone(), plan.seed);
        self.tasks.spawn(async move {
            for session in plan.load.sessions(plan.seed) {
                // No receiver is left when the run is over.
                if sender.send(session).await.is_err() {
                    return;
                }
            }
        });
        let sessions = Arc::new(AsyncMutex::new(sessions));
        for _ in 0..concurrency {
            let (driver, sessions) = (Arc::clone(self), Arc::clone(&sessions));
            self.tasks.spawn(async move {
                while !driver.is_over() {
                    let Some(session) = sessions.lock().await.recv().await else {
                        return;
                    };
                    let mut conversation = Conversation::new(session, seed);
                    if let Some(ready) = conversation.next(&driver.target) {
                        Arc::clone(&driver)
                            .converse(conversation, ready, None)
                            .await;
                    }
                }
            });
        }
    }

    /// Runs one session to its end or to the first failed request.
    async fn converse(
        self: Arc<Self>,
        mut conversation: Conversation,
        mut ready: Ready,
        mut due: Option<Instant>,
    ) {
        loop {
            self.tally().asked(Instant::now());
            let path = self.target.path();
            let asking = self.target.client.stream(path, ready.body);
            let Some(answer) = self.stop.run_until_cancelled(asking).await else {
                return;
            };
            let answer = match answer {
                Ok(answer) => answer,
                Err(failure) => {
                    let is_away = failure.kind == FailureKind::Connect;
                    self.tally().lost(failure);
                    if is_away && !self.thinks {
                        self.stop.run_until_cancelled(sleep(AFTER_FAILURE)).await;
                    }
                    return;
                }
            };
            {
                let mut tally = self.tally();
                if let Some(due) = due {
                    tally.lag.add(answer.sent.saturating_duration_since(due));
                }
                tally.answered(ready.asked, &answer);
            }
            conversation.said.answered(&answer.text);
            conversation.prompt_tokens += u64::from(ready.asked.max_tokens);
            let after = conversation.pause();
            let Some(next) = conversation.next(&self.target) else {
                return;
            };
            ready = next;
            due = None;
            if self.thinks {
                let at = answer.ended + after;
                // Does not wait for a turn that would come too late.
                if self.until.is_some_and(|until| at >= until) {
                    return;
                }
                self.stop.run_until_cancelled(sleep_until(at)).await;
            }
            if self.is_over() {
                return;
            }
        }
    }
}

impl Conversation {
    /// Loads give pieces the same ids for every seed. Mixes in the seed, so that a server that keeps its prefix cache between
    /// runs has no hits from another seed.
    fn new(mut session: Session, seed: u64) -> Self {
        for turn in &mut session.turns {
            for piece in &mut turn.pieces {
                piece.id ^= seed.wrapping_mul(SPREAD);
            }
        }
        Self {
            said: Said::default(),
            turns: session.turns.into_iter(),
            prompt_tokens: 0,
        }
    }

    /// How long the next turn waits.
    fn pause(&self) -> Duration {
        let next = self.turns.as_slice().first();
        next.map_or(Duration::ZERO, |turn| turn.after)
    }

    /// Returns the next turn's request.
    fn next(&mut self, target: &Target) -> Option<Ready> {
        let turn = self.turns.next()?;
        target.prompts.ask(&mut self.said, &turn);
        let added = turn.pieces.iter().map(|piece| u64::from(piece.tokens));
        self.prompt_tokens += added.sum::<u64>();
        Some(Ready {
            body: target.body(&self.said, turn.max_tokens),
            asked: Asked {
                prompt_tokens: self.prompt_tokens,
                max_tokens: turn.max_tokens,
            },
        })
    }
}
