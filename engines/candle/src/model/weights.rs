//! The source of the decoder's weights: [`Weights`], which `load` implements for safetensors and GGUF files.

use candle_core::{Device, Tensor};

use crate::error::LoadError;
use crate::model::linear::Matrix;

/// Tensors by their names in `transformers`' checkpoints (`model.layers.0.self_attn.q_proj.weight`), whatever the file's names
/// are. The decoder requests each once, in order, so that loading can report progress.
pub trait Weights {
    /// The device of the tensors.
    fn device(&self) -> &Device;

    /// A vector or a small tensor (norm weights, biases), in f32 on the CPU, in the compute type on a GPU.
    ///
    /// # Errors
    /// The tensor is missing, has another shape, or cannot be read.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, LoadError>;

    /// The matrix of a product, `[out_features, in_features]`, or the token embedding, `[vocab_size, hidden_size]`, which is a
    /// lookup table and in tied models also the output matrix. It is quantized if the loader decides so.
    ///
    /// # Errors
    /// As for `tensor`.
    fn matrix(
        &mut self,
        name: &str,
        out_features: usize,
        in_features: usize,
    ) -> Result<Matrix, LoadError>;
}
