//! Language models on CPU and CUDA: continuous batching, paged KV, prefix reuse.
//!
//! [`CandleEngine`] serves one decoder-only model (Llama, Mistral, Qwen, Gemma and their kin) from a checkout folder or a GGUF
//! file, without Python. Requests run together from step to step: prompts in chunks beside the tokens of others, in KV
//! blocks that equal prefixes share. [`EmbeddingEngine`] makes vectors of texts with an encoder or a decoder.
//!
//! | module | what |
//! | --- | --- |
//! | [`engine`](CandleEngine) | the thread that joins scheduler, model and sampler |
//! | [`embedding`](EmbeddingEngine) | the thread that packs inputs and has them embedded |
//! | [`model`] | the decoder: packed tokens to logits, on KV blocks; encoders: packed tokens to vectors |
//! | [`load`] | files to weights |
//!
//! Which tokens are computed when is `genset-scheduler`'s; how one is chosen from logits is `genset-sampling`'s.
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
mod control_groups;
mod cores;
mod embedding;
mod engine;
pub mod error;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod load;
pub mod model;

pub use args::{
    ActivationBits, ByteSize, CandleArgs, DeviceChoice, DtypeChoice, IsaChoice, SpeculateChoice,
    SpeculationArgs,
};
pub use cores::default_threads;
pub use embedding::EmbeddingEngine;
pub use engine::CandleEngine;
