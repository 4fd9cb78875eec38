//! [`Follower`]: shows the progress of a run of the kit, and ends the run at Ctrl-C or if its worker is gone.

use genset_conformance::{Check, CheckReport, Observer};
use indicatif::ProgressBar;
use tokio_util::sync::CancellationToken;

use super::presence::Presence;
use crate::bench::progress::bar;

/// Follows one run. Dropping this removes the progress.
pub(super) struct Follower {
    presence: Presence,
    interrupt: CancellationToken,
    bar: ProgressBar,
}

impl Follower {
    pub(super) fn new(presence: Presence, interrupt: CancellationToken) -> Self {
        let bar = bar();
        bar.set_message("start");
        bar.tick();
        Self {
            presence,
            interrupt,
            bar,
        }
    }
}

impl Observer for Follower {
    fn begins(&mut self, check: &Check, done: usize, all: usize) {
        let count = |checks: usize| u64::try_from(checks).unwrap_or(u64::MAX);
        self.bar.set_length(count(all));
        self.bar.set_position(count(done));
        self.bar.set_message(check.id);
    }

    fn ended(&mut self, report: &CheckReport) -> Result<(), String> {
        match report.is_bad() {
            true => self.presence.check(&self.interrupt),
            false => Ok(()),
        }
    }

    fn interruption(&self) -> Option<String> {
        let is_interrupted = self.interrupt.is_cancelled();
        is_interrupted.then(|| "the run was interrupted".to_owned())
    }
}
