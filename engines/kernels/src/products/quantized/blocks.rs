//! A block of 32 columns of sixteen rows of weights, unpacked, and its products with the same block of 8-bit rows.

#![expect(
    unsafe_code,
    reason = "intrinsics of the processor, and pointers without bounds checks in the inner loop"
)]

use super::formats::Format;
use super::heads::Head;
use super::instructions::Instructions;
use super::int8::{BLOCK, Int8Block, Int8Group, Residual};
use super::tiles::{Quad, Quads, Tile, quads};
use crate::products::activations::GROUP_ROWS;
use crate::simd::LANES;

/// Pointers to the numbers of a group of `ROWS` rows.
#[derive(Clone, Copy)]
pub(super) struct Group<const ROWS: usize> {
    /// Words of four numbers, not aligned; two words of each row in turn.
    values: *const i32,
    scales: *const f32,
    scaled_sums: *const f32,
    sums: *const i32,
}

impl Group<1> {
    /// A row of one block.
    fn of(block: &Int8Block) -> Self {
        Self {
            values: block.values.as_ptr().cast(),
            scales: &raw const block.scale,
            scaled_sums: &raw const block.scaled_sum,
            sums: block.sums.as_ptr(),
        }
    }
}

impl<const ROWS: usize> Group<ROWS> {
    /// # Panics
    /// The group has fewer than `columns` columns.
    pub(super) fn new(group: &Int8Group<'_>, columns: usize) -> Self {
        group.check(ROWS, columns);
        Self {
            values: group.values.as_ptr().cast(),
            scales: group.scales.as_ptr(),
            scaled_sums: group.scaled_sums.as_ptr(),
            sums: group.sums.as_ptr(),
        }
    }

    /// A pointer to a row's word `word`, an even number.
    #[inline(always)]
    unsafe fn words(self, word: usize, row: usize) -> *const i32 {
        // SAFETY: inside the group, whose width `Int8Group::check` compared with the tiles.
        unsafe { self.values.add(word * ROWS + 2 * row) }
    }

    #[inline(always)]
    unsafe fn scale(self, block: usize, row: usize) -> f32 {
        // SAFETY: as in `words`.
        unsafe { *self.scales.add(block * ROWS + row) }
    }

    /// The sum of the `at`th `N` words, which are a block or half of one.
    #[inline(always)]
    unsafe fn sum<const N: usize>(self, at: usize, row: usize) -> i32 {
        // SAFETY: as in `words`.
        unsafe {
            if N == HALF_WORDS {
                *self.sums.add(at * ROWS + row)
            } else {
                *self.sums.add(2 * at * ROWS + row) + *self.sums.add((2 * at + 1) * ROWS + row)
            }
        }
    }

    /// As `sum`, multiplied by the scale.
    #[inline(always)]
    unsafe fn scaled_sum<const N: usize>(self, at: usize, row: usize) -> f32 {
        // SAFETY: as in `words`.
        unsafe {
            if N == HALF_WORDS {
                #[expect(clippy::cast_precision_loss, reason = "at most 16 * 127")]
                let sum = self.sum::<N>(at, row) as f32;
                sum * self.scale(at / 2, row)
            } else {
                *self.scaled_sums.add(at * ROWS + row)
            }
        }
    }
}

/// Words of four numbers per block, and per half block.
const WORDS: usize = BLOCK / 4;
const HALF_WORDS: usize = WORDS / 2;

/// The weights of 32 columns, four to a vector, and the scales of each half.
pub(super) struct BlockWeights<I: Instructions> {
    words: [I::Integers; WORDS],
    /// Scales and minima; equal if all columns share them.
    scales: [(I::Floats, I::Floats); 2],
}

impl<I: Instructions> Clone for BlockWeights<I> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<I: Instructions> Copy for BlockWeights<I> {}

impl<I: Instructions> BlockWeights<I> {
    /// The `unit`th 32 columns of a tile, for the rows from `lane` on.
    #[inline(always)]
    pub(super) unsafe fn new<F: Format>(
        tile: &Tile<F>,
        head: &<F::Head as Head>::Unpacked,
        unit: usize,
        lane: usize,
    ) -> Self {
        let values = &tile.values.quads()[unit * quads(F::BITS)..];
        // SAFETY: the caller's promise, and the tile has this unit.
        unsafe {
            let words = weights::<I, F>(values, lane);
            let scales = if F::Head::WIDTH == BLOCK {
                [tile.head.vectors::<I>(head, unit, lane); 2]
            } else {
                [
                    tile.head.vectors::<I>(head, 2 * unit, lane),
                    tile.head.vectors::<I>(head, 2 * unit + 1, lane),
                ]
            };
            Self { words, scales }
        }
    }

    /// Adds their products with a block of a group's rows.
    #[inline(always)]
    pub(super) unsafe fn multiply<F: Format, const ROWS: usize>(
        &self,
        group: Group<ROWS>,
        block: usize,
        totals: &mut [I::Floats; ROWS],
    ) {
        let [first, second] = self.scales;
        // SAFETY: the caller's promise.
        unsafe {
            if F::Head::WIDTH == BLOCK {
                return add::<I, F, ROWS, WORDS>(group, block, &self.words, first, totals);
            }
            let [a, b, c, d, after @ ..] = self.words;
            add::<I, F, ROWS, HALF_WORDS>(group, 2 * block, &[a, b, c, d], first, totals);
            add::<I, F, ROWS, HALF_WORDS>(group, 2 * block + 1, &after, second, totals);
        }
    }

    /// Adds their products with the residual of a row's block to the row's sums, for the lanes from `lane` on.
    #[inline(always)]
    pub(super) unsafe fn add_residual<F: Format>(
        &self,
        residual: &Residual,
        lane: usize,
        sums: &mut [[f32; LANES]],
    ) {
        let sums = &mut sums[residual.row][lane..];
        // SAFETY: the caller's promise; a part of a row of `sums` holds a vector.
        unsafe {
            let mut totals = [I::load_floats(sums.as_ptr())];
            self.multiply::<F, 1>(Group::of(&residual.block), 0, &mut totals);
            I::store(sums.as_mut_ptr(), totals[0]);
        }
    }
}

/// Adds the products of the `at`th `N` words with weights that share a scale.
#[inline(always)]
unsafe fn add<I: Instructions, F: Format, const ROWS: usize, const N: usize>(
    group: Group<ROWS>,
    at: usize,
    weights: &[I::Integers; N],
    scales: (I::Floats, I::Floats),
    totals: &mut [I::Floats; ROWS],
) {
    // SAFETY: the caller's promise, here and below.
    unsafe {
        let mut alone = 0;
        if I::MAY_DOT_TWO {
            while alone + 1 < ROWS {
                let row = alone;
                let words = group.words(at * N, row);
                let starts = [
                    start::<I, F, ROWS, N>(group, at, row),
                    start::<I, F, ROWS, N>(group, at, row + 1),
                ];
                let Some([sum, next]) = I::dot_two(starts, weights, words, 2 * ROWS) else {
                    break;
                };
                scale::<I, F, ROWS, N>(group, at, row, sum, scales, &mut totals[row]);
                scale::<I, F, ROWS, N>(group, at, row + 1, next, scales, &mut totals[row + 1]);
                alone += 2;
            }
        }
        macro_rules! add_row {
            ($row:expr, $total:expr) => {{
                let words = group.words(at * N, $row);
                let start = I::splat_integer(start::<I, F, ROWS, N>(group, at, $row));
                let sum = if is_signed::<I, F>() {
                    I::signed_dot(start, weights, words, 2 * ROWS)
                } else {
                    I::dot(start, weights, words, 2 * ROWS, step::<F>())
                };
                scale::<I, F, ROWS, N>(group, at, $row, sum, scales, $total);
            }};
        }
        if ROWS < GROUP_ROWS || !I::HOLDS_TOTALS {
            for (row, total) in totals.iter_mut().enumerate().skip(alone) {
                add_row!(row, total);
            }
            return;
        }
        // Not a loop, because the compiler might not unroll it and would keep the totals in memory. For one row it must be a loop:
        // unrolled by hand, it ran at half the speed.
        macro_rules! add_each_row {
            ($($row:literal)*) => {
                $(if $row >= alone {
                    add_row!($row, &mut totals[$row]);
                })*
            };
        }
        add_each_row!(0 1 2 3 4 5 6 7);
        const { assert!(GROUP_ROWS == 8, "rows that are not added") };
    }
}

/// The initial value of a row's sum of the `at`th `N` words, which subtracts the zero point of the weights.
#[inline(always)]
unsafe fn start<I: Instructions, F: Format, const ROWS: usize, const N: usize>(
    group: Group<ROWS>,
    at: usize,
    row: usize,
) -> i32 {
    if F::ZERO == 0 || is_signed::<I, F>() {
        0
    } else {
        // SAFETY: the caller's promise.
        unsafe { group.sum::<N>(at, row) * -i32::from(F::ZERO) }
    }
}

/// Adds a row's sum, scaled, to its total.
#[inline(always)]
unsafe fn scale<I: Instructions, F: Format, const ROWS: usize, const N: usize>(
    group: Group<ROWS>,
    at: usize,
    row: usize,
    sum: I::Integers,
    (scale, min): (I::Floats, I::Floats),
    total: &mut I::Floats,
) {
    // SAFETY: the caller's promise, here and below.
    unsafe {
        let row_scale = I::splat(group.scale(at * N / WORDS, row));
        *total = I::multiply_add(I::to_floats(sum), I::multiply(scale, row_scale), *total);
        if F::Head::HAS_MIN {
            let row_sum = I::splat(group.scaled_sum::<N>(at, row));
            *total = I::multiply_subtract(min, row_sum, *total);
        }
    }
}

/// Whether weights are multiplied as signed numbers, with no zero point to subtract.
const fn is_signed<I: Instructions, F: Format>() -> bool {
    I::HAS_SIGNED_DOT && F::ZERO == 128
}

/// The number of products of pairs whose sum fits into 16 bits.
const fn step<F: Format>() -> usize {
    match F::BITS {
        2..=4 if F::TABLE.is_none() => 8,
        2..=5 => 4,
        _ => 2,
    }
}

/// The weights of 32 columns, four to a vector.
#[inline(always)]
unsafe fn weights<I: Instructions, F: Format>(
    values: &[Quad],
    lane: usize,
) -> [I::Integers; WORDS] {
    // SAFETY: the caller's promise, and a unit has as many quads as its bits say.
    unsafe {
        let v = Values {
            start: values.as_ptr().cast::<u8>().add(lane * 4),
        };
        let [a, b, c, d, e, f, g, h] = [0, 1, 2, 3, 4, 5, 6, 7];
        let mut words = match F::BITS {
            2 => v.pairs::<I>([a, b]),
            3 => v.pairs::<I>([b, c]),
            4 => v.nibbles::<I>([a, b, c, d]),
            5 => v.nibbles::<I>([b, c, d, e]),
            6 => v.nibbles::<I>([b, c, e, f]),
            _ => {
                let mut words = [v.load::<I>(a); WORDS];
                for (word, quad) in words.iter_mut().zip([a, b, c, d, e, f, g, h]) {
                    *word = v.load::<I>(quad);
                }
                words
            }
        };
        match F::BITS {
            3 => v.add_bits::<I>(&mut words, [a; 8], [2, 1, 0, -1, -2, -3, -4, -5], 4),
            5 => v.add_bits::<I>(&mut words, [a; 8], [4, 3, 2, 1, 0, -1, -2, -3], 16),
            6 => {
                let quads = [a, a, a, a, d, d, d, d];
                v.add_bits::<I>(&mut words, quads, [4, 2, 0, -2, 4, 2, 0, -2], 48);
            }
            _ => {}
        }
        if let Some(table) = &F::TABLE {
            for word in &mut words {
                *word = I::look_up(table, *word);
            }
        }
        if is_signed::<I, F>() {
            for word in &mut words {
                *word = I::xor(*word, I::splat_byte(128));
            }
        }
        words
    }
}

/// The quads of 32 columns, from some lane on. Quad indices are in bounds.
#[derive(Clone, Copy)]
struct Values {
    start: *const u8,
}

impl Values {
    #[inline(always)]
    unsafe fn load<I: Instructions>(self, quad: usize) -> I::Integers {
        // SAFETY: the caller's promise.
        unsafe { I::load(self.start.add(quad * size_of::<Quad>())) }
    }

    /// Words of four-bit values, two to a quad.
    #[inline(always)]
    unsafe fn nibbles<I: Instructions>(self, quads: [usize; 4]) -> [I::Integers; WORDS] {
        // SAFETY: the caller's promise.
        unsafe {
            let mask = I::splat_byte(15);
            let mut words = [mask; WORDS];
            for (words, quad) in words.as_chunks_mut::<2>().0.iter_mut().zip(quads) {
                let both = self.load::<I>(quad);
                *words = [I::and(both, mask), I::and(I::shift_right(both, 4), mask)];
            }
            words
        }
    }

    /// Words of two-bit values, four to a quad.
    #[inline(always)]
    unsafe fn pairs<I: Instructions>(self, quads: [usize; 2]) -> [I::Integers; WORDS] {
        // SAFETY: the caller's promise.
        unsafe {
            let mask = I::splat_byte(3);
            let mut words = [mask; WORDS];
            for (words, quad) in words.as_chunks_mut::<4>().0.iter_mut().zip(quads) {
                let all = self.load::<I>(quad);
                *words = [
                    I::and(all, mask),
                    I::and(I::shift_right(all, 2), mask),
                    I::and(I::shift_right(all, 4), mask),
                    I::and(I::shift_right(all, 6), mask),
                ];
            }
            words
        }
    }

    /// Adds to each word the bits of `mask` of its quad, shifted left, or right if the shift is negative.
    #[inline(always)]
    unsafe fn add_bits<I: Instructions>(
        self,
        words: &mut [I::Integers; WORDS],
        quads: [usize; WORDS],
        left: [i32; WORDS],
        mask: u8,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            for ((word, quad), left) in words.iter_mut().zip(quads).zip(left) {
                let high = self.load::<I>(quad);
                let moved = if left < 0 {
                    I::shift_right(high, -left)
                } else {
                    I::shift_left(high, left)
                };
                *word = I::or(*word, I::and(moved, I::splat_byte(mask)));
            }
        }
    }
}
