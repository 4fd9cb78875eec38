//! [`Follower`]: shows the progress of a run of the kit, and ends the run at Ctrl-C or if its worker is gone. [`counted`]: shows
//! that of random sequences.

use std::sync::atomic::{AtomicU64, Ordering};

use genset_conformance::{Check, CheckReport, Observer, Scenario, SkipReason, Verdict};
use indicatif::ProgressBar;
use tokio_util::sync::CancellationToken;

use super::presence::Presence;
use super::run::BoxFactory;
use crate::bench::progress::bar;

/// Follows one run. Dropping this removes the progress.
pub(super) struct Follower {
    presence: Presence,
    interrupt: CancellationToken,
    bar: ProgressBar,
    /// Why the run ends, once its worker is gone for good.
    gone: Option<String>,
}

/// The progress before the engine has started.
fn begun() -> ProgressBar {
    let bar = bar();
    bar.set_message("start");
    bar.tick();
    bar
}

/// Shows how many of `all` sequences are over, by the engines that are built for them. Those of the regressions file and those
/// that are tried to shorten a failure come on top. The caller clears the bar.
pub(super) fn counted(factory: BoxFactory, all: u32) -> (BoxFactory, ProgressBar) {
    let (bar, over) = (begun(), AtomicU64::new(0));
    let shown = bar.clone();
    let factory = move |scenario: &Scenario| {
        if scenario.check == "sequence" {
            let over = over.fetch_add(1, Ordering::Relaxed);
            shown.set_length(u64::from(all).max(over + 1));
            shown.set_position(over);
            shown.set_message("sequences");
        }
        factory(scenario)
    };
    (Box::new(factory), bar)
}

impl Follower {
    pub(super) fn new(presence: Presence, interrupt: CancellationToken) -> Self {
        Self {
            presence,
            interrupt,
            bar: begun(),
            gone: None,
        }
    }

    /// Why the worker is gone for good, if it is: also after the last check, when no other one is left out for it.
    pub(super) fn into_gone(self) -> Option<String> {
        self.gone
    }
}

/// Whether the worker may be gone: a check failed, or could not measure.
fn may_be_gone(report: &CheckReport) -> bool {
    let code = SkipReason::NotMeasured;
    let is_untaken = matches!(report.verdict, Verdict::Skip { code: is, .. } if is == code);
    report.is_bad() || is_untaken
}

impl Observer for Follower {
    fn begins(&mut self, check: &Check, done: usize, all: usize) {
        let count = |checks: usize| u64::try_from(checks).unwrap_or(u64::MAX);
        self.bar.set_length(count(all));
        self.bar.set_position(count(done));
        self.bar.set_message(check.id);
    }

    fn ended(&mut self, report: &CheckReport) -> Result<(), String> {
        if !may_be_gone(report) {
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

#[cfg(test)]
mod tests {
    use genset_conformance::{Evidence, Level, Profile};

    use super::*;

    #[test]
    fn a_worker_may_be_gone_that_could_not_be_measured() {
        let skipped = |code: SkipReason| CheckReport {
            id: "PF01".into(),
            level: Level::Info,
            profile: Profile::Tokens,
            verdict: Verdict::Skip {
                code,
                reason: "the connection was lost".into(),
            },
            evidence: Evidence::Direct,
            duration_us: 1,
            is_precondition: false,
            seen_in: None,
            transcript: None,
        };
        assert!(may_be_gone(&skipped(SkipReason::NotMeasured)));
        assert!(!may_be_gone(&skipped(SkipReason::NotDeclared)));
    }
}
