//! Language models on CPU and CUDA: continuous batching, paged KV, prefix reuse.
//!
//! [`CandleEngine`] serves one decoder-only model (Llama, Mistral, Qwen, Gemma and their relatives) from a checkout folder or
//! a GGUF file, without Python. Each step mixes chunks of prompts with the next tokens of other requests, and equal prefixes
//! share KV blocks. [`EmbeddingEngine`] computes vectors of texts with an encoder or a decoder.
//!
//! | module | contents |
//! | --- | --- |
//! | [`engine`](CandleEngine) | the thread that combines scheduler, model and sampler |
//! | [`embedding`](EmbeddingEngine) | the thread that packs inputs and computes their vectors |
//! | [`model`] | the decoder: packed tokens to logits, on KV blocks; encoders: packed tokens to vectors |
//! | [`load`] | files to weights |
//!
//! `genset-scheduler` decides which tokens a step computes; `genset-sampling` chooses tokens from logits.
//!
//! # Examples
//! ```no_run
//! use std::path::Path;
//!
//! use genset_backend_common::{LLMEngine, StartContext};
//! use genset_engine_candle::{CandleArgs, CandleEngine};
//!
//! # async fn serve() -> Result<(), genset_backend_common::EngineError> {
//! let engine = CandleEngine::from_args(&CandleArgs::default(), Path::new("models/tiny-chat"));
//! let config = engine.start(StartContext::detached(1)).await?;
//! println!("{} holds {} KV blocks", config.model, config.kv_total_blocks.unwrap_or(0));
//! # Ok(())
//! # }
//! ```

mod args;
mod cores;
mod embedding;
mod engine;
pub mod error;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod hardware;
pub mod load;
pub mod model;

pub use args::{
    ActivationBits, CandleArgs, DeviceChoice, DtypeChoice, IsaChoice, SpeculateChoice,
    SpeculationArgs,
};
pub use cores::default_threads;
pub use embedding::EmbeddingEngine;
pub use engine::CandleEngine;
pub use hardware::Hardware;
