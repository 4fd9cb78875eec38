//! The contract between Genset and an inference engine.
//!
//! An engine author implements [`LLMEngine`], tests it with `genset-conformance` and ships it with `genset-runtime`. This
//! crate knows no network, no HTTP, no tokenizer and no engine.
//!
//! - The engine's side: [`LLMEngine`], [`StartContext`], [`EngineConfig`] and [`Capabilities`], [`GenerateRequest`],
//!   [`output`], [`EngineState`], [`EngineError`], [`EngineControls`], [`kv`].
//! - The server's side: [`worker::Worker`], which owns an engine's lifecycle; [`ports`], which it needs; [`ModelCard`],
//!   which it publishes; [`wire`], the codec for engines in other processes.

mod card;
mod config;
mod context;
mod controls;
mod engine;
mod error;
mod handles;
pub mod kv;
pub mod output;
pub mod ports;
mod recent;
mod request;
mod state;
mod transfer;
pub mod wire;
pub mod worker;

pub use async_trait::async_trait;
pub use prometheus_client as prometheus;

pub use card::{
    Artifact, ArtifactRef, DEFAULT_KV_BLOCK_SIZE, DEFAULT_MIGRATION_LIMIT, EndpointType,
    MAX_ARTIFACT_BYTES, MAX_ARTIFACTS, MAX_ARTIFACTS_BYTES, ModelCard,
};
pub use config::{
    Capabilities, Deviation, EngineConfig, GuidedKind, InputKind, MAX_DATA_PARALLEL_SIZE,
    SamplingOption,
};
pub use context::{CancelReason, Explanation, MAX_DECISIONS, RequestContext, TraceContext};
pub use controls::{Adapter, ControlReply, ControlRequest, EngineControls, SleepLevel};
pub use engine::{DrainContext, LLMEngine, Role, StartContext};
pub use error::{At, EngineError, ErrorDetails, ErrorKind, ErrorPolicy, RequestField};
pub use handles::{
    Admitted, HealthReporter, LATENCY_BUCKETS_S, Load, LoadPublisher, MetricsRegistry, Progress,
    ProgressReporter,
};
pub use output::{Finish, FinishReason, Output, OutputStream};
pub use recent::RecentRequests;
pub use request::{
    ChatInput, GenerateRequest, GuidedDecoding, Input, MAX_CACHE_SALT_BYTES, OutputOptions,
    SamplingOptions, ScorePair, Shared, StopConditions, TokenId,
};
pub use state::EngineState;
pub use transfer::{
    Held, KvAddress, KvBytes, KvCarrier, KvHolds, KvSource, KvTransfers, LocalKvCarrier,
    TransferParams, receiving,
};
