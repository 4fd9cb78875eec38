//! SQ: random sequences of operations, as drawn by [`run_sequences`](crate::run_sequences).

use std::sync::Arc;

use crate::check::{Check, CheckResult, check, fail, skip};
use crate::state_machine::{SequenceFailure, SequenceOptions, run_sequences_of};
use crate::trial::Trial;

pub(super) const CHECKS: &[Check] = &[
    check!("SQ01", Strict, Tokens, "random sequences of operations keep the contract",
        clause: "LLMEngine",
        breaks: "what no single check thinks of: a third start, a drop between two aborts, a drain that comes too soon", random),
];

/// Each sequence runs on its own thread; this thread only waits for them.
async fn random(trial: Trial) -> CheckResult {
    let options = SequenceOptions {
        cases: trial.sequences(),
        seed: Some(trial.seed()),
        // An engine whose start takes seconds runs fewer sequences.
        longest: Some(trial.limits().wall),
        ..SequenceOptions::default()
    };
    if options.cases == 0 {
        skip!(Filtered, "no sequences were asked for");
    }
    match run_sequences_of(Arc::clone(trial.factory()), &options) {
        Ok(_) => Ok(()),
        Err(SequenceFailure::Violated(violated)) => {
            fail!("{}; sequence: {}", violated.told(), violated.sequence)
        }
        Err(failure) => fail!("{failure}"),
    }
}
