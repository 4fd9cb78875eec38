//! The HTTP server: routes, handlers, connections.

mod access;
mod apis;
mod body;
mod connection;
mod handlers;
mod messages;
mod metrics;
mod poll_again;
mod responses;
mod server;
mod stall;
mod tls;

pub use server::FrontendServer;
