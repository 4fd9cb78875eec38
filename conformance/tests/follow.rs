//! A run that is followed, and ended early.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod clean;

use std::collections::BTreeSet;

use genset_conformance::{
    Check, CheckReport, Level, Observer, Options, Report, SkipReason, Verdict,
    run_conformance_observed,
};

use self::clean::{clean, mutant, sample};

/// The groups of the checks that run, in their order.
const GROUPS: [&str; 3] = ["ST", "US", "KV"];

fn options() -> Options {
    Options {
        level: Level::Core,
        only: GROUPS.map(str::to_owned).into(),
        ..Options::default()
    }
}

/// Notes what a run tells, and ends it.
#[derive(Default)]
struct Follows {
    begun: Vec<String>,
    all: BTreeSet<usize>,
    failed: usize,
    /// The check during which the run is interrupted.
    until: Option<&'static str>,
}

impl Observer for Follows {
    fn begins(&mut self, check: &Check, done: usize, all: usize) {
        assert_eq!(done, self.begun.len());
        self.begun.push(check.id.to_owned());
        self.all.insert(all);
    }

    fn ended(&mut self, report: &CheckReport) -> Result<(), String> {
        if report.is_bad() {
            self.failed += 1;
            return Err("it left".to_owned());
        }
        Ok(())
    }

    fn interruption(&self) -> Option<String> {
        let last = self.begun.last().map(String::as_str);
        (last.is_some() && last == self.until).then(|| "enough".to_owned())
    }
}

/// The checks that passed.
fn passed(report: &Report) -> Vec<&str> {
    let passed = report
        .checks
        .iter()
        .filter(|check| check.verdict == Verdict::Pass);
    passed.map(|check| check.id.as_str()).collect()
}

#[test]
fn a_run_tells_of_each_check_that_applies() {
    let mut follows = Follows::default();
    let report = run_conformance_observed(sample(), &options(), &mut follows);
    assert!(report.is_good());
    let begun = &follows.begun;
    assert!(
        passed(&report)
            .iter()
            .all(|id| begun.iter().any(|begun| begun == id))
    );
    // The engine declares no KV events.
    assert!(!begun.iter().any(|id| id.starts_with("KV")), "{begun:?}");
    assert_eq!(follows.all, BTreeSet::from([begun.len()]));
}

#[test]
fn an_interrupted_run_keeps_the_results_so_far() {
    let mut follows = Follows {
        until: Some("US02"),
        ..Follows::default()
    };
    let report = run_conformance_observed(sample(), &options(), &mut follows);
    assert_eq!(follows.begun.last().map(String::as_str), Some("US02"));
    let passed = passed(&report);
    assert!(
        passed.contains(&"US01") && !passed.contains(&"US02"),
        "{passed:?}"
    );
    assert_eq!(report.end(), Some("enough"));
    assert!(!report.is_good() && !report.is_conformant());
    let text = report.to_terminal(false);
    assert!(
        text.contains("\nENDED EARLY: enough\nNOT CONFORMANT\n"),
        "{text}"
    );
    let xml = report.to_junit();
    for part in [
        " failures=\"1\" ",
        "<testcase classname=\"run\" name=\"ended early: enough\" ",
        "<failure message=\"ended early: enough\"/>",
    ] {
        assert!(xml.contains(part), "{part:?} is not in:\n{xml}");
    }
}

/// An engine that fails one check.
const BROKEN: &str = "silent-on-a-whole-chunk";

#[test]
fn a_run_ends_when_the_engine_is_gone_and_says_what_it_saw() {
    let mut follows = Follows::default();
    let broken = mutant(BROKEN).factory(clean());
    let report = run_conformance_observed(broken, &options(), &mut follows);
    assert_eq!(follows.failed, 1, "nothing runs after the first failure");
    assert_eq!(report.end(), Some("it left"));
    assert!(!report.is_good() && !report.is_conformant());
    let is_gone = |check: &&CheckReport| matches!(&check.verdict, Verdict::Skip { code: SkipReason::Gone, reason } if reason == "it left");
    let failed = report.checks.iter().position(CheckReport::is_bad).unwrap();
    let (ran, left) = report.checks.split_at(failed + 1);
    assert!(!ran.iter().any(|check| is_gone(&check)));
    // Excluded checks stay excluded.
    let wanted = |id: &str| GROUPS.iter().any(|only| id.starts_with(only));
    assert!(left.iter().filter(is_gone).count() > 0);
    assert!(left.iter().filter(is_gone).all(|check| wanted(&check.id)));
    let text = report.to_terminal(false);
    assert!(
        text.contains("\nENDED EARLY: it left\nNOT CONFORMANT\n"),
        "{text}"
    );
    let json = report.to_json().unwrap();
    assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), report);
}
