//! [`RawTensor`]: a tensor as stored in a file, of any format.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use candle_core::quantized::k_quants::GgmlType as _;
use genset_backend_common::random::{STEP, mix};
use half::slice::HalfBitsSliceExt as _;
use half::{bf16, f16};

use crate::model::WeightType;

/// A tensor's bytes and their interpretation.
#[derive(Debug, Clone)]
pub(crate) struct RawTensor<'a> {
    /// The name in the file, of the tensor or of the larger one it is part of.
    pub(crate) name: &'a str,
    pub(crate) dtype: WeightType,
    /// Rows first.
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Data<'a>,
    /// The order of the rows.
    pub(crate) rows: RowOrder,
}

/// The source of a tensor's bytes.
#[derive(Debug, Clone)]
pub(crate) enum Data<'a> {
    /// Contiguous in a file; the number of bytes matches type and shape.
    InFile(&'a [u8]),
    /// Converted on demand, row by row, from another form in a file.
    Made {
        rows: Arc<dyn MadeRows + 'a>,
        /// The index of the tensor's first row among them.
        first: usize,
    },
}

/// Rows that are converted from another form in a file. All checks were done before.
pub(crate) trait MadeRows: fmt::Debug + Send + Sync {
    /// The approximate number of file bytes per row.
    fn file_bytes_per_row(&self) -> usize;

    /// Writes row `row`; the number of bytes matches the tensor's type and shape.
    fn make(&self, row: usize, into: &mut [u8]);

    /// The form's name, for people.
    fn form(&self) -> &'static str;
}

/// The order of the rows of a query or key projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// The model's order: a row that rotates is half a head away from its partner.
    Halves,
    /// Heads in another order.
    Heads(HeadRows),
    /// Every `n`th row of the file; the rows between belong to another tensor (gpt-oss alternates rows of two projections).
    Every(usize),
}

/// The order of the rows of a head in a file. Rotated rows come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeadRows {
    /// Rows per head.
    pub(crate) head_dim: usize,
    /// Rotated rows, at most `head_dim`.
    pub(crate) rotary_dim: usize,
    /// Whether rows `2j` and `2j + 1` are partners (GGUF files of Llama models), instead of `j` and `j + rotary_dim / 2`.
    pub(crate) is_paired: bool,
}

impl HeadRows {
    /// The row order of a tensor with such heads.
    pub(crate) fn order(self) -> RowOrder {
        if self.is_paired || self.rotary_dim < self.head_dim {
            RowOrder::Heads(self)
        } else {
            RowOrder::Halves
        }
    }

    /// The row in a file's head of row `within` of the model's head.
    fn source(self, within: usize) -> usize {
        let (half, turning) = (self.head_dim / 2, self.rotary_dim / 2);
        let (second, pair) = (within / half, within % half);
        if pair >= turning {
            self.rotary_dim + second * (half - turning) + pair - turning
        } else if self.is_paired {
            2 * pair + second
        } else {
            second * turning + pair
        }
    }
}

impl RowOrder {
    /// The row in the file of row `row` of the model.
    pub(crate) fn source(self, row: usize) -> usize {
        match self {
            Self::Halves => row,
            Self::Heads(rows) => {
                row / rows.head_dim * rows.head_dim + rows.source(row % rows.head_dim)
            }
            Self::Every(step) => row * step,
        }
    }
}

impl<'a> RawTensor<'a> {
    /// The part of the tensor that starts at row `first` and has every `step`th row, with the given `shape`. In a vector, rows are
    /// single numbers. Rows past the end are left out, which shows in the shape.
    pub(crate) fn part(self, first: usize, shape: &[usize], step: usize) -> Self {
        let (rows, row_len) = match shape {
            [rows] => (*rows, 1),
            [.., row_len] if Some(row_len) == self.shape.last() => {
                (shape.iter().rev().skip(1).product(), *row_len)
            }
            _ => return self,
        };
        let all_rows = self.elements().checked_div(row_len).unwrap_or(0);
        // From the first to past the last.
        let span = rows
            .saturating_sub(1)
            .saturating_mul(step)
            .saturating_add(1);
        if rows == 0 || first.saturating_add(span) > all_rows {
            return self;
        }
        let data = match self.data {
            Data::InFile(bytes) => {
                let row_bytes = bytes_of(self.dtype, row_len).unwrap_or(0);
                let range =
                    first.saturating_mul(row_bytes)..(first + span).saturating_mul(row_bytes);
                Data::InFile(bytes.get(range).unwrap_or_default())
            }
            Data::Made {
                rows,
                first: before,
            } => Data::Made {
                rows,
                first: before + first,
            },
        };
        Self {
            shape: shape.to_vec(),
            data,
            ..self
        }
    }

    /// The number of elements.
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements per row. A vector is a column with rows of one element, so that its elements are reordered like rows.
    pub(crate) fn row_len(&self) -> usize {
        if self.shape.len() < 2 {
            1
        } else {
            self.shape.last().copied().unwrap_or(1)
        }
    }

    /// The number of rows.
    pub(crate) fn num_rows(&self) -> usize {
        self.elements() / self.row_len().max(1)
    }

    /// The number of bytes to read from the file.
    pub(crate) fn file_bytes(&self) -> usize {
        match &self.data {
            Data::InFile(_) => bytes_of(self.dtype, self.elements()).unwrap_or(0),
            Data::Made { rows, .. } => self.num_rows().saturating_mul(rows.file_bytes_per_row()),
        }
    }

    /// The name, for people, of its form in the file, if that is a packed one.
    pub(crate) fn form(&self) -> Option<&'static str> {
        match &self.data {
            Data::InFile(_) => None,
            Data::Made { rows, .. } => Some(rows.form()),
        }
    }

    /// All bytes, if they are contiguous in the file in the model's order.
    pub(crate) fn in_place(&self) -> Option<&'a [u8]> {
        match (&self.data, self.rows) {
            (Data::InFile(bytes), RowOrder::Halves) => Some(bytes),
            (Data::InFile(_) | Data::Made { .. }, _) => None,
        }
    }

    /// The bytes of a row. `row` must be less than the number of rows.
    pub(crate) fn row(&self, row: usize) -> Cow<'_, [u8]> {
        let bytes = bytes_of(self.dtype, self.row_len()).unwrap_or(0);
        let source = self.rows.source(row);
        match &self.data {
            Data::InFile(data) => {
                let start = source * bytes;
                Cow::Borrowed(data.get(start..start + bytes).unwrap_or_default())
            }
            Data::Made { rows, first } => {
                let mut made = vec![0; bytes];
                rows.make(first + source, &mut made);
                Cow::Owned(made)
            }
        }
    }

    /// Reads a row's numbers into `into`, which must have the row's length. Only for types that are not quantized.
    pub(crate) fn read_row(&self, row: usize, into: &mut [f32]) {
        read_floats(self.dtype, &self.row(row), into);
    }
}

/// The bytes of `elements`; `None` if the type cannot store that number, or it overflows.
pub(crate) fn bytes_of(dtype: WeightType, elements: usize) -> Option<usize> {
    let block = dtype.block_size();
    if !elements.is_multiple_of(block) {
        return None;
    }
    (elements / block).checked_mul(dtype.type_size())
}

/// A number that identifies bytes, the same on every machine. It continues from the number `before`. Not for secrets.
pub(crate) fn digest(before: u64, bytes: &[u8]) -> u64 {
    let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let next = |digest: u64, word: u64| mix(digest.wrapping_add(STEP) ^ word);
    let words = words.iter().chain([&last]);
    words.fold(next(before, length), |digest, word| {
        next(digest, u64::from_le_bytes(*word))
    })
}

/// Converts the numbers of a file, as many as `into` holds. Only for types that are not quantized.
pub(crate) fn read_floats(dtype: WeightType, bytes: &[u8], into: &mut [f32]) {
    if dtype == WeightType::F32 {
        for (value, bytes) in into.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *value = f32::from_le_bytes(*bytes);
        }
        return;
    }
    /// Numbers that are copied at a time: `half` converts aligned slices.
    const PART: usize = 512;
    let mut aligned = [0u16; PART];
    let (pairs, _) = bytes.as_chunks::<2>();
    for (into, pairs) in into.chunks_mut(PART).zip(pairs.chunks(PART)) {
        let len = into.len().min(pairs.len());
        let (into, halves) = (&mut into[..len], &mut aligned[..len]);
        bytemuck::cast_slice_mut(halves).copy_from_slice(pairs[..len].as_flattened());
        if cfg!(target_endian = "big") {
            halves.iter_mut().for_each(|half| *half = half.swap_bytes());
        }
        // Candle's conversions are `half`'s, compiled with candle: those of `half` are inlined here, and slow in a test build.
        if dtype == WeightType::F16 {
            f16::to_float(halves.reinterpret_cast(), into);
        } else {
            bf16::to_float(halves.reinterpret_cast(), into);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_read_from_any_address() {
        let numbers: Vec<f32> = (0..1300u16).map(|number| f32::from(number) / 8.0).collect();
        let f16s = numbers.iter().map(|n| f16::from_f32(*n).to_le_bytes());
        let f16s: Vec<u8> = f16s.flatten().collect();
        let bf16s = numbers.iter().map(|n| bf16::from_f32(*n).to_le_bytes());
        let bf16s: Vec<u8> = bf16s.flatten().collect();
        for start in 0..3 {
            let shifted = |bytes: &[u8]| [&vec![0; start], bytes].concat();
            let mut into = vec![f32::NAN; 1300];
            read_floats(WeightType::F16, &shifted(&f16s)[start..], &mut into);
            let rounded = numbers.iter().map(|n| f16::from_f32(*n).to_f32());
            assert_eq!(into, rounded.collect::<Vec<_>>());
            read_floats(WeightType::BF16, &shifted(&bf16s)[start..], &mut into);
            let rounded = numbers.iter().map(|n| bf16::from_f32(*n).to_f32());
            assert_eq!(into, rounded.collect::<Vec<_>>());
        }
    }

    #[test]
    fn rows_have_the_orders_of_files() {
        let order = |rotary_dim, is_paired| HeadRows {
            head_dim: 6,
            rotary_dim,
            is_paired,
        };
        let sources =
            |order: RowOrder| -> Vec<usize> { (0..12).map(|row| order.source(row)).collect() };
        let paired = order(6, true).order();
        assert_eq!(sources(paired), [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        let partial = order(4, false).order();
        assert_eq!(sources(partial), [0, 1, 4, 2, 3, 5, 6, 7, 10, 8, 9, 11]);
        let both = order(4, true).order();
        assert_eq!(sources(both), [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        assert_eq!(order(6, false).order(), RowOrder::Halves);
    }
}
