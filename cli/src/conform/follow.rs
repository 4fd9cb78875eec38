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
    /// Why the run ends, once its worker is gone for good.
    gone: Option<String>,
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
            gone: None,
        }
    }

    /// Why the worker is gone for good, if it is: also after the last check, when no other one is left out for it.
    pub(super) fn into_gone(self) -> Option<String> {
        self.gone
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
        if !report.is_bad() {
            return Ok(());
        }
        let found = self.presence.check(&self.interrupt);
        self.gone = found.clone().err();
        found
    }

    fn interruption(&self) -> Option<String> {
        let is_interrupted = self.interrupt.is_cancelled();
        is_interrupted.then(|| "the run was interrupted".to_owned())
    }
}
