//! Answers that lose their instance are, byte for byte, those of an undisturbed run.
//!
//! One process: workers whose streams break where a test says, behind the real router and the real server. `cut` breaks
//! streams, `site` is the process, `recital` an engine that says what it is told, `matrix` the requests.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, also in its helpers"
)]

mod cut;
mod matrix;
mod recital;
mod site;
#[path = "../cli/support.rs"]
#[allow(dead_code, reason = "the other tests of the binary need the rest")]
mod support;
