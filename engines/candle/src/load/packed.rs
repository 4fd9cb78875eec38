//! Weights in packed formats of checkouts: int4 of GPTQ, AWQ and compressed-tensors, FP8, and gpt-oss's experts.
//!
//! [`Scheme`] is the content of `quantization_config`. [`Scheme::tensor`] finds and checks the tensors of a matrix, and returns
//! a tensor that converts its rows on demand to a type that the engine computes with. So matrices are converted one at a
//! time, and none is in memory as a whole in two forms. This module computes nothing with a model.

mod config;
mod experts;
mod fp8;
mod int4;
mod stored;

use self::int4::Packing;
use super::TensorFiles;
use super::safetensors::SafetensorsFolder;
use super::tensors::RawTensor;
use crate::error::LoadError;

pub(crate) use self::config::read;

/// The packing of weights that are not plain floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// Four bits, with a scale and a zero point for each group of columns of a row.
    Int4 {
        packing: Packing,
        /// Columns per group; `None` if a row is one group.
        group_size: Option<usize>,
    },
    /// Eight-bit floats with four bits of exponent.
    Fp8 {
        /// Rows and columns that share a scale, if scales are per block.
        block: [usize; 2],
    },
    /// gpt-oss's experts in four-bit floats.
    Mxfp4Experts,
    /// gpt-oss's experts in plain floats, with columns first.
    TransposedExperts,
}

impl Scheme {
    /// The tensor that the checkout would call `name` if it were not packed.
    ///
    /// # Errors
    /// A required tensor is missing, has another type or shape, or has invalid content.
    pub(crate) fn tensor<'a>(
        &self,
        folder: &'a SafetensorsFolder,
        name: &str,
    ) -> Result<Option<RawTensor<'a>>, LoadError> {
        let packed = match *self {
            Self::Int4 {
                packing,
                group_size,
            } => int4::tensor(folder, name, packing, group_size)?,
            Self::Fp8 { block } => fp8::tensor(folder, name, block)?,
            Self::Mxfp4Experts => experts::mxfp4(folder, name)?,
            Self::TransposedExperts => experts::transposed(folder, name)?,
        };
        match packed {
            Some(packed) => Ok(Some(packed)),
            None => folder.tensor(name),
        }
    }
}
