//! An engine in Rust in a process of its own, by `serve`: the conformance kit, one test a check. The process is this test program once more,
//! which then runs the test `child` alone.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod support;

use std::sync::Arc;

use genset_conformance::{Scenario, Subject, suite};
use genset_engine_sample::{SampleArgs, SampleEngine};
use genset_engine_subprocess::{SubprocessConfig, serve, worker_socket};

use support::Supervised;

#[test]
#[ignore = "it is the process that the others start"]
fn child() {
    let Some(socket) = worker_socket().unwrap() else {
        return;
    };
    let args = SampleArgs {
        vocab_size: 1000,
        token_delay_ms: 1,
    };
    let engine = Arc::new(SampleEngine::from_args(&args));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(serve(engine, socket)).unwrap();
    runtime.shutdown_background();
}

fn subject() -> Subject {
    let program = std::env::current_exe().unwrap();
    let only_child = ["child", "--exact", "--ignored", "--nocapture"];
    Supervised(SubprocessConfig::new(program).with_args(only_child)).subject()
}

suite!(|_: &Scenario| subject());
