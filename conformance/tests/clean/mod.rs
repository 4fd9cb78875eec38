//! The engine without faults, which mutants wrap, and mutants by name.

#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use genset_conformance::mutants::{Clean, Mutant, controls, corpus};
use genset_conformance::{Factory, Scenario};
use genset_engine_sample::{SampleArgs, SampleEngine};

pub(crate) fn sample() -> impl Factory {
    let args = SampleArgs {
        vocab_size: 1000,
        token_delay_ms: 1,
    };
    move |_: &Scenario| SampleEngine::from_args(&args)
}

pub(crate) fn clean() -> Clean {
    Arc::new(sample())
}

/// A broken engine, or one of the kit's controls.
pub(crate) fn mutant(name: &str) -> &'static Mutant {
    let mut all = corpus().chain(controls());
    all.find(|mutant| mutant.name == name).unwrap()
}
