//! gpt-oss's experts: one tensor per layer has all of them, in blocks of four-bit floats (MXFP4), or in plain floats with
//! columns first.
//!
//! # Source
//! `transformers`' `convert_moe_packed_tensors` and `GptOssExperts`; the blocks of ggml's `block_mxfp4`.

use std::sync::Arc;

use safetensors::Dtype;

use super::stored::{check_shape, required};
use crate::error::LoadError;
use crate::load::TensorFiles;
use crate::load::safetensors::{SafetensorsFolder, Stored, float_dtype};
use crate::load::tensors::{Data, MadeRows, RawTensor, RowOrder};
use crate::model::WeightType;

/// Bytes of a block's values in a checkout; each byte has two of its 32 columns.
const VALUES: usize = 16;
/// Bytes of a block in the engine: a scale before the values.
const BLOCK: usize = 1 + VALUES;

/// The tensor of matrices of that name, `[experts, rows, columns]`, if the checkout has `_blocks`,
/// `[experts, rows, columns / 32, 16]`, and `_scales`, `[experts, rows, columns / 32]`.
///
/// # Errors
/// One of the two is missing, or has another type or shape.
pub(super) fn mxfp4<'a>(
    folder: &'a SafetensorsFolder,
    name: &str,
) -> Result<Option<RawTensor<'a>>, LoadError> {
    let Some(blocks) = folder.stored(&format!("{name}_blocks")) else {
        return Ok(None);
    };
    // In an empty tensor, the other sizes may be too large to multiply.
    let is_empty = blocks.shape.contains(&0);
    let &[experts, rows, row_blocks, VALUES] = blocks.shape else {
        return Err(no_blocks(folder, &blocks));
    };
    if is_empty {
        return Err(no_blocks(folder, &blocks));
    }
    let scales = required(folder, &format!("{name}_scales"))?;
    check_shape(folder, &scales, &[experts, rows, row_blocks])?;
    for stored in [&blocks, &scales] {
        if stored.dtype != Dtype::U8 {
            return Err(folder.wrong_dtype(stored, "U8 where they are MXFP4"));
        }
    }
    Ok(Some(RawTensor {
        name: blocks.name,
        dtype: WeightType::Mxfp4,
        shape: vec![experts, rows, row_blocks * 2 * VALUES],
        data: Data::Made {
            rows: Arc::new(Mxfp4 {
                blocks: blocks.data.as_chunks().0,
                scales: scales.data,
                row_blocks,
            }),
            first: 0,
        },
        rows: RowOrder::Halves,
    }))
}

fn no_blocks(folder: &SafetensorsFolder, stored: &Stored<'_>) -> LoadError {
    let (name, shape) = (stored.name, stored.shape);
    let problem = format!("tensor {name} is {shape:?}, no blocks of {VALUES} bytes");
    LoadError::broken(folder.path(), problem)
}

#[derive(Debug)]
struct Mxfp4<'a> {
    blocks: &'a [[u8; VALUES]],
    scales: &'a [u8],
    /// Blocks per row.
    row_blocks: usize,
}

impl MadeRows for Mxfp4<'_> {
    fn file_bytes_per_row(&self) -> usize {
        self.row_blocks * BLOCK
    }

    fn make(&self, row: usize, into: &mut [u8]) {
        let range = row * self.row_blocks..(row + 1) * self.row_blocks;
        let blocks = self.blocks.get(range.clone()).unwrap_or_default();
        let scales = self.scales.get(range).unwrap_or_default();
        let into = into.as_chunks_mut::<BLOCK>().0.iter_mut();
        for ((block, scale), into) in blocks.iter().zip(scales).zip(into) {
            let [first, values @ ..] = into;
            *first = *scale;
            pair_halves(block, values);
        }
    }

    fn form(&self) -> &'static str {
        "MXFP4"
    }
}

/// Converts bytes of two adjacent columns to bytes of two columns half a block apart.
fn pair_halves(block: &[u8; VALUES], into: &mut [u8; VALUES]) {
    let column = |column: usize| (block[column / 2] >> (column % 2 * 4)) & 15;
    for (at, into) in into.iter_mut().enumerate() {
        *into = column(at) | column(at + VALUES) << 4;
    }
}

/// The tensor of matrices of that name, `[experts, rows, columns]`, if the checkout has it as floats, `[experts, columns, rows]`.
///
/// # Errors
/// The tensor is not of plain floats.
pub(super) fn transposed<'a>(
    folder: &'a SafetensorsFolder,
    name: &str,
) -> Result<Option<RawTensor<'a>>, LoadError> {
    let is_experts = [".experts.gate_up_proj", ".experts.down_proj"]
        .iter()
        .any(|module| name.ends_with(module));
    let stored = folder.stored(name).filter(|_| is_experts);
    let Some(stored) = stored else {
        return Ok(None);
    };
    let Some(dtype) = float_dtype(stored.dtype) else {
        return Err(folder.wrong_dtype(&stored, "F32, F16 or BF16"));
    };
    let &[experts, columns, rows] = stored.shape else {
        return Ok(None);
    };
    if stored.shape.contains(&0) {
        return Ok(None);
    }
    Ok(Some(RawTensor {
        name: stored.name,
        dtype,
        shape: vec![experts, rows, columns],
        data: Data::Made {
            rows: Arc::new(Transposed {
                data: stored.data,
                rows,
                columns,
                bytes: dtype.type_size(),
            }),
            first: 0,
        },
        rows: RowOrder::Halves,
    }))
}

#[derive(Debug)]
struct Transposed<'a> {
    data: &'a [u8],
    /// Rows of one expert, above 0.
    rows: usize,
    columns: usize,
    /// Bytes per number.
    bytes: usize,
}

impl MadeRows for Transposed<'_> {
    fn file_bytes_per_row(&self) -> usize {
        self.columns * self.bytes
    }

    fn make(&self, row: usize, into: &mut [u8]) {
        let (expert, within) = (row / self.rows, row % self.rows);
        for (column, into) in into.chunks_exact_mut(self.bytes).enumerate() {
            let at = ((expert * self.columns + column) * self.rows + within) * self.bytes;
            if let Some(number) = self.data.get(at..at + self.bytes) {
                into.copy_from_slice(number);
            }
        }
    }

    fn form(&self) -> &'static str {
        "columns first"
    }
}
