//! The layers between a server and the instances of a model. Each layer implements `generate`, so layers stack:
//!
//! ```text
//! frontend -> a layer -> another -> GenerateClient -> request plane -> Worker -> engine
//! ```
//!
//! - [`GenerateClient`](genset_runtime::GenerateClient) is the lowest layer: it knows the live instances, chooses one, and
//!   retries another as long as nothing was streamed.
//! - A layer is a file or a folder. It holds the layer below as an `Arc<dyn Route>`, implements `generate` itself, and works
//!   alone; [`Route`] also returns which instance answers, and takes the instances to leave out.
//! - KV-aware selection (`kv`, on the [`index`](mod@index)) chooses an instance by the request's cached prefix.
//! - `Disaggregating` sends a request's prefill to one pool of instances and its decode to another.
//! - `Queueing` lets requests wait while every instance is full.
//! - [`Migrating`] is the top layer: it migrates a running request when its instance is lost.
//! - [`connect`] stacks the layers that a model needs and omits those without work: with round-robin and a model without
//!   migration, it returns the client alone, at almost no extra cost.
//!
//! The crate depends on the runtime and the contract, never on HTTP, text or a tokenizer. The frontend calls it; so does a
//! simulation, in one process and without a socket.

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

// Not inside the module, because `tests/loom.rs` also compiles its files.
#[cfg(test)]
#[path = "index/tests.rs"]
mod index_tests;

pub use config::{KvConfig, RouterConfig, RouterMode};
pub use connect::{Layers, connect};
pub use disaggregating::{DisaggregationConfig, Legs};
pub use kv::RouterMetrics;
pub use migrating::{Migrating, MigrationConfig, Migrations};
pub use route::{Holder, Route, Routed};
