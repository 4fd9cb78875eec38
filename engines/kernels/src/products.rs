//! Products of rows with a matrix of weights.
//!
//! Matrices are repacked into tiles of sixteen rows (`packed`), of f32 (`dense`) or of quantized blocks (`quantized`); `activations`
//! is the form of the other factor. The kernels compute the same bits of a row for any number of rows, so that a sequence's answer
//! does not depend on its neighbours in the batch.

mod activations;
mod dense;
mod packed;
mod quantized;

pub use self::activations::{ActivationBits, choose_activation_bits};
pub use self::packed::{PackedMatrix, product, product_of};
pub use self::quantized::BlockType;
