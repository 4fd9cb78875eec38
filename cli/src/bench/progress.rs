//! The progress of a long command: a bar on a terminal, otherwise a line for every tenth.

use std::pin::pin;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use tokio::time::sleep;

use crate::input::note;

/// Longer commands show their progress, and longer waits their reason.
pub(crate) const PROGRESS_AFTER: Duration = Duration::from_secs(2);

/// The interval between progress updates.
pub(crate) const PROGRESS_EVERY: Duration = Duration::from_millis(500);

/// Waits for `answers`; calls `tell` if they take long.
pub(crate) async fn telling_if_long<T>(answers: impl Future<Output = T>, tell: impl FnOnce()) -> T {
    let mut answers = pin!(answers);
    tokio::select! {
        biased;
        all = &mut answers => return all,
        () = sleep(PROGRESS_AFTER) => tell(),
    }
    answers.await
}

/// A bar on standard error, if that is a terminal. Dropping it removes it.
pub(crate) fn bar() -> ProgressBar {
    // Of a length of 0, all would be done.
    let bar = ProgressBar::no_length().with_finish(ProgressFinish::AndClear);
    if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:40}] {pos}/{len} {eta}") {
        bar.set_style(style);
    }
    bar
}

/// The progress of one command, on standard error. Dropping this removes the bar.
pub(crate) struct Progress {
    label: &'static str,
    bar: ProgressBar,
    /// The last tenth that was printed. A smaller value starts over.
    told: u64,
}

impl Progress {
    pub(crate) fn of_rounds(label: &'static str) -> Self {
        let bar = bar();
        bar.set_message(label);
        let told = 0;
        Self { label, bar, told }
    }

    /// Sets the progress to `done` of `all`.
    pub(crate) fn set(&mut self, done: u64, all: u64) {
        if !self.bar.is_hidden() {
            self.bar.set_length(all);
            self.bar.set_position(done);
            return;
        }
        let tenths = (done.saturating_mul(10)).checked_div(all).unwrap_or(10);
        if tenths != self.told {
            note(format_args!("{}: {tenths}0 %", self.label));
            self.told = tenths;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_long_wait_is_told_and_a_short_one_is_not() {
        for (takes, expected) in [(1, false), (3, true)] {
            let mut is_told = false;
            let answers = sleep(Duration::from_secs(takes));
            telling_if_long(answers, || is_told = true).await;
            assert_eq!(is_told, expected, "{takes} s");
        }
    }
}
