//! The conformance kit in an author's crate: one test for everything, or one test a check.

use author_engine::Countdown;
use genset_conformance::{Scenario, run_conformance};

#[test]
fn is_conformant() {
    run_conformance(|_: &Scenario| Countdown::default()).assert_conformant();
}

mod each_check {
    genset_conformance::suite!(|_: &genset_conformance::Scenario| author_engine::Countdown::default());
}
