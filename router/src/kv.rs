//! KV-aware selection: a request goes to the worker that caches most of its prompt, unless the load there costs more.
//!
//! - [`Selecting`] is the layer. For each request it hashes the prompt, looks up which workers hold how much of it, and picks the
//!   candidate with the lowest [`cost`].
//! - [`fleet`] knows the instances: their targets in the index, and their pending work. [`prompts`] has the blocks of that work.
//!   [`seeded`] hashes the keys of its maps. [`unweighed`] counts the requests whose blocks are unknown.
//! - [`events`] updates the index from the KV events of workers; [`assumed`] from routed requests, if workers publish no events.
//!
//! - [`affinity`] remembers which instance last served a client's key.
//!
//! A prompt that is text here goes to the instance with the fewest requests, or to the one that served its key.

mod affinity;
mod assumed;
mod cost;
mod events;
mod explain;
mod fleet;
mod lag;
mod metrics;
mod prompts;
mod seeded;
mod selecting;
mod unweighed;

#[cfg(test)]
mod tests;

pub(crate) use self::events::Feed;
pub use self::metrics::RouterMetrics;
pub(crate) use self::selecting::Selecting;
