//! The `genset` binary as a user sees it: every test starts the real program, talks to it over its socket, its pipes or a
//! pseudo-terminal, and checks its output and its exit.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, also in its helpers"
)]

mod batch;
mod bench;
mod candle;
mod config;
mod conform;
mod deploy;
mod doctor;
mod dynamo_guide;
mod fleet;
mod habits;
mod hostile;
mod http;
mod hub;
mod launcher;
mod metrics;
mod mocker;
mod operators;
#[cfg(feature = "otlp")]
mod otlp;
mod outputs;
mod scripted;
mod simulate;
mod stdin;
mod stop;
mod subprocess;
mod support;
mod terminal;
mod text;
mod tune;
mod unservable;
mod usage;
mod words;
#[path = "../fleet/worker.rs"]
#[allow(dead_code, reason = "the tests of fleets need the rest")]
mod worker;
