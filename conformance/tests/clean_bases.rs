//! The clean engines below the mutants pass everything: a mutant is caught for its fault, not for its base.

mod clean;

use genset_conformance::mutants::slotted::slotted;
use genset_conformance::{Level, Options, Scenario, Subject, run_conformance_with};

use self::clean::clean;

fn everything() -> Options {
    Options {
        level: Level::Soak,
        ..Options::default()
    }
}

#[test]
fn an_engine_with_slots_a_queue_and_a_probe_passes_everything() {
    let clean = clean();
    let slotted = move |scenario: &Scenario| slotted(&clean, scenario);
    run_conformance_with(slotted, &everything()).assert_conformant();
}

#[test]
fn an_engine_with_slots_passes_everything_without_a_probe() {
    let clean = clean();
    let slotted = move |scenario: &Scenario| Subject {
        probe: None,
        ..slotted(&clean, scenario)
    };
    run_conformance_with(slotted, &everything()).assert_conformant();
}
