//! An engine in Rust in a separate process, by `run_program`: the conformance kit, one test per check. The process is this test
//! program again, which then runs only the test `child`.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::process::ExitCode;

use clap::Args;
use genset_conformance::{Scenario, Subject, suite};
use genset_engine_sample::{SampleArgs, SampleEngine};
use genset_engine_subprocess::{SubprocessConfig, SupervisedProcess, run_program};

/// The arguments that make this test program a child. The engine's program parses them again.
const ONLY_CHILD: [&str; 4] = ["child", "--exact", "--ignored", "--nocapture"];

/// The arguments of [`ONLY_CHILD`].
#[derive(Args)]
struct OfTheTests {
    _test: String,
    #[arg(long = "exact")]
    _exact: bool,
    #[arg(long = "ignored")]
    _ignored: bool,
    #[arg(long = "nocapture")]
    _nocapture: bool,
}

#[test]
#[ignore = "it is the process that the others start"]
fn child() {
    let args = SampleArgs {
        vocab_size: 1000,
        token_delay_ms: 1,
    };
    let engine = |_: &OfTheTests| SampleEngine::from_args(&args);
    let code = run_program(&[], engine, || ExitCode::SUCCESS);
    assert_eq!(code, ExitCode::SUCCESS);
}

fn subject() -> Subject {
    let program = std::env::current_exe().unwrap();
    SupervisedProcess::new(SubprocessConfig::new(program).with_args(ONLY_CHILD)).subject()
}

suite!(|_: &Scenario| subject());
