//! The server from outside: real connections, raw HTTP, a whole Worker behind it.
//!
//! One binary, so that it is linked once. `support` has the harness; every other module covers one concern.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test says what failed by panicking, and prints its seed"
)]

mod access;
mod adapters;
mod apis;
mod bad_input;
mod batch_limits;
mod batch_models;
mod batches;
mod client;
mod connections;
mod custom_tools;
mod drain;
mod fields;
mod fuzz;
mod golden;
mod guided;
mod guided_limits;
mod instances;
mod instructions;
mod keep_alive;
mod logprobs;
mod media;
mod memory;
mod messages;
mod methods;
mod observed;
mod openapi;
mod overload;
mod pages;
mod preparing;
mod quotas;
mod responses;
mod routing;
mod salts;
mod scores;
mod script;
mod slow_clients;
mod stop_strings;
mod stream_errors;
mod support;
mod tools;
mod turns;
mod unless_called;
mod web_page;
mod whole_bodies;
mod worst_bodies;
