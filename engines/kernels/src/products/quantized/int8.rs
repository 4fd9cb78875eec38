//! Rows of 8-bit integers, in the kernels' form.

use std::mem::MaybeUninit;

use crate::parallel::{SharedMut, for_each_range_if_large};
use crate::products::activations::{ActivationBits, GROUP_ROWS, groups};
use crate::simd::by_simd;

/// Numbers that share a scale.
pub(super) const BLOCK: usize = 32;

/// The approximate number of vector operations to round a number, including latencies.
const OPERATIONS: usize = 2;

/// A block has a residual if its scale exceeds the row's median by this factor: eight bits alone are too coarse for it.
const FAR: f32 = 1.6;

/// Rows of 8-bit integers with a scale for each [`BLOCK`] numbers, and the residuals of some blocks in the same form.
///
/// In a group of `m` rows that starts at row `r`, `values` holds eight numbers of each row in turn, from `r * width` on;
/// the others hold one entry of each row in turn, from `r * width / 32` (`sums`: `/ 16`) on.
#[derive(Debug)]
pub(in crate::products) struct Int8Rows {
    /// Columns, rounded up to whole tiles; those beyond the input are 0.
    width: usize,
    values: Box<[i8]>,
    scales: Box<[f32]>,
    /// Sums of each block's numbers, scaled.
    scaled_sums: Box<[f32]>,
    /// Sums of each half block's integers.
    sums: Box<[i32]>,
    /// For each group of rows, in the order of the columns.
    residuals: Box<[Vec<Residual>]>,
}

/// The rounding error of a row's block.
#[derive(Debug, PartialEq)]
pub(super) struct Residual {
    /// The block's index in the row.
    pub(super) place: usize,
    /// The row's index in the group.
    pub(super) row: usize,
    pub(super) block: Int8Block,
}

impl Int8Rows {
    /// Rounds the rows of `x`, `[rows, columns]`.
    pub(in crate::products) fn new(
        bits: ActivationBits,
        x: &[f32],
        rows: usize,
        columns: usize,
    ) -> Self {
        let width = columns.next_multiple_of(2 * BLOCK);
        let mut values = Box::new_uninit_slice(rows * width);
        let mut scales = vec![0.0; rows * width / BLOCK];
        let mut scaled_sums = Box::new_uninit_slice(rows * width / BLOCK);
        let mut sums = Box::new_uninit_slice(rows * width / (BLOCK / 2));
        let all_groups = rows.div_ceil(GROUP_ROWS);
        let mut residuals = Vec::new();
        residuals.resize_with(all_groups, Vec::new);
        {
            let values = SharedMut::new(&mut values);
            let scales = SharedMut::new(&mut scales);
            let scaled_sums = SharedMut::new(&mut scaled_sums);
            let sums = SharedMut::new(&mut sums);
            let residuals = SharedMut::new(&mut residuals);
            for_each_range_if_large(all_groups, OPERATIONS * rows * columns, |range| {
                for (index, (first, rows)) in
                    groups(rows).enumerate().skip(range.start).take(range.len())
                {
                    let part = |unit: usize| first * width / unit..(first + rows) * width / unit;
                    #[expect(unsafe_code, reason = "threads write disjoint parts of one buffer")]
                    // SAFETY: a group is in only one range, and groups do not overlap.
                    let (mut group, found) = unsafe {
                        let group = Int8GroupMut {
                            rows,
                            values: values.part(part(1)),
                            scales: scales.part(part(BLOCK)),
                            scaled_sums: scaled_sums.part(part(BLOCK)),
                            sums: sums.part(part(BLOCK / 2)),
                        };
                        (group, &mut residuals.part(index..index + 1)[0])
                    };
                    let x = &x[first * columns..(first + rows) * columns];
                    for (row, x) in x.chunks_exact(columns).enumerate() {
                        round(bits, x, (row, width), &mut group, found);
                    }
                    found.sort_by_key(|residual| residual.place);
                }
            });
        }
        #[expect(unsafe_code, reason = "numbers that are written once")]
        // SAFETY: every group is in a range, and all blocks of each of its rows were rounded.
        unsafe {
            Self {
                width,
                values: values.assume_init(),
                scales: scales.into(),
                scaled_sums: scaled_sums.assume_init(),
                sums: sums.assume_init(),
                residuals: residuals.into(),
            }
        }
    }

    /// The group of `rows` rows from `first` on.
    pub(super) fn group(&self, first: usize, rows: usize) -> Int8Group<'_> {
        let part = |unit: usize| first * self.width / unit..(first + rows) * self.width / unit;
        Int8Group {
            values: &self.values[part(1)],
            scales: &self.scales[part(BLOCK)],
            scaled_sums: &self.scaled_sums[part(BLOCK)],
            sums: &self.sums[part(BLOCK / 2)],
            residuals: &self.residuals[first / GROUP_ROWS],
        }
    }
}

/// One group of [`Int8Rows`].
#[derive(Debug)]
pub(super) struct Int8Group<'a> {
    pub(super) values: &'a [i8],
    pub(super) scales: &'a [f32],
    pub(super) scaled_sums: &'a [f32],
    pub(super) sums: &'a [i32],
    pub(super) residuals: &'a [Residual],
}

impl Int8Group<'_> {
    /// Checks the sizes, so that kernels without bounds checks stay inside.
    ///
    /// # Panics
    /// The group has fewer than `rows` rows of `columns` columns.
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

/// One group under construction.
pub(super) struct Int8GroupMut<'a> {
    rows: usize,
    values: &'a mut [MaybeUninit<i8>],
    scales: &'a mut [f32],
    scaled_sums: &'a mut [MaybeUninit<f32>],
    sums: &'a mut [MaybeUninit<i32>],
}

by_simd! {
    /// Rounds a row of a group, padded with zeros to a width, and then the rounding errors that are too large.
    fn round(
        bits: ActivationBits,
        x: &[f32],
        place: (usize, usize),
        group: &mut Int8GroupMut<'_>,
        residuals: &mut Vec<Residual>,
    ) = round_inner
}

#[inline(always)]
fn round_inner<const FMA: bool>(
    bits: ActivationBits,
    x: &[f32],
    (row, width): (usize, usize),
    group: &mut Int8GroupMut<'_>,
    residuals: &mut Vec<Residual>,
) {
    let blocks = width / BLOCK;
    for place in 0..blocks {
        let block = round_block(block_of(x, place, &mut [0.0; BLOCK]));
        group.put(place, row, &block);
    }
    let far = match bits {
        ActivationBits::Eight => FAR * group.median_scale(row),
        ActivationBits::Sixteen => 0.0,
    };
    for place in 0..blocks {
        // Comparisons with NaN are false. The first part has the NaN already, so it needs no residual.
        if group.scales[place * group.rows + row] > far {
            let mut x = *block_of(x, place, &mut [0.0; BLOCK]);
            let whole = round_block(&x);
            for (x, value) in x.iter_mut().zip(whole.values) {
                *x -= whole.scale * f32::from(value);
            }
            let block = round_block(&x);
            residuals.push(Residual { place, row, block });
        }
    }
}

/// A block of a row. If the row ends inside it, it is copied to `padded` with zeros.
#[inline(always)]
fn block_of<'a>(x: &'a [f32], place: usize, padded: &'a mut [f32; BLOCK]) -> &'a [f32; BLOCK] {
    let x = x.get(place * BLOCK..).unwrap_or_default();
    x.first_chunk().unwrap_or_else(|| {
        padded[..x.len()].copy_from_slice(x);
        padded
    })
}

impl Int8GroupMut<'_> {
    /// The median of a row's scales.
    fn median_scale(&self, row: usize) -> f32 {
        // Scales are not negative, so their bits have the same order, and integers are compared faster.
        let scales = self.scales[row..].iter().step_by(self.rows);
        let mut bits: Vec<u32> = scales.map(|scale| scale.to_bits()).collect();
        let middle = bits.len() / 2;
        f32::from_bits(*bits.select_nth_unstable(middle).1)
    }

    /// Stores a block of a row.
    #[inline(always)]
    fn put(&mut self, place: usize, row: usize, block: &Int8Block) {
        let (to, _) = self.values.as_chunks_mut::<8>();
        let to = &mut to[place * BLOCK / 8 * self.rows + row..];
        let (parts, _) = block.values.as_chunks::<8>();
        for (to, part) in to.iter_mut().step_by(self.rows).zip(parts) {
            to.write_copy_of_slice(part);
        }
        let at = place * self.rows + row;
        self.scales[at] = block.scale;
        self.scaled_sums[at].write(block.scaled_sum);
        let [first, second] = block.sums;
        self.sums[2 * place * self.rows + row].write(first);
        self.sums[(2 * place + 1) * self.rows + row].write(second);
    }
}

/// A block of integers.
#[derive(Debug, PartialEq)]
pub(super) struct Int8Block {
    /// NaN if a number of the block is not finite, which the integers would hide.
    pub(super) scale: f32,
    /// In -127..=127.
    pub(super) values: [i8; BLOCK],
    /// The sum of each half.
    pub(super) sums: [i32; 2],
    /// The sum of all, scaled.
    pub(super) scaled_sum: f32,
}

/// Rounds a block with the scale that its largest number needs.
#[inline(always)]
fn round_block(x: &[f32; BLOCK]) -> Int8Block {
    /// Adding it rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const INFINITE: u32 = 0x7F80_0000;
    // Absolute values have the order of their bits, and non-finite ones are the largest.
    let largest = x.iter().fold(0, |largest: u32, x| {
        largest.max(x.to_bits() & (u32::MAX >> 1))
    });
    let (is_finite, largest) = (largest < INFINITE, f32::from_bits(largest));
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    // Not `map`, which would be a function call here.
    let mut values = [0; BLOCK];
    for (value, x) in values.iter_mut().zip(x) {
        let [low, ..] = (x * inverse + ROUND).to_bits().to_le_bytes();
        *value = low.cast_signed();
    }
    let (first, second) = values.split_at(BLOCK / 2);
    let sum = |half: &[i8]| half.iter().map(|&value| i32::from(value)).sum::<i32>();
    let (first, second) = (sum(first), sum(second));
    let scale = if is_finite { largest / 127.0 } else { f32::NAN };
    #[expect(clippy::cast_precision_loss, reason = "at most 32 * 127")]
    let scaled_sum = scale * (first + second) as f32;
    Int8Block {
        scale,
        values,
        sums: [first, second],
        scaled_sum,
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    #[test]
    fn blocks_are_rounded_to_the_nearest_of_255_steps() {
        let mut rng = StdRng::seed_from_u64(3);
        for exponent in -30..30 {
            let x: [f32; BLOCK] =
                std::array::from_fn(|_| rng.random_range(-1.0f32..1.0) * 2f32.powi(exponent));
            let rounded = round_block(&x);
            let largest = x.iter().fold(0.0f32, |a, b| a.max(b.abs()));
            assert_eq!(rounded.scale, largest / 127.0);
            for (&x, &value) in x.iter().zip(&rounded.values) {
                assert!((x - rounded.scale * f32::from(value)).abs() <= 0.501 * rounded.scale);
            }
            let sum = |half: &[i8]| half.iter().map(|&v| i32::from(v)).sum::<i32>();
            let (first, second) = rounded.values.split_at(BLOCK / 2);
            assert_eq!(rounded.sums, [sum(first), sum(second)]);
        }
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 15, 16, 31] {
                let mut x = [0.5f32; BLOCK];
                x[place] = odd;
                let rounded = round_block(&x);
                assert!(rounded.scale.is_nan(), "{odd} at {place}");
            }
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        let rounded = round_block(&[0.0; BLOCK]);
        let want = Int8Block {
            scale: 0.0,
            values: [0; BLOCK],
            sums: [0; 2],
            scaled_sum: 0.0,
        };
        assert_eq!(rounded, want);
    }

    #[test]
    fn rows_lie_interleaved_with_zeros_behind() {
        // Nine rows are a group of eight and one of one; 96 columns are padded to 128.
        let (rows, columns) = (9, 96);
        let x: Vec<f32> = (0..rows * columns)
            .map(|i| (i % 61) as f32 - 30.0)
            .collect();
        let whole = Int8Rows::new(ActivationBits::Eight, &x, rows, columns);
        for (row, x) in x.chunks_exact(columns).enumerate() {
            let alone = Int8Rows::new(ActivationBits::Eight, x, 1, columns);
            let (first, in_group) = if row < 8 { (0, 8) } else { (8, 1) };
            let (group, alone) = (whole.group(first, in_group), alone.group(0, 1));
            for (at, &value) in alone.values.iter().enumerate() {
                let there = (at / 8 * in_group + row - first) * 8 + at % 8;
                assert_eq!(group.values[there], value, "row {row}, column {at}");
            }
            assert_eq!(alone.values[columns..], [0; 32]);
            for (block, &scale) in alone.scales.iter().enumerate() {
                assert_eq!(group.scales[block * in_group + row - first], scale);
            }
        }
    }

    #[test]
    fn what_rounding_leaves_is_kept_where_it_is_much() {
        let mut rng = StdRng::seed_from_u64(5);
        let (rows, columns) = (11, 96);
        let mut x: Vec<f32> = (0..rows * columns)
            .map(|_| rng.random_range(-1.0f32..1.0))
            .collect();
        // The second block of row 9, which is the second row of its group.
        x[9 * columns + 40] = -50.0;
        let places = |bits| {
            let rounded = Int8Rows::new(bits, &x, rows, columns);
            let places = rounded.residuals.iter().map(|residuals| {
                let places = residuals
                    .iter()
                    .map(|residual| (residual.place, residual.row));
                places.collect::<Vec<_>>()
            });
            places.collect::<Vec<_>>()
        };
        assert_eq!(places(ActivationBits::Eight), [vec![], vec![(1, 1)]]);
        let all =
            |rows: usize| (0..3).flat_map(move |place| (0..rows).map(move |row| (place, row)));
        assert_eq!(
            places(ActivationBits::Sixteen),
            [all(8).collect::<Vec<_>>(), all(3).collect()]
        );

        let rounded = Int8Rows::new(ActivationBits::Eight, &x, rows, columns);
        let residual = &rounded.residuals[1][0].block;
        let block: &[f32; BLOCK] = x[9 * columns + BLOCK..].first_chunk().unwrap();
        let whole = round_block(block);
        for (at, &x) in block.iter().enumerate() {
            let left = x - whole.scale * f32::from(whole.values[at]);
            let kept = residual.scale * f32::from(residual.values[at]);
            assert!(
                (left - kept).abs() < 0.501 * residual.scale
                    && residual.scale < whole.scale / 250.0
            );
        }
    }
}
