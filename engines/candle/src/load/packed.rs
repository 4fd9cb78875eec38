//! Weights that a checkout has in a form of its own: int4 of GPTQ, AWQ and compressed-tensors, FP8, and gpt-oss's experts.
//!
//! [`Scheme`] is what `quantization_config` says of them. [`Scheme::tensor`] finds what belongs to a matrix, checks it, and
//! gives a tensor whose rows are made as they are asked for, in a type that the engine computes with. So a matrix is
//! converted alone, and never lies in memory in two forms as a whole. Nothing here computes with a model.

mod config;
mod experts;
mod fp8;
mod int4;
mod stored;

use self::int4::Packing;
use super::safetensors::SafetensorsFolder;
use super::tensors::RawTensor;
use crate::error::LoadError;

pub(crate) use self::config::read;

/// How a checkout has the weights that are not plain floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// Four bits with a scale and a zero for each group of columns of a row.
    Int4 {
        packing: Packing,
        /// Columns of a group; `None` where a row is one group.
        group_size: Option<usize>,
    },
    /// Floats of eight bits, of which four are the exponent.
    Fp8 {
        /// Rows and columns that share a scale, where there is one for each such block.
        block: [usize; 2],
    },
    /// gpt-oss's experts in floats of four bits.
    Mxfp4Experts,
    /// gpt-oss's experts in plain floats, but columns first.
    TransposedExperts,
}

impl Scheme {
    /// The tensor that the checkout would call `name` if it were plain.
    ///
    /// # Errors
    /// A tensor that belongs to it is missing, has another type or shape, or holds what makes no sense.
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
