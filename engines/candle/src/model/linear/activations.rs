//! A product's input as the kernels read it: rows in groups of up to [`GROUP_ROWS`], their numbers interleaved, so that
//! one pointer walks through a whole group.

use crate::model::parallel::{SharedMut, for_each_range_if_large};
use crate::model::simd::by_simd;

/// Rows that a kernel multiplies with one load of the weights.
pub(super) const GROUP_ROWS: usize = 8;

/// Numbers that share a scale.
pub(super) const BLOCK: usize = 32;

/// The groups of `rows` rows: first row and number of rows.
pub(super) fn groups(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows)
        .step_by(GROUP_ROWS)
        .map(move |first| (first, (rows - first).min(GROUP_ROWS)))
}

/// Rows in 8-bit integers with a scale for each [`BLOCK`] numbers.
///
/// In a group of `m` rows that starts at row `r`, `values` holds four numbers of each row in turn, from `r * width` on;
/// the others hold one entry of each row in turn, from `r * width / 32` (`sums`: `/ 16`) on.
#[derive(Debug)]
pub(super) struct Int8Rows {
    /// Columns, rounded up to whole tiles; those beyond the input are 0.
    pub(super) width: usize,
    pub(super) values: Vec<i8>,
    pub(super) scales: Vec<f32>,
    /// Sums of each block's numbers, scaled.
    pub(super) scaled_sums: Vec<f32>,
    /// Sums of each half block's integers.
    pub(super) sums: Vec<i32>,
}

impl Int8Rows {
    /// Rounds the rows of `x`, `[rows, columns]`.
    pub(super) fn new(x: &[f32], rows: usize, columns: usize) -> Self {
        let width = columns.next_multiple_of(2 * BLOCK);
        let mut this = Self {
            width,
            values: vec![0; rows * width],
            scales: vec![0.0; rows * width / BLOCK],
            scaled_sums: vec![0.0; rows * width / BLOCK],
            sums: vec![0; rows * width / (BLOCK / 2)],
        };
        let values = SharedMut::new(&mut this.values);
        let scales = SharedMut::new(&mut this.scales);
        let scaled_sums = SharedMut::new(&mut this.scaled_sums);
        let sums = SharedMut::new(&mut this.sums);
        for_each_range_if_large(rows.div_ceil(GROUP_ROWS), rows * columns, |range| {
            for (first, group_rows) in groups(rows).skip(range.start).take(range.len()) {
                let part = |unit: usize| first * width / unit..(first + group_rows) * width / unit;
                #[expect(unsafe_code, reason = "threads write disjoint parts of one buffer")]
                // SAFETY: a group is in one range only, and groups do not overlap.
                let (values, scales, scaled_sums, sums) = unsafe {
                    (
                        values.part(part(1)),
                        scales.part(part(BLOCK)),
                        scaled_sums.part(part(BLOCK)),
                        sums.part(part(BLOCK / 2)),
                    )
                };
                let x = &x[first * columns..(first + group_rows) * columns];
                round_group(x, columns, group_rows, values, scales, scaled_sums, sums);
            }
        });
        this
    }
}

/// One group of [`Int8Rows`].
#[derive(Debug)]
pub(super) struct Int8Group<'a> {
    pub(super) values: &'a [i8],
    pub(super) scales: &'a [f32],
    pub(super) scaled_sums: &'a [f32],
    pub(super) sums: &'a [i32],
}

impl Int8Rows {
    /// The group of `rows` rows from `first` on.
    pub(super) fn group(&self, first: usize, rows: usize) -> Int8Group<'_> {
        let part = |unit: usize| first * self.width / unit..(first + rows) * self.width / unit;
        Int8Group {
            values: &self.values[part(1)],
            scales: &self.scales[part(BLOCK)],
            scaled_sums: &self.scaled_sums[part(BLOCK)],
            sums: &self.sums[part(BLOCK / 2)],
        }
    }
}

impl Int8Group<'_> {
    /// Sees to it that kernels without bounds checks stay inside.
    ///
    /// # Panics
    /// The group is smaller than `rows` rows of `columns` columns.
    pub(super) fn check(&self, rows: usize, columns: usize) {
        let blocks = rows * columns / BLOCK;
        assert!(
            self.values.len() >= rows * columns,
            "a group narrower than the tiles"
        );
        assert!(
            self.scales.len() >= blocks
                && self.scaled_sums.len() >= blocks
                && self.sums.len() >= 2 * blocks
        );
    }
}

by_simd! {
    /// Rounds one group.
    fn round_group(x: &[f32], columns: usize, rows: usize, values: &mut [i8], scales: &mut [f32], scaled_sums: &mut [f32], sums: &mut [i32])
        = round_group_inner
}

#[inline(always)]
fn round_group_inner<const FMA: bool>(
    x: &[f32],
    columns: usize,
    rows: usize,
    values: &mut [i8],
    scales: &mut [f32],
    scaled_sums: &mut [f32],
    sums: &mut [i32],
) {
    for (row, x) in x.chunks_exact(columns).enumerate() {
        for (block, x) in x.chunks(BLOCK).enumerate() {
            let mut padded = [0.0f32; BLOCK];
            padded[..x.len()].copy_from_slice(x);
            let (scale, rounded) = round_block(&padded);
            for (word, four) in rounded.chunks_exact(4).enumerate() {
                let at = ((block * BLOCK / 4 + word) * rows + row) * 4;
                values[at..at + 4].copy_from_slice(four);
            }
            let mut halves = [0i32; 2];
            for (half, rounded) in halves.iter_mut().zip(rounded.chunks_exact(BLOCK / 2)) {
                *half = rounded.iter().map(|&v| i32::from(v)).sum();
            }
            let at = block * rows + row;
            scales[at] = scale;
            #[expect(clippy::cast_precision_loss, reason = "at most 32 * 127")]
            let sum = (halves[0] + halves[1]) as f32;
            scaled_sums[at] = scale * sum;
            sums[2 * block * rows + row] = halves[0];
            sums[(2 * block + 1) * rows + row] = halves[1];
        }
    }
}

/// The scale of a block and its numbers in -127..=127.
#[inline(always)]
fn round_block(x: &[f32; BLOCK]) -> (f32, [i8; BLOCK]) {
    // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let mut lanes = [0.0f32; 16];
    for half in x.chunks_exact(16) {
        for (lane, &v) in lanes.iter_mut().zip(half) {
            *lane = if v.abs() > *lane { v.abs() } else { *lane };
        }
    }
    let largest = lanes.iter().fold(0.0f32, |a, &b| if b > a { b } else { a });
    // A NaN anywhere must reach the result: integers would hide it.
    let poison = x.iter().map(|&v| v * 0.0).sum::<f32>();
    let scale = largest / 127.0 + poison;
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    let mut rounded = [0i8; BLOCK];
    for (to, &v) in rounded.iter_mut().zip(x) {
        let bits = (v * inverse + ROUND).to_bits();
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the low byte is the integer"
        )]
        let low = bits as u8;
        *to = low.cast_signed();
    }
    (scale, rounded)
}

/// Rows in f32: in a group of `m` rows that starts at row `r`, one number of each row in turn, from `r * columns` on.
pub(super) fn interleave(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut out = vec![0.0f32; x.len()];
    for (first, group_rows) in groups(rows) {
        let range = first * columns..(first + group_rows) * columns;
        let to = &mut out[range.clone()];
        for (row, x) in x[range].chunks_exact(columns).enumerate() {
            for (column, &v) in x.iter().enumerate() {
                to[column * group_rows + row] = v;
            }
        }
    }
    out
}
