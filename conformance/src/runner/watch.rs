//! The watch over a check: its thread, and when it is given up.

use std::any::Any;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use super::Interruption;
use crate::check::{SkipReason, Stop};
use crate::patience::{GivenUp, Patience};
use crate::starvation::{CHECK_THREAD, CheckThread, Starvation};
use crate::trial::Trial;

/// The runtime of a check, and the clock that its waits follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Clock {
    /// One thread and tokio's paused clock, which advances as soon as all tasks wait.
    Paused,
    /// One thread and the machine's clock.
    Real,
    /// Several threads and the machine's clock.
    Threads,
}

/// The interval at which the watch looks at a check's progress.
const BETWEEN_LOOKS: Duration = Duration::from_millis(250);

/// Runs `work` on its own thread, and gives it up when its [`Patience`] ends or the run is interrupted. If its waits follow the
/// machine's clock, the trial learns how long the machine did not let it run.
pub(super) fn watch<T: Send + 'static>(
    limit: Duration,
    clock: Clock,
    trial: &Trial,
    interruption: Interruption<'_>,
    work: impl FnOnce() -> Result<T, Stop> + Send + 'static,
) -> Result<T, Stop> {
    let (done, is_done) = sync_channel::<()>(1);
    let check = CheckThread::default();
    let own = check.clone();
    let thread = std::thread::Builder::new()
        .name(CHECK_THREAD.into())
        .spawn(move || {
            own.is_this();
            let result = work();
            let _ = done.send(());
            result
        });
    let thread =
        thread.map_err(|error| Stop::Fail(format!("the kit cannot start a thread: {error}")))?;
    wait(limit, clock, trial, interruption, check, &is_done)?;
    thread.join().unwrap_or_else(|panic| {
        let what = text_of(&*panic);
        Err(Stop::Fail(format!("the engine panicked: {what}")))
    })
}

/// Waits until the work on the thread `check` is done or has panicked.
fn wait(
    limit: Duration,
    clock: Clock,
    trial: &Trial,
    interruption: Interruption<'_>,
    check: CheckThread,
    is_done: &Receiver<()>,
) -> Result<(), Stop> {
    let (mut patience, mut starvation) = (Patience::new(limit), Starvation::of(check));
    let given_up = loop {
        if is_done.recv_timeout(BETWEEN_LOOKS) != Err(RecvTimeoutError::Timeout) {
            return Ok(());
        }
        if let Some(reason) = interruption() {
            return Err(Stop::Skip(SkipReason::Gone, reason));
        }
        let starved = starvation.since_last_look();
        if clock != Clock::Paused {
            trial.note_starved(starved);
        }
        if let Some(why) = patience.look(trial.progress(), BETWEEN_LOOKS, starved) {
            break why;
        }
    };
    match given_up {
        GivenUp::Blocked => Err(Stop::Fail(format!(
            "the engine blocks its thread: nothing moved for {} s of real time",
            limit.as_secs_f64()
        ))),
        GivenUp::Slow => Err(Stop::Fail(format!(
            "the check was not over within {} s of real time, though answers went on",
            patience.most().as_secs_f64()
        ))),
    }
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
