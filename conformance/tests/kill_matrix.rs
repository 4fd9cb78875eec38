//! Proves that the checks detect faults: exactly the listed checks catch each mutant, and every judging check catches at least
//! one. The clean engine passes everything in the sample engine's own tests.

mod clean;
#[macro_use]
mod matrix;

use std::collections::BTreeSet;
use std::sync::Arc;

use genset_conformance::mutants::capable::with_context;
use genset_conformance::mutants::{Clean, Mutant, controls, corpus, groups};
use genset_conformance::{
    Level, Options, Profile, Scenario, SkipReason, Verdict, catalogue, find, run_check,
    run_conformance, run_conformance_with,
};
use genset_engine_sample::{SampleArgs, SampleEngine};

use self::clean::{clean, mutant};

#[test]
fn the_controls_pass_everything() {
    for control in controls() {
        run_conformance(control.factory(clean())).assert_conformant();
    }
}

/// Runs soak checks for the mutants that only they catch.
fn as_high_as(mutant: &Mutant) -> Options {
    let levels = mutant
        .killed_by
        .iter()
        .filter_map(|id| Some(find(id)?.level));
    Options {
        level: levels.max().unwrap_or(Level::Strict).max(Level::Strict),
        // Sequences catch what checks catch, too: they run only for the mutants that nothing else catches.
        sequences: match mutant.killed_by.contains(&"SQ01") {
            true => Options::default().sequences,
            false => 0,
        },
        // Measurements catch nothing.
        is_measuring: false,
        ..Options::default()
    }
}

fn caught_exactly(group: &str) {
    let mut wrong = Vec::new();
    let mutants = groups().filter(|(name, _)| *name == group);
    for mutant in mutants.flat_map(|(_, mutants)| mutants) {
        let report = run_conformance_with(mutant.factory(clean()), &as_high_as(mutant));
        let caught: BTreeSet<&str> = report.failures().map(|check| check.id.as_str()).collect();
        let listed: BTreeSet<&str> = mutant.killed_by.iter().copied().collect();
        if caught != listed {
            wrong.push(format!(
                "{}: listed {listed:?}, caught by {caught:?}",
                mutant.name
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

each_group!(each_mutant_is_caught_by_exactly_its_checks, caught_exactly);

/// Even if tokens come slowly, unlimited run-ahead is caught.
#[test]
fn an_engine_that_is_slow_and_runs_ahead_is_caught() {
    let args = SampleArgs {
        vocab_size: 1000,
        token_delay_ms: 50,
    };
    let slow: Clean = Arc::new(move |_: &Scenario| SampleEngine::from_args(&args));
    let ahead = find("ST09").unwrap();
    let caught = run_check(ahead, mutant("unbounded-buffer").factory(slow)).verdict;
    let is_seen = matches!(&caught, Verdict::Fail { reason } if reason.ends_with("does not read"));
    assert!(is_seen, "{caught:?}");
    let small = run_check(ahead, |_: &Scenario| with_context(1024)).verdict;
    let code = SkipReason::NotMeasured;
    let is_skipped = matches!(&small, Verdict::Skip { code: is, .. } if *is == code);
    assert!(is_skipped, "{small:?}");
}

#[test]
fn every_check_with_a_verdict_catches_a_mutant() {
    let killers: BTreeSet<&str> = corpus()
        .flat_map(|mutant| mutant.killed_by.iter().copied())
        .collect();
    let idle: Vec<&str> = catalogue()
        .filter(|check| check.level != Level::Info && !killers.contains(check.id))
        // Engines in separate processes have their own matrix, next to the engine that runs them.
        .filter(|check| check.profile != Profile::Subprocess)
        .map(|c| c.id)
        .collect();
    assert!(idle.is_empty(), "no mutant proves {idle:?}");
}
