//! The decoder-only language model: from packed tokens to logits.
//!
//! One block type covers Llama 2 and 3, Mistral, Ministral 3, TinyLlama, SmolLM 1 to 3, Qwen2, Qwen3, Gemma 2 and 3, Phi-3 and
//! 4, OLMo 2 and 3, GLM-4, Granite, StarCoder2, Cohere 2, EXAONE 4, Hunyuan, Seed-OSS, Ernie, and with experts Mixtral, OLMoE,
//! Granite, Qwen2-MoE and Qwen3-MoE; [`ModelConfig`] selects the variant. A step's rows belong to many sequences, with prefill
//! chunks and decode rows mixed, without padding; keys and values are in KV blocks. The module knows no requests, sampling or
//! files: `engine` calls [`Model::forward`], and `load` implements [`Weights`].
//!
//! | module | contents |
//! | --- | --- |
//! | `config`, `weights` | the configuration of a model, and the source of its weights |
//! | `batch` | the rows of one step |
//! | `kv_cache` | keys and values in KV blocks |
//! | `decoder` | embedding, layers, logits |
//! | `encoder` | the other kind of model: one vector per token, where each token attends to all others |
//! | `embedder` | one vector per sequence, by an encoder or a decoder |
//! | `linear` | products with weights, quantized or not |
//! | `lora` | what adapters add to these products |
//! | `attention` | attention over KV blocks |
//! | `norm`, `rope`, `feed_forward`, `experts` | the other parts of a layer |
//! | `host` | tensors in main memory as slices, for the kernels in the crate `genset_kernels` |
//! | `gpu`, `kernels`, `graphs` | GPU support: opening devices, our own kernels, steps queued as a whole |
//!
//! # Invariant
//! On the CPU a row's logits depend only on its own sequence's tokens and its adapter, bit for bit: not on the step's other
//! rows, on how a prompt was cut into chunks, or on its KV blocks.

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
mod norm;
mod rope;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod weights;

pub use batch::{BatchError, Piece, SequenceRows, StepBatch};
pub use config::{
    Activation, BlockNorms, Experts, ModelConfig, NormKind, QueryGrowth, QueryKeyNorm, Rope,
    RopeScaling, SlidingWindow,
};
pub use decoder::{ForwardError, Model, ProductTime, SlowMatrix};
pub use embedder::BackboneConfig;
pub use embedder::head::{HeadConfig, HeadStep};
pub use embedder::pooling::Pooling;
pub use encoder::config::{EncoderConfig, EncoderFamily, Nonlinearity, Positions};
pub use kv_cache::{KvCache, KvCacheSpec, KvLayout};
pub use linear::{Matrix, WeightType};
pub use lora::{AdapterRows, AdapterTarget, AdapterWeights, Site};
pub use weights::Weights;
