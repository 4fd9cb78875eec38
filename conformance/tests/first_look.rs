//! The first look at an engine, which tells the kit what the engine declares: a failed start then must not skip any check.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use genset_backend_common::{EngineConfig, EngineError, StartContext, async_trait};
use genset_conformance::mutants::capable::capable;
use genset_conformance::mutants::fault::{Fault, Inner, faulty};
use genset_conformance::{
    Factory, Options, Scenario, SkipReason, Verdict, find, run_check, run_conformance_with,
};

/// An engine whose first starts fail, counted across all engines of its factory.
struct BadStarts {
    left: Arc<AtomicU32>,
}

#[async_trait]
impl Fault for BadStarts {
    async fn start(&self, inner: &Inner, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let less = |left: u32| left.checked_sub(1);
        let is_bad = self
            .left
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, less)
            .is_ok();
        if is_bad {
            return Err(EngineError::internal("the device is held"));
        }
        inner.start(ctx).await
    }
}

/// The capable engine; its first `count` starts fail.
fn after_bad_starts(count: u32) -> impl Factory {
    let left = Arc::new(AtomicU32::new(count));
    move |scenario: &Scenario| {
        let left = Arc::clone(&left);
        faulty(capable(scenario), BadStarts { left })
    }
}

/// One check per profile, and one check for every engine.
fn some() -> Options {
    Options {
        only: ["DT01", "DT07", "GD01", "KV01", "LC01"]
            .map(String::from)
            .to_vec(),
        ..Options::default()
    }
}

#[test]
fn one_bad_start_leaves_out_no_check() {
    let report = run_conformance_with(after_bad_starts(1), &some());
    report.assert_conformant();
    let passed = report
        .checks
        .iter()
        .filter(|row| row.verdict == Verdict::Pass);
    assert_eq!(passed.count(), some().only.len(), "{report:?}");
    let alone = run_check(find("KV01").unwrap(), after_bad_starts(1));
    assert_eq!(alone.verdict, Verdict::Pass);
}

#[test]
fn an_engine_that_is_not_known_is_not_good() {
    // As many as there are looks, so that the engine starts for every check.
    let report = run_conformance_with(after_bad_starts(3), &some());
    assert!(!report.is_good() && !report.is_conformant());
    let of = |id: &str| report.checks.iter().find(|row| row.id == id).unwrap();
    assert_eq!(of("LC01").verdict, Verdict::Pass);
    for id in ["DT07", "GD01", "KV01"] {
        assert!(of(id).is_bad() && of(id).is_precondition, "{:?}", of(id));
    }
    let is_undeclared = |verdict: &Verdict| {
        matches!(
            verdict,
            Verdict::Skip {
                code: SkipReason::NotDeclared,
                ..
            }
        )
    };
    assert!(!report.checks.iter().any(|row| is_undeclared(&row.verdict)));
    let alone = run_check(find("KV01").unwrap(), after_bad_starts(u32::MAX));
    assert!(alone.is_bad() && alone.is_precondition, "{alone:?}");
}
