//! Rows in 8-bit integers, as the kernels read them.

use std::mem::MaybeUninit;

use crate::args::ActivationBits;
use crate::model::linear::activations::{GROUP_ROWS, groups};
use crate::model::parallel::{SharedMut, for_each_range_if_large};
use crate::model::simd::by_simd;

/// Numbers that share a scale.
pub(super) const BLOCK: usize = 32;

/// Vector operations that rounding a number takes, about, with the waiting for one after the other.
const OPERATIONS: usize = 2;

/// Rows in 8-bit integers with a scale for each [`BLOCK`] numbers; or each in several such rows, side by side, of which each has what
/// those before it leave.
///
/// In a group of `m` rows that starts at row `r`, `values` holds eight numbers of each row in turn, from `r * width` on;
/// the others hold one entry of each row in turn, from `r * width / 32` (`sums`: `/ 16`) on.
#[derive(Debug)]
pub(in crate::model::linear) struct Int8Rows {
    /// Columns, rounded up to whole tiles; those beyond the input are 0.
    width: usize,
    /// Rows that one of the input's became.
    parts: usize,
    values: Box<[i8]>,
    scales: Box<[f32]>,
    /// Sums of each block's numbers, scaled.
    scaled_sums: Box<[f32]>,
    /// Sums of each half block's integers.
    sums: Box<[i32]>,
}

impl Int8Rows {
    /// Rounds the rows of `x`, `[rows, columns]`.
    pub(in crate::model::linear) fn new(
        bits: ActivationBits,
        x: &[f32],
        rows: usize,
        columns: usize,
    ) -> Self {
        let width = columns.next_multiple_of(2 * BLOCK);
        let parts = bits.parts();
        let rows = rows * parts;
        let mut values = Box::new_uninit_slice(rows * width);
        let mut scales = Box::new_uninit_slice(rows * width / BLOCK);
        let mut scaled_sums = Box::new_uninit_slice(rows * width / BLOCK);
        let mut sums = Box::new_uninit_slice(rows * width / (BLOCK / 2));
        {
            let values = SharedMut::new(&mut values);
            let scales = SharedMut::new(&mut scales);
            let scaled_sums = SharedMut::new(&mut scaled_sums);
            let sums = SharedMut::new(&mut sums);
            let all_groups = rows.div_ceil(GROUP_ROWS);
            for_each_range_if_large(all_groups, OPERATIONS * rows * columns, |range| {
                for (first, rows) in groups(rows).skip(range.start).take(range.len()) {
                    let part = |unit: usize| first * width / unit..(first + rows) * width / unit;
                    #[expect(unsafe_code, reason = "threads write disjoint parts of one buffer")]
                    // SAFETY: a group is in one range only, and groups do not overlap.
                    let mut group = unsafe {
                        Int8GroupMut {
                            rows,
                            values: values.part(part(1)),
                            scales: scales.part(part(BLOCK)),
                            scaled_sums: scaled_sums.part(part(BLOCK)),
                            sums: sums.part(part(BLOCK / 2)),
                        }
                    };
                    // Groups have an even number of rows, so that parts stay together.
                    let x = &x[first / parts * columns..(first + rows) / parts * columns];
                    for (row, x) in x.chunks_exact(columns).enumerate() {
                        round(x, row * parts, width, &mut group);
                        if bits == ActivationBits::Sixteen {
                            round(&remainder(x), row * parts + 1, width, &mut group);
                        }
                    }
                }
            });
        }
        #[expect(unsafe_code, reason = "numbers that are written once")]
        // SAFETY: every group is in a range, and every row of it was rounded, all its blocks.
        unsafe {
            Self {
                width,
                parts,
                values: values.assume_init(),
                scales: scales.assume_init(),
                scaled_sums: scaled_sums.assume_init(),
                sums: sums.assume_init(),
            }
        }
    }

    /// Rows that one of the input's became.
    pub(super) fn parts(&self) -> usize {
        self.parts
    }

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

/// One group of [`Int8Rows`].
#[derive(Debug)]
pub(super) struct Int8Group<'a> {
    pub(super) values: &'a [i8],
    pub(super) scales: &'a [f32],
    pub(super) scaled_sums: &'a [f32],
    pub(super) sums: &'a [i32],
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

/// One group while it is made.
pub(super) struct Int8GroupMut<'a> {
    rows: usize,
    values: &'a mut [MaybeUninit<i8>],
    scales: &'a mut [MaybeUninit<f32>],
    scaled_sums: &'a mut [MaybeUninit<f32>],
    sums: &'a mut [MaybeUninit<i32>],
}

by_simd! {
    /// Rounds a row of a group, with zeros from its end up to `width`.
    fn round(x: &[f32], row: usize, width: usize, group: &mut Int8GroupMut<'_>) = round_inner
}

#[inline(always)]
fn round_inner<const FMA: bool>(x: &[f32], row: usize, width: usize, group: &mut Int8GroupMut<'_>) {
    for block in 0..width / BLOCK {
        let x = x.get(block * BLOCK..).unwrap_or_default();
        let rounded = match x.first_chunk::<BLOCK>() {
            Some(x) => round_block(x),
            None => {
                let mut padded = [0.0f32; BLOCK];
                padded[..x.len()].copy_from_slice(x);
                round_block(&padded)
            }
        };
        let (to, _) = group.values.as_chunks_mut::<8>();
        let to = &mut to[block * BLOCK / 8 * group.rows + row..];
        let (parts, _) = rounded.values.as_chunks::<8>();
        for (to, part) in to.iter_mut().step_by(group.rows).zip(parts) {
            *to = part.map(MaybeUninit::new);
        }
        let at = block * group.rows + row;
        let [first, second] = rounded.sums;
        group.scales[at].write(rounded.scale);
        #[expect(clippy::cast_precision_loss, reason = "at most 32 * 127")]
        let sum = (first + second) as f32;
        group.scaled_sums[at].write(rounded.scale * sum);
        group.sums[2 * block * group.rows + row].write(first);
        group.sums[(2 * block + 1) * group.rows + row].write(second);
    }
}

/// What rounding leaves of a row.
fn remainder(x: &[f32]) -> Vec<f32> {
    let mut left = Vec::with_capacity(x.len());
    for x in x.chunks(BLOCK) {
        let mut padded = [0.0f32; BLOCK];
        padded[..x.len()].copy_from_slice(x);
        let Rounded { scale, values, .. } = round_block(&padded);
        let rest = x.iter().zip(values);
        left.extend(rest.map(|(x, value)| x - scale * f32::from(value)));
    }
    left
}

/// A block in integers.
#[derive(Debug, PartialEq)]
struct Rounded {
    /// NaN if a number of the block is not finite: integers would hide it.
    scale: f32,
    /// In -127..=127.
    values: [i8; BLOCK],
    /// Of each half.
    sums: [i32; 2],
}

/// The scale that the largest number of a block asks for, and the block in its steps.
#[inline(always)]
fn round_block(x: &[f32; BLOCK]) -> Rounded {
    /// Adding it rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const INFINITE: u32 = 0x7F80_0000;
    // Sizes are in the order of their bits, and what is not finite is above all others.
    let largest = x.iter().fold(0, |largest: u32, x| {
        largest.max(x.to_bits() & (u32::MAX >> 1))
    });
    let (is_finite, largest) = (largest < INFINITE, f32::from_bits(largest));
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    let values = x.map(|x| (x * inverse + ROUND).to_bits().to_le_bytes()[0].cast_signed());
    let (first, second) = values.split_at(BLOCK / 2);
    let sum = |half: &[i8]| half.iter().map(|&value| i32::from(value)).sum();
    Rounded {
        scale: if is_finite { largest / 127.0 } else { f32::NAN },
        values,
        sums: [sum(first), sum(second)],
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
        let want = Rounded {
            scale: 0.0,
            values: [0; BLOCK],
            sums: [0; 2],
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
    fn a_second_part_has_what_the_first_leaves() {
        let mut rng = StdRng::seed_from_u64(5);
        // Five rows are a group of eight parts and one of two.
        let (rows, columns) = (5, 96);
        let x: Vec<f32> = (0..rows * columns)
            .map(|_| rng.random_range(-3.0f32..3.0))
            .collect();
        let both = Int8Rows::new(ActivationBits::Sixteen, &x, rows, columns);
        let left: Vec<f32> = x.chunks_exact(columns).flat_map(remainder).collect();
        for (part, x) in [&x, &left].into_iter().enumerate() {
            for (row, x) in x.chunks_exact(columns).enumerate() {
                let alone = Int8Rows::new(ActivationBits::Eight, x, 1, columns);
                let (first, in_group) = if row < 4 { (0, 8) } else { (8, 2) };
                let (group, alone) = (both.group(first, in_group), alone.group(0, 1));
                for (block, &scale) in alone.scales.iter().enumerate() {
                    let there = block * in_group + 2 * row + part - first;
                    assert_eq!(group.scales[there], scale, "row {row}, part {part}");
                }
            }
        }
        let largest = |x: &[f32]| x.iter().fold(0.0f32, |a, b| a.max(b.abs()));
        assert!(largest(&left) < largest(&x) / 250.0);
    }
}
