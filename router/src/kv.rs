//! KV-aware selection: a request goes where most of its prompt is cached, as long as that costs no more than the load there.
//!
//! - [`Selecting`] is the layer. For each request it hashes the prompt, looks up who holds how much of it, and takes the
//!   candidate of the lowest [`cost`].
//! - [`fleet`] knows the instances: their targets in the index, and what they have to do.
//! - [`events`] keeps the index by what workers publish; [`assumed`] by what was routed, where they publish nothing.
//!
//! - [`affinity`] remembers who served a client's key last.
//!
//! Prompts that are text here go to the instance with the fewest requests, or to the one that served their key.

mod affinity;
mod assumed;
mod cost;
mod events;
mod explain;
mod fleet;
mod lag;
mod metrics;
mod selecting;

#[cfg(test)]
mod tests;

pub(crate) use self::events::Feed;
pub use self::metrics::RouterMetrics;
pub(crate) use self::selecting::Selecting;
