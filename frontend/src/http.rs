//! The HTTP server: routes, handlers, connections.

mod access;
mod apis;
mod asked_model;
mod body;
mod completions;
mod connection;
mod docs;
mod handlers;
mod held;
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
mod server;
mod stall;
mod stream;
mod tls;
mod ui;
mod whole;

pub use local::{LocalAnswer, LocalFrontend};
pub use server::FrontendServer;
