//! Matrices as tiles of sixteen rows, and the parallel region that multiplies several of them with the same rows.

use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::activations::{ActivationBits, bits, interleave};
use super::dense::{self, Column};
use super::quantized::{BlockType, Int8Rows, QuantizedTiles};
use crate::memory::{Stored, WeightMemory};
use crate::parallel::{SharedMut, for_each_range_if_large, written};
use crate::simd::{LANES, QuantizedKernels};

/// A matrix in the form of the kernels for products.
#[derive(Debug)]
pub struct PackedMatrix {
    tiles: Tiles,
    out_features: usize,
    in_features: usize,
}

enum Tiles {
    Dense(Stored<Column>),
    Quantized(QuantizedTiles),
}

impl std::fmt::Debug for Tiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Dense(_) => "Dense",
            Self::Quantized(_) => "Quantized",
        })
    }
}

impl PackedMatrix {
    /// Packs f32 weights, `[out_features, in_features]`.
    ///
    /// # Errors
    /// The system is out of memory.
    ///
    /// # Panics
    /// There are no columns, or more or fewer weights than the shape says.
    pub fn dense(
        weight: &[f32],
        (out_features, in_features): (usize, usize),
        memory: &mut WeightMemory,
    ) -> io::Result<Self> {
        let tiles = dense::pack(weight, out_features, in_features, memory)?;
        Ok(Self {
            tiles: Tiles::Dense(tiles),
            out_features,
            in_features,
        })
    }

    /// Packs the quantized blocks of weights, `[out_features, in_features]`; `None` if there are none.
    ///
    /// # Errors
    /// The system is out of memory.
    ///
    /// # Panics
    /// A row is not whole blocks, or there are more or fewer than the shape says.
    pub fn quantized(
        kernels: QuantizedKernels,
        block_type: BlockType,
        blocks: &[u8],
        shape: (usize, usize),
        memory: &mut WeightMemory,
    ) -> io::Result<Option<Self>> {
        let (out_features, in_features) = shape;
        let tiles = QuantizedTiles::pack(kernels, block_type, blocks, shape, memory)?;
        Ok(tiles.map(|tiles| Self {
            tiles: Tiles::Quantized(tiles),
            out_features,
            in_features,
        }))
    }

    /// The number of rows, which is the width of a product.
    #[must_use]
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Rows by their indices, in f32, `[ids.len(), in_features]`.
    ///
    /// # Errors
    /// An index is out of range.
    pub fn rows(&self, ids: &[u32]) -> io::Result<Vec<f32>> {
        let mut out = vec![0.0f32; ids.len() * self.in_features];
        for (&id, out) in ids.iter().zip(out.chunks_exact_mut(self.in_features)) {
            let row = id as usize;
            if row >= self.out_features {
                let problem = format!("row {row} of a matrix with {} rows", self.out_features);
                return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
            }
            match &self.tiles {
                Tiles::Dense(columns) => {
                    let tile = &columns[row / LANES * self.in_features..][..self.in_features];
                    for (out, column) in out.iter_mut().zip(tile) {
                        *out = column[row % LANES];
                    }
                }
                Tiles::Quantized(tiles) => tiles.row(row, out),
            }
        }
        Ok(out)
    }

    /// The type of its blocks; `None` for f32.
    #[must_use]
    pub fn block_type(&self) -> Option<BlockType> {
        match &self.tiles {
            Tiles::Dense(_) => None,
            Tiles::Quantized(tiles) => Some(tiles.block_type()),
        }
    }

    /// Whether its numbers are in quantized blocks.
    #[must_use]
    pub fn is_quantized(&self) -> bool {
        self.block_type().is_some()
    }

    /// Bytes of its numbers, which every product reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.tiles {
            Tiles::Dense(columns) => size_of_val(&columns[..]),
            Tiles::Quantized(tiles) => tiles.bytes(),
        }
    }
}

/// The destination of some tiles' columns of a product.
#[derive(Debug)]
pub(super) struct Output<'a> {
    all: &'a SharedMut<'a, MaybeUninit<f32>>,
    /// The row width of the whole product.
    stride: usize,
    /// The columns of these tiles.
    columns: Range<usize>,
    bias: Option<&'a [f32]>,
}

impl Output<'_> {
    /// Writes a tile's sums for rows from `first` on; columns beyond the matrix are dropped.
    #[inline(always)]
    pub(super) fn store_rows<const ROWS: usize>(
        &self,
        tile: usize,
        first: usize,
        sums: &[[f32; LANES]; ROWS],
    ) {
        let start = self.columns.start + tile * LANES;
        let columns = start..(start + LANES).min(self.columns.end);
        for (row, sums) in sums.iter().enumerate() {
            self.store(first + row, columns.clone(), sums);
        }
    }

    #[inline(always)]
    fn store(&self, row: usize, columns: Range<usize>, sums: &[f32; LANES]) {
        let start = row * self.stride + columns.start;
        #[expect(unsafe_code, reason = "threads write disjoint parts of one buffer")]
        // SAFETY: a tile is in only one thread's range, and each has its own columns.
        let out = unsafe { self.all.part(start..start + columns.len()) };
        let sums = match self.bias.map(|bias| &bias[columns]) {
            None => *sums,
            Some(bias) => {
                let mut sums = *sums;
                for (sum, bias) in sums.iter_mut().zip(bias) {
                    *sum += bias;
                }
                sums
            }
        };
        // A whole tile is one vector store instead of a loop.
        match out.first_chunk_mut::<LANES>() {
            Some(out) => write_each(out, &sums),
            None => write_each(out, &sums),
        }
    }
}

/// Writes the first of `sums`, as many as `out` holds.
#[inline(always)]
fn write_each(out: &mut [MaybeUninit<f32>], sums: &[f32]) {
    for (out, sum) in out.iter_mut().zip(sums) {
        out.write(*sum);
    }
}

/// The input in the kernels' forms, made once for all parts.
struct Input {
    int8: Option<Int8Rows>,
    f32: Option<Vec<f32>>,
}

impl Input {
    fn new(
        bits: ActivationBits,
        parts: &[&PackedMatrix],
        x: &[f32],
        rows: usize,
        columns: usize,
    ) -> Self {
        let has_dense = parts.iter().any(|part| !part.is_quantized());
        let has_quantized = parts.iter().any(|part| part.is_quantized());
        Self {
            int8: has_quantized.then(|| Int8Rows::new(bits, x, rows, columns)),
            f32: has_dense.then(|| interleave(x, rows, columns)),
        }
    }
}

/// The products of each of `rows` rows of `x`, `[rows, in_features]`, with all parts, concatenated, plus `bias`:
/// `[rows, sum of out_features]`.
///
/// A row's bits do not depend on the other rows.
///
/// # Panics
/// A part has another number of columns than `x`, or `bias` has fewer numbers than the result has columns.
#[must_use]
pub fn product(parts: &[&PackedMatrix], bias: Option<&[f32]>, x: &[f32], rows: usize) -> Vec<f32> {
    product_of(bits(), parts, bias, x, rows)
}

/// As [`product`], with inputs of quantized parts rounded to these bits.
///
/// # Panics
/// As [`product`].
#[must_use]
pub fn product_of(
    bits: ActivationBits,
    parts: &[&PackedMatrix],
    bias: Option<&[f32]>,
    x: &[f32],
    rows: usize,
) -> Vec<f32> {
    let Some(columns) = parts.first().map(|part| part.in_features) else {
        return Vec::new();
    };
    assert!(
        rows.checked_mul(columns) == Some(x.len())
            && parts.iter().all(|part| part.in_features == columns),
        "{} numbers in {rows} rows for matrices of {columns} columns",
        x.len()
    );
    let input = Input::new(bits, parts, x, rows, columns);
    let stride: usize = parts.iter().map(|part| part.out_features).sum();
    let tiles: usize = parts
        .iter()
        .map(|part| part.out_features.div_ceil(LANES))
        .sum();
    let fill = |out: &SharedMut<'_, MaybeUninit<f32>>| {
        let work = |range: Range<usize>| {
            let mut first_tile = 0;
            let mut first_column = 0;
            for part in parts {
                let part_tiles = part.out_features.div_ceil(LANES);
                let start = range.start.clamp(first_tile, first_tile + part_tiles) - first_tile;
                let end = range.end.clamp(first_tile, first_tile + part_tiles) - first_tile;
                let columns = first_column + (start * LANES).min(part.out_features)
                    ..first_column + (end * LANES).min(part.out_features);
                let output = Output {
                    all: out,
                    stride,
                    columns,
                    bias,
                };
                part.multiply(start..end, &input, rows, &output);
                first_tile += part_tiles;
                first_column += part.out_features;
            }
        };
        for_each_range_if_large(tiles, rows * stride * columns / 8, work);
    };
    #[expect(unsafe_code, reason = "the kernels write each number once")]
    // SAFETY: every tile is multiplied and stores its columns of every row; together they cover all columns.
    unsafe {
        written(rows * stride, fill)
    }
}

impl PackedMatrix {
    /// Computes the products of some of its tiles.
    fn multiply(&self, tiles: Range<usize>, input: &Input, rows: usize, output: &Output<'_>) {
        match &self.tiles {
            Tiles::Dense(columns) => {
                let Some(x) = &input.f32 else {
                    unreachable!("invariant: the input has what each part reads")
                };
                for (index, tile) in tiles.enumerate() {
                    let tile = &columns[tile * self.in_features..][..self.in_features];
                    dense::multiply(tile, x, rows, index, output);
                }
            }
            Tiles::Quantized(all) => {
                let Some(x) = &input.int8 else {
                    unreachable!("invariant: the input has what each part reads")
                };
                all.multiply(tiles, x, rows, output);
            }
        }
    }
}
