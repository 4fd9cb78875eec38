//! The kernels of language models for the CPU: products with weights, attention over KV blocks, and what lies between them.
//!
//! The crate works on plain slices. It knows no tensors, files or requests: an engine owns the model and calls one kernel after
//! another. A kernel runs on several threads if its work is large enough, with the widest instructions that this processor has,
//! which it finds out at run time.
//!
//! | module | contents |
//! | --- | --- |
//! | `products` | [`PackedMatrix`]: weights in f32 or in quantized blocks ([`BlockType`]); [`product`] multiplies rows with several |
//! | `attention` | [`attend`] and what comes before it: [`store_keys_and_values`], [`prepared_queries`] |
//! | `kv` | [`HostKv`]: keys and values in KV blocks |
//! | `rope` | [`Turns`]: rotary position embedding |
//! | `norm`, `layer_norm` | [`normed_rows`], [`added_and_normed_rows`], [`layer_normed_rows`] |
//! | `gate`, `activation` | [`gate_rows`], [`activated_numbers`]: activations of feed-forward blocks |
//! | `parallel` | [`for_each_range_if_large`]: the one parallel loop, and the threads that run it |
//! | `simd` | instructions, chosen once per process ([`choose_isa`]), and vector code for all of them |
//! | `memory` | [`WeightMemory`]: weights on huge pages |
//! | `probe` | [`MemoryProbe`]: what is read to find out how fast memory is |
//!
//! Matrices are row by row; a shape such as `[rows, columns]` names the slowest dimension first. Numbers are f32, unless a type
//! says otherwise.
//!
//! # Invariant
//! What is computed of a row depends on that row, and in attention on its own sequence, bit for bit: not on the rows beside it, the
//! KV blocks it got, or the number of threads.
//!
//! # Examples
//! ```
//! use genset_kernels::{BlockType, PackedMatrix, WeightMemory, product, quantized_kernels};
//!
//! // Two rows of 32 weights, each a block: the scale 0.5 as f16, then 32 integers.
//! let mut blocks = Vec::<u8>::new();
//! for weight in [1, 2] {
//!     blocks.extend([0x00, 0x38]);
//!     blocks.extend([weight; 32]);
//! }
//! let mut memory = WeightMemory::default();
//! // Without AVX2 and NEON there are no kernels for quantized weights.
//! if let Some(kernels) = quantized_kernels() {
//!     let matrix =
//!         PackedMatrix::quantized(kernels, BlockType::Q8_0, &blocks, (2, 32), &mut memory)?;
//!     let parts: Vec<&PackedMatrix> = matrix.iter().collect();
//!     assert_eq!(product(&parts, None, &[127.0; 32], 1), [2032.0, 4064.0]);
//! }
//! # Ok::<(), std::io::Error>(())
//! ```

mod activation;
mod attention;
mod gate;
mod kv;
mod layer_norm;
mod memory;
mod norm;
mod parallel;
mod probe;
mod products;
mod rope;
mod simd;

pub use activation::{Nonlinearity, activated_numbers};
pub use attention::{
    AttentionHeads, Direction, HeadNorm, Projections, SequenceRows, attend, prepared_queries,
    store_keys_and_values,
};
pub use gate::{Activation, gate_rows};
pub use kv::{HostKv, HostLayer, KvNumbers, KvShape};
pub use layer_norm::layer_normed_rows;
pub use memory::WeightMemory;
pub use norm::{added_and_normed_rows, normed_rows};
pub use parallel::{SharedMut, for_each_range_if_large, num_threads};
pub use probe::MemoryProbe;
pub use products::{
    ActivationBits, BlockType, PackedMatrix, choose_activation_bits, product, product_of,
};
pub use rope::Turns;
pub use simd::{IsaChoice, LANES, QuantizedKernels, choose_isa, isa_name, quantized_kernels};
