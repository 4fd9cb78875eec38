//! Quantizes floats of a file to blocks, rows in parallel and without an f32 copy of the whole matrix.

use candle_core::quantized::k_quants::{
    BlockQ4_0, BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0, GgmlType,
};
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use rayon::prelude::*;

use super::tensors::RawTensor;
use crate::error::LoadError;

genset_backend_common::named! {
    /// What matrices of floats become when they are loaded for the CPU.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum Quantization: FromStr {
        /// They stay f32: exact, and four times the memory and time of `Q8_0`.
        None = "none",
        /// 8.5 bits a weight.
        #[default]
        Q8_0 = "q8_0",
        /// 6.6 bits a weight.
        Q6K = "q6_k",
        /// 5.5 bits a weight; embedding and output matrix get `Q6K`.
        Q5K = "q5_k",
        /// 4.5 bits a weight; embedding and output matrix get `Q6K`.
        Q4K = "q4_k",
        /// 4.5 bits a weight, for comparison with files of that type.
        Q4_0 = "q4_0",
    }
}

impl Quantization {
    /// The type for a matrix with rows of `row_len`: the requested one, or the next whose blocks divide the row.
    pub(crate) fn dtype_for(self, row_len: usize, part: Part) -> GgmlDType {
        let wanted = match (self, part) {
            (Self::None, _) | (_, Part::Router) => GgmlDType::F32,
            (Self::Q8_0, _) => GgmlDType::Q8_0,
            (Self::Q6K, _) | (Self::Q5K | Self::Q4K, Part::Vocabulary) => GgmlDType::Q6K,
            (Self::Q5K, Part::Layer) => GgmlDType::Q5K,
            (Self::Q4K, Part::Layer) => GgmlDType::Q4K,
            (Self::Q4_0, _) => GgmlDType::Q4_0,
        };
        [wanted, GgmlDType::Q8_0]
            .into_iter()
            .find(|dtype| row_len.is_multiple_of(dtype.block_size()))
            .unwrap_or(GgmlDType::F32)
    }
}

/// The part of the model that uses a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// In a decoder block.
    Layer,
    /// Token embedding or output matrix, where errors have the largest effect.
    Vocabulary,
    /// The router of experts: small, and rounding would change its choices.
    Router,
}

/// Converts a matrix of floats, `[rows, row_len]`, to `dtype`, whose block size must divide the row.
///
/// # Errors
/// `dtype` cannot be written.
pub(crate) fn quantize(raw: &RawTensor<'_>, dtype: GgmlDType) -> Result<QTensor, LoadError> {
    let storage = if dtype == GgmlDType::Q8_0 {
        blocks::<BlockQ8_0>(raw)
    } else if dtype == GgmlDType::Q6K {
        blocks::<BlockQ6K>(raw)
    } else if dtype == GgmlDType::Q5K {
        blocks::<BlockQ5K>(raw)
    } else if dtype == GgmlDType::Q4K {
        blocks::<BlockQ4K>(raw)
    } else if dtype == GgmlDType::Q4_0 {
        blocks::<BlockQ4_0>(raw)
    } else {
        let problem = candle_core::Error::Msg(format!("weights are not converted to {dtype:?}"));
        return Err(LoadError::candle(raw.name, problem));
    };
    QTensor::new(storage, raw.shape.as_slice()).map_err(|error| LoadError::candle(raw.name, error))
}

fn blocks<B: GgmlType + 'static>(raw: &RawTensor<'_>) -> QStorage {
    let row_len = raw.row_len().max(B::BLCK_SIZE);
    let mut blocks = vec![B::zeros(); raw.elements() / B::BLCK_SIZE];
    blocks
        .par_chunks_mut(row_len / B::BLCK_SIZE)
        .enumerate()
        .for_each_init(
            || vec![0.0; row_len],
            |values, (row, blocks)| {
                raw.read_row(row, values);
                B::from_float(values, blocks);
            },
        );
    QStorage::Cpu(Box::new(blocks))
}

/// All numbers of a tensor of floats, rows in the model's order.
pub(crate) fn floats(raw: &RawTensor<'_>) -> Vec<f32> {
    let mut values = vec![0.0; raw.elements()];
    values
        .par_chunks_mut(raw.row_len().max(1))
        .with_min_len(MIN_ROWS)
        .enumerate()
        .for_each(|(row, values)| raw.read_row(row, values));
    values
}

/// The fewest rows per thread, since rows of a vector have one number.
pub(super) const MIN_ROWS: usize = 64;
