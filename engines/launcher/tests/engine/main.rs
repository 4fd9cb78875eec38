//! Engines on stand-in servers: their lives, their answers, their operations, and what they publish.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod answers;
mod controls;
mod life;
mod load;
mod ranks;
mod repeated;
mod resumed;
#[path = "../support/mod.rs"]
mod support;
mod two_legs;
