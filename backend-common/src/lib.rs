//! The contract between Genset and an inference engine.
//!
//! An engine author implements [`LLMEngine`], tests it with `genset-conformance` and ships it with `genset-runtime`. This crate
//! contains no network, no HTTP, no tokenizer and no engine.
//!
//! - The engine's side: [`LLMEngine`], [`StartContext`], [`EngineConfig`] and [`Capabilities`], [`GenerateRequest`],
//!   [`output`], [`EngineState`], [`EngineError`], [`EngineControls`], [`kv`].
//! - The server's side: [`worker::Worker`], which owns an engine's lifecycle; [`ports`], which it needs; [`ModelCard`],
//!   which it publishes.
//!
//! The types for writing an engine are exported at the root. The others are in their modules, such as [`config::SamplingOption`]
//! and [`transfer::KvTransfers`].

pub mod byte_size;
pub mod card;
pub mod config;
pub mod context;
pub mod controls;
mod debug;
mod engine;
pub mod error;
pub mod handles;
pub mod inbox;
pub mod kv;
pub mod log_limit;
pub mod machine;
pub mod memory;
mod named;
pub mod output;
pub mod ports;
pub mod random;
pub mod recent;
pub mod request;
pub mod series;
pub mod spelling;
mod state;
pub mod terminal;
pub mod text_file;
pub mod transfer;
pub mod worker;

pub use async_trait::async_trait;
pub use prometheus_client as prometheus;

pub use card::ModelCard;
pub use config::{Capabilities, EngineConfig};
pub use context::{CancelReason, RequestContext};
pub use controls::EngineControls;
pub use engine::{DrainContext, LLMEngine, Role, StartContext};
pub use error::{EngineError, ErrorKind, RequestField};
pub use handles::{HealthReporter, MetricsRegistry, ProgressReporter};
pub use output::{Finish, FinishReason, Output, OutputStream};
pub use request::{
    GenerateRequest, GuidedDecoding, Input, OutputOptions, SamplingOptions, StopConditions, TokenId,
};
pub use state::EngineState;
