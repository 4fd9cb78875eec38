//! The HTTP server: routes, handlers, connections.

mod access;
mod apis;
mod asked_model;
mod batches;
mod body;
mod completions;
mod connection;
mod docs;
mod early;
mod files;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod handlers;
mod held;
mod listing;
mod local;
mod messages;
mod metrics;
mod models;
mod openapi;
mod pages;
mod peers;
mod poll_again;
mod replies;
mod request_body;
mod request_id;
mod responses;
mod scores;
mod server;
mod stall;
mod stream;
mod tls;
mod ui;
mod whole;

pub use local::{LocalAnswer, LocalFrontend};
pub use server::{BindError, FrontendServer};
