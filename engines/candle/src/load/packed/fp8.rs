//! Matrices of eight-bit floats (E4M3), with one scale per matrix, per row, or per block of rows and columns.
//!
//! Their rows become f32, which `--quantize` treats like any floats. The weights are exactly the checkout's. Other engines also
//! round activations to eight bits; here they stay as they are.
//!
//! # Source
//! "FP8 Formats for Deep Learning" (Micikevicius et al. 2022). Scales as in DeepSeek-V3 (`weight_scale_inv`, which is a factor
//! despite its name) and compressed-tensors (`weight_scale`).

use std::sync::Arc;

use safetensors::Dtype;

use super::stored::{Floats, check_shape, required};
use crate::error::LoadError;
use crate::load::safetensors::SafetensorsFolder;
use crate::load::tensors::{Data, MadeRows, RawTensor, RowOrder};
use crate::model::WeightType;

/// The number of each byte.
const NUMBERS: [f32; 256] = {
    let mut numbers = [0.0; 256];
    let mut byte = 0u8;
    loop {
        numbers[byte as usize] = number(byte);
        if byte == u8::MAX {
            break numbers;
        }
        byte += 1;
    }
};

/// One sign bit, four bits of exponent, three of mantissa; no infinities.
const fn number(byte: u8) -> f32 {
    let (exponent, rest) = ((byte >> 3) & 15, byte & 7);
    let size = if byte & 127 == 127 {
        f32::NAN
    } else if exponent == 0 {
        rest as f32 / 512.0
    } else {
        f32::from_bits((exponent as u32 + 120) << 23 | (rest as u32) << 20)
    };
    if byte >= 128 { -size } else { size }
}

/// The matrix of that name, if it is FP8; `block` is the number of rows and columns that share a scale, if scales are per block.
///
/// # Errors
/// Its scales are missing, or have another type or shape.
pub(super) fn tensor<'a>(
    folder: &'a SafetensorsFolder,
    name: &str,
    block: [usize; 2],
) -> Result<Option<RawTensor<'a>>, LoadError> {
    let Some(codes) = folder.stored(name) else {
        return Ok(None);
    };
    let &[rows, columns] = codes.shape else {
        return Ok(None);
    };
    if codes.dtype != Dtype::F8_E4M3 || codes.shape.contains(&0) {
        return Ok(None);
    }
    let inverse = format!("{name}_scale_inv");
    let scales = match folder.stored(&inverse) {
        Some(scales) => scales,
        None => required(folder, &format!("{name}_scale"))?,
    };
    let [block_rows, block_columns] = block;
    let of_blocks = [rows.div_ceil(block_rows), columns.div_ceil(block_columns)];
    let share = match *scales.shape {
        [] | [1] => [rows, columns],
        [each] | [each, 1] if each == rows => [1, columns],
        [1, 1] => [rows, columns],
        _ => {
            check_shape(folder, &scales, &of_blocks)?;
            block
        }
    };
    let [share_rows, share_columns] = share;
    let fp8 = Fp8 {
        codes: codes.data,
        columns,
        scales: Floats::try_new(folder, &scales)?,
        share_rows: share_rows.max(1),
        share_columns: share_columns.max(1),
    };
    Ok(Some(RawTensor {
        name: codes.name,
        dtype: WeightType::F32,
        shape: vec![rows, columns],
        data: Data::Made {
            rows: Arc::new(fp8),
            first: 0,
        },
        rows: RowOrder::Halves,
    }))
}

#[derive(Debug)]
struct Fp8<'a> {
    /// `[rows, columns]`.
    codes: &'a [u8],
    columns: usize,
    scales: Floats<'a>,
    /// Rows and columns that share a scale.
    share_rows: usize,
    share_columns: usize,
}

impl MadeRows for Fp8<'_> {
    fn file_bytes_per_row(&self) -> usize {
        self.columns
    }

    fn make(&self, row: usize, into: &mut [u8]) {
        let start = row * self.columns;
        let codes = self.codes.get(start..start + self.columns);
        let first_scale = row / self.share_rows * self.columns.div_ceil(self.share_columns);
        let parts = codes.unwrap_or_default().chunks(self.share_columns);
        let into = into.as_chunks_mut::<4>().0.chunks_mut(self.share_columns);
        for (part, (codes, into)) in parts.zip(into).enumerate() {
            let scale = self.scales.get(first_scale + part);
            for (code, into) in codes.iter().zip(into) {
                *into = (NUMBERS[usize::from(*code)] * scale).to_le_bytes();
            }
        }
    }

    fn form(&self) -> &'static str {
        "FP8"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_the_numbers_of_e4m3() {
        let known = [
            (0x00, 0.0),
            (0x01, 0.001_953_125),
            (0x07, 0.013_671_875),
            (0x08, 0.015_625),
            (0x38, 1.0),
            (0x39, 1.125),
            (0x7E, 448.0),
            (0xB8, -1.0),
            (0xFE, -448.0),
        ];
        for (byte, number) in known {
            assert_eq!(NUMBERS[byte], number, "{byte:#x}");
        }
        assert!(NUMBERS[0x7F].is_nan() && NUMBERS[0xFF].is_nan());
    }
}
