//! The Python sample engine, in a process of its own, keeps the contract: all of the conformance kit, one test a check.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod support;

use genset_conformance::{Scenario, suite};
use genset_engine_subprocess::SupervisedProcess;

suite!(|_: &Scenario| {
    let sample = support::program(&support::package().join("sample_engine.py"));
    // A token takes a while, so that an answer can be cancelled on the way.
    SupervisedProcess::new(sample.with_args(["--token-delay-ms", "1"])).subject()
});
