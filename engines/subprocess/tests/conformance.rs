//! The Python sample engine, in a separate process, meets the contract: the whole conformance kit, one test per check.

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
    // Tokens take time, so that an answer can be cancelled before its end.
    SupervisedProcess::new(sample.with_args(["--token-delay-ms", "1"])).subject()
});
