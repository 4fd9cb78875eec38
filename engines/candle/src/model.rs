//! The decoder-only language model: from packed tokens to logits.
//!
//! One block covers Llama 2 and 3, Mistral, TinyLlama, SmolLM 1 to 3, Qwen2, Qwen3, Gemma 2 and 3, Phi-3 and 4, and with experts
//! Mixtral and Qwen3-MoE; [`ModelConfig`] says which.
//! A step's rows belong to many sequences, prefill chunks and decode rows mixed, without padding; keys and values are in
//! KV blocks. It knows no requests, no sampling and no files: `engine` calls [`Model::forward`], `load` implements
//! [`Weights`].
//!
//! | module | what |
//! | --- | --- |
//! | `config`, `weights` | what a model is, and where its weights come from |
//! | `batch` | what one step computes |
//! | `kv_cache` | keys and values in KV blocks |
//! | `decoder` | embedding, layers, logits |
//! | `encoder` | the other kind of model: a vector for each token, which sees all others |
//! | `embedder` | one vector of a sequence's many, by an encoder or a decoder |
//! | `linear` | products with weights, quantized or not |
//! | `lora` | what adapters add to them |
//! | `attention` | attention over KV blocks |
//! | `norm`, `rope`, `feed_forward`, `experts` | the other parts of a layer |
//! | `host`, `parallel`, `simd`, `memory` | what kernels on the CPU stand on |
//! | `gpu`, `kernels`, `graphs` | what a GPU computes with: how it is opened, kernels of our own, steps that are queued as a whole |
//!
//! # Invariant
//! On the CPU a row's logits depend on its own sequence's tokens and its adapter only, bit for bit: not on the other rows of the step,
//! on how a prompt was cut into chunks, or on which KV blocks it got.

mod attention;
mod batch;
pub(crate) mod config;
mod decoder;
pub(crate) mod embedder;
pub(crate) mod encoder;
mod experts;
mod feed_forward;
pub(crate) mod gpu;
#[cfg(feature = "cuda")]
pub(crate) mod graphs;
pub(crate) mod host;
pub(crate) mod kernels;
mod kv_cache;
pub(crate) mod linear;
pub(crate) mod lora;
mod memory;
mod norm;
mod parallel;
mod rope;
pub(crate) mod simd;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod weights;

pub use batch::{BatchError, SequenceRows, StepBatch};
pub use config::{Activation, Experts, ModelConfig, Rope, RopeScaling, SlidingWindow};
pub use decoder::{ForwardError, Model, SlowMatrix};
pub use embedder::BackboneConfig;
pub use embedder::head::{HeadConfig, HeadStep};
pub use embedder::pooling::Pooling;
pub use encoder::config::{EncoderConfig, EncoderFamily, Nonlinearity, Positions};
pub use kv_cache::{KvCache, KvCacheSpec, KvLayout};
pub use linear::{Matrix, WeightType};
pub use lora::{AdapterRows, AdapterTarget, AdapterWeights, Site};
pub use weights::Weights;
