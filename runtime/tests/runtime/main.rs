//! Integration tests of the runtime: components and clients of any types, and whole Workers behind them.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, also in its helpers"
)]

mod accepting;
mod adapters;
mod busy;
#[cfg(any(feature = "etcd", feature = "nats", feature = "tls"))]
mod certificates;
mod child;
mod clients;
mod component;
mod discovery;
mod loads;
mod models;
mod plane;
mod remote;
mod status_control;
mod support;
mod wire_document;
mod workers;
