//! Weights in f32, sixteen rows to a tile.

use std::io;

use super::activations::groups;
use super::packed::Output;
use crate::memory::{Stored, WeightMemory};
use crate::simd::{LANES, by_simd, multiply_add};

/// The weights of sixteen rows in one column.
pub(super) type Column = [f32; LANES];

/// Rows of a matrix, sixteen at a time; rows beyond the matrix are 0.
///
/// # Errors
/// The system is out of memory.
///
/// # Panics
/// There are no columns, or more or fewer weights than the shape says.
pub(super) fn pack(
    weight: &[f32],
    out_features: usize,
    in_features: usize,
    memory: &mut WeightMemory,
) -> io::Result<Stored<Column>> {
    assert!(
        out_features.checked_mul(in_features) == Some(weight.len()),
        "{} weights for {out_features} rows of {in_features}",
        weight.len()
    );
    let len = out_features.div_ceil(LANES) * in_features;
    memory.store(len, |columns: &mut [Column]| {
        for (row, weight) in weight.chunks_exact(in_features).enumerate() {
            let tile = &mut columns[row / LANES * in_features..][..in_features];
            for (column, &w) in tile.iter_mut().zip(weight) {
                column[row % LANES] = w;
            }
        }
    })
}

/// Computes one tile's columns of a product, the `index`th of the output, for all rows of `x`, which is interleaved.
pub(super) fn multiply(tile: &[Column], x: &[f32], rows: usize, index: usize, output: &Output<'_>) {
    for (first, group_rows) in groups(rows) {
        let place = (index, first);
        let x = &x[first * tile.len()..(first + group_rows) * tile.len()];
        match group_rows {
            1 => rows_of::<1>(tile, x, place, output),
            2 => rows_of::<2>(tile, x, place, output),
            3 => rows_of::<3>(tile, x, place, output),
            4 => rows_of::<4>(tile, x, place, output),
            5 => rows_of::<5>(tile, x, place, output),
            6 => rows_of::<6>(tile, x, place, output),
            7 => rows_of::<7>(tile, x, place, output),
            _ => rows_of::<8>(tile, x, place, output),
        }
    }
}

fn rows_of<const ROWS: usize>(
    tile: &[Column],
    x: &[f32],
    (index, first): (usize, usize),
    output: &Output<'_>,
) {
    let mut sums = [[0.0f32; LANES]; ROWS];
    group::<ROWS>(tile, x, &mut sums);
    output.store_rows(index, first, &sums);
}

by_simd! {
    /// Adds the products of `ROWS` rows to `sums`.
    fn group<const ROWS: usize>(tile: &[Column], x: &[f32], sums: &mut [[f32; LANES]; ROWS]) = group_inner
}

#[inline(always)]
fn group_inner<const FMA: bool, const ROWS: usize>(
    tile: &[Column],
    x: &[f32],
    sums: &mut [[f32; LANES]; ROWS],
) {
    // The compiler can keep a local copy in registers.
    let mut totals = *sums;
    for (column, x) in tile.iter().zip(x.as_chunks::<ROWS>().0) {
        multiply_add::<FMA, ROWS>(x, column, &mut totals);
    }
    *sums = totals;
}
