//! The HTTP server: routes, handlers, connections.

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

pub use server::FrontendServer;
