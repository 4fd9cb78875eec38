//! Answers that lose their instance are byte for byte those of an undisturbed run.
//!
//! Everything runs in one process: workers whose streams break where a test says, behind the real router and the real server.
//! `cut` breaks streams, `site` is the process, `matrix` combines `engines` and `requests`, `recital` is one of the engines.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, also in its helpers"
)]

mod cut;
mod engines;
mod matrix;
mod recital;
mod requests;
mod site;
#[path = "../cli/support.rs"]
#[allow(dead_code, reason = "the other tests of the binary need the rest")]
mod support;
