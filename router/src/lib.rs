//! The layers between a server and the instances of a model. Everything answers the same call, `generate`, and they stack:
//!
//! ```text
//! frontend -> a layer -> another -> GenerateClient -> request plane -> Worker -> engine
//! ```
//!
//! - [`GenerateClient`](genset_runtime::GenerateClient) is the lowest: it knows the live instances, chooses one, and asks
//!   another while nothing was streamed.
//! - A layer is a file or a folder of its own. It holds the layer below as an `Arc<dyn Route>`, answers `generate` itself, and
//!   works alone; [`Route`] says beside the answer who gives it, and takes the instances to leave out.
//! - Selection by what is cached (`kv`, on the [`index`](mod@index)) chooses an instance by the request's prompt.
//! - `Disaggregating` sends a request's prompt to one pool of instances and the rest of it to another.
//! - `Queueing` lets requests wait while every instance is full.
//! - [`Migrating`] is the highest: an answer that has begun outlives its instance.
//! - [`connect`] stacks what a model needs and leaves out the layers that would have nothing to do: with round-robin, of a model
//!   whose requests may not move, it returns the client alone, which then costs hardly more than without this crate.
//!
//! It sees the runtime and the contract; never HTTP, text or a tokenizer. The frontend calls it, and so does a simulation, in one
//! process and without a socket.

mod config;
mod connect;
mod disaggregating;
pub mod index;
mod kv;
mod migrating;
mod patience;
mod queueing;
mod route;
mod sync;
#[cfg(test)]
mod testing;

// Not in the module, whose files `tests/loom.rs` compiles once more.
#[cfg(test)]
#[path = "index/tests.rs"]
mod index_tests;

pub use config::{KvConfig, RouterConfig, RouterMode};
pub use connect::{Layers, connect};
pub use disaggregating::{DisaggregationConfig, Legs};
pub use kv::RouterMetrics;
pub use migrating::{Migrating, MigrationConfig, Migrations};
pub use route::{Holder, Route, Routed};
