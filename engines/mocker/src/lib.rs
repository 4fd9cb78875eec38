//! The mocker: it behaves like vLLM in time and memory, without computing.
//!
//! It schedules and manages its KV cache as an engine does ([`genset_scheduler`]): continuous batching, chunked prefill,
//! prefix caching, preemption, priorities. A [time model](TimeModel) sets how long each step takes on tokio's clock, which a
//! test or a simulation can pause. The answer is a function of prompt and position, so an answer that migrated between two
//! instances can be compared with one that did not.
//!
//! - [`MockerArgs`]: the settings, under vLLM's names where vLLM has them, from a JSON or YAML file.
//! - [`MockerModel`]: the properties of the simulated model.
//! - [`MockerEngine`]: the engine.
//!
//! # Examples
//! ```
//! use genset_engine_mocker::{MockerArgs, MockerEngine, MockerModel};
//!
//! let args = MockerArgs { speedup_ratio: 10.0, ..MockerArgs::default() };
//! let engine = MockerEngine::try_new(args, MockerModel::new(32_000, 8192)).unwrap();
//! # drop(engine);
//! ```

mod active;
mod args;
mod board;
mod engine;
mod rank;
mod time;
mod tokens;
mod transfer;

pub use args::{MockerArgs, MockerArgsError};
pub use engine::{MockerEngine, MockerStats};
pub use time::TimeModel;
pub use tokens::MockerModel;
