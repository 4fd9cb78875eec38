//! The HTTP server: routes, handlers, connections.

mod body;
mod connection;
mod handlers;
mod metrics;
mod server;
mod stall;

pub use server::FrontendServer;
