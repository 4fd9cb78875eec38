//! The products of tiles with groups of 8-bit rows.

#![expect(
    clippy::needless_range_loop,
    reason = "a row's number indexes sums, totals and the group alike"
)]
#![expect(
    unsafe_code,
    reason = "intrinsics of the processor, and pointers without bounds checks in the inner loop"
)]

use std::arch::x86_64::*;

use super::int8::{BLOCK, Int8Group};
use super::tiles::{Quad, Scales, TileQ4_0, TileQ4K, TileQ5K, TileQ6K, TileQ8_0};
use crate::model::linear::packed::Output;
use crate::model::simd::LANES;

/// Tiles with a kernel.
pub(super) trait Multiply: Sized {
    /// The products of `tiles` with a group of `ROWS` rows.
    ///
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ, VL and VNNI, and the group has as many columns as the tiles.
    unsafe fn multiply<const ROWS: usize>(
        tiles: &[Self],
        group: &Int8Group<'_>,
    ) -> [[f32; LANES]; ROWS];

    /// Columns of a tile.
    const COLUMNS: usize;
}

/// The products of `tiles`, side by side, with each of the `rows` rows of a group; the first is row `first` of `output`.
pub(super) fn multiply<T: Multiply>(
    tiles: &[T],
    group: &Int8Group<'_>,
    (first, rows): (usize, usize),
    output: &Output<'_>,
) {
    group.check(rows, tiles.len() * T::COLUMNS);
    // SAFETY: tiles are only made on processors that have the instructions; the line above checked the group.
    unsafe {
        match rows {
            1 => output.store_rows(first, &T::multiply::<1>(tiles, group)),
            2 => output.store_rows(first, &T::multiply::<2>(tiles, group)),
            3 => output.store_rows(first, &T::multiply::<3>(tiles, group)),
            4 => output.store_rows(first, &T::multiply::<4>(tiles, group)),
            5 => output.store_rows(first, &T::multiply::<5>(tiles, group)),
            6 => output.store_rows(first, &T::multiply::<6>(tiles, group)),
            7 => output.store_rows(first, &T::multiply::<7>(tiles, group)),
            _ => output.store_rows(first, &T::multiply::<8>(tiles, group)),
        }
    }
}

/// Where a group's numbers are.
#[derive(Clone, Copy)]
struct Group {
    values: *const i8,
    scales: *const f32,
    scaled_sums: *const f32,
    sums: *const i32,
}

impl Group {
    /// Four numbers of a row, in each of sixteen places.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn word<const ROWS: usize>(self, word: usize, row: usize) -> __m512i {
        // SAFETY: inside the group, which `Int8Group::check` saw to be as wide as the tiles.
        _mm512_set1_epi32(unsafe {
            self.values
                .cast::<i32>()
                .add(word * ROWS + row)
                .read_unaligned()
        })
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn scale<const ROWS: usize>(self, block: usize, row: usize) -> __m512 {
        // SAFETY: as in `word`.
        _mm512_set1_ps(unsafe { *self.scales.add(block * ROWS + row) })
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn scaled_sum<const ROWS: usize>(self, block: usize, row: usize) -> __m512 {
        // SAFETY: as in `word`.
        _mm512_set1_ps(unsafe { *self.scaled_sums.add(block * ROWS + row) })
    }

    /// The sum of half a block, times `factor`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn half_sum<const ROWS: usize>(self, half: usize, row: usize, factor: i32) -> __m512i {
        // SAFETY: as in `word`.
        _mm512_set1_epi32(unsafe { *self.sums.add(half * ROWS + row) } * factor)
    }

    /// The sum of a block, times `factor`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sum<const ROWS: usize>(self, block: usize, row: usize, factor: i32) -> __m512i {
        // SAFETY: as in `word`.
        let sum = unsafe {
            *self.sums.add(2 * block * ROWS + row) + *self.sums.add((2 * block + 1) * ROWS + row)
        };
        _mm512_set1_epi32(sum * factor)
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(quad: &Quad) -> __m512i {
    // SAFETY: a quad is 64 bytes.
    unsafe { _mm512_loadu_si512(quad.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn halves(bits: &[u16; LANES]) -> __m512 {
    // SAFETY: 32 bytes.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bits.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx512f")]
fn bytes(bytes: &[u8; LANES]) -> __m512 {
    // SAFETY: 16 bytes.
    _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(unsafe {
        _mm_loadu_si128(bytes.as_ptr().cast())
    }))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn signed_bytes(bytes: &[i8; LANES]) -> __m512 {
    // SAFETY: 16 bytes.
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(unsafe {
        _mm_loadu_si128(bytes.as_ptr().cast())
    }))
}

/// Low and high halves of bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn nibbles(pair: &Quad) -> (__m512i, __m512i) {
    let mask = _mm512_set1_epi8(15);
    let both = load(pair);
    (
        _mm512_and_si512(both, mask),
        _mm512_and_si512(_mm512_srli_epi16(both, 4), mask),
    )
}

/// A kernel for tiles of one type: `$tile` adds one tile's products to the sums of `ROWS` rows.
macro_rules! kernel {
    ($type:ty, $columns:expr, $tile:ident) => {
        impl Multiply for $type {
            const COLUMNS: usize = $columns;

            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
            unsafe fn multiply<const ROWS: usize>(
                tiles: &[Self],
                group: &Int8Group<'_>,
            ) -> [[f32; LANES]; ROWS] {
                let group = Group {
                    values: group.values.as_ptr(),
                    scales: group.scales.as_ptr(),
                    scaled_sums: group.scaled_sums.as_ptr(),
                    sums: group.sums.as_ptr(),
                };
                let mut totals = [_mm512_setzero_ps(); ROWS];
                for (index, tile) in tiles.iter().enumerate() {
                    // SAFETY: this function's own contract.
                    unsafe {
                        $tile::<ROWS>(tile, index * Self::COLUMNS / BLOCK, group, &mut totals)
                    };
                }
                let mut sums = [[0.0f32; LANES]; ROWS];
                for (sums, totals) in sums.iter_mut().zip(totals) {
                    // SAFETY: sixteen numbers.
                    unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), totals) };
                }
                sums
            }
        }
    };
}

kernel!(TileQ8_0, 64, q8_0);
kernel!(TileQ4_0, 64, q4_0);
kernel!(TileQ4K, 256, q4k);
kernel!(TileQ5K, 256, q5k);
kernel!(TileQ6K, 256, q6k);

/// `totals += sums * (weights' scale * rows' scale)` of one block.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add_scaled<const ROWS: usize>(
    group: Group,
    block: usize,
    scale: __m512,
    sums: &[__m512i; ROWS],
    totals: &mut [__m512; ROWS],
) {
    for row in 0..ROWS {
        // SAFETY: the caller's contract.
        let scale = _mm512_mul_ps(scale, unsafe { group.scale::<ROWS>(block, row) });
        totals[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[row]), scale, totals[row]);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn q8_0<const ROWS: usize>(
    tile: &TileQ8_0,
    first_block: usize,
    group: Group,
    totals: &mut [__m512; ROWS],
) {
    for half in 0..2 {
        let block = first_block + half;
        let mut sums = [_mm512_setzero_si512(); ROWS];
        // SAFETY: the caller's contract, here and below.
        unsafe {
            for row in 0..ROWS {
                sums[row] = group.sum::<ROWS>(block, row, -128);
            }
            for word in 0..8 {
                let weights = load(&tile.values[half * 8 + word]);
                for row in 0..ROWS {
                    sums[row] = _mm512_dpbusd_epi32(
                        sums[row],
                        weights,
                        group.word::<ROWS>(block * 8 + word, row),
                    );
                }
            }
            add_scaled(group, block, halves(&tile.scales[half]), &sums, totals);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn q4_0<const ROWS: usize>(
    tile: &TileQ4_0,
    first_block: usize,
    group: Group,
    totals: &mut [__m512; ROWS],
) {
    for half in 0..2 {
        let block = first_block + half;
        let mut sums = [_mm512_setzero_si512(); ROWS];
        // SAFETY: the caller's contract, here and below.
        unsafe {
            for row in 0..ROWS {
                sums[row] = group.sum::<ROWS>(block, row, -8);
            }
            for pair in 0..4 {
                let (low, high) = nibbles(&tile.values[half * 4 + pair]);
                let word = block * 8 + pair * 2;
                for row in 0..ROWS {
                    sums[row] = _mm512_dpbusd_epi32(sums[row], low, group.word::<ROWS>(word, row));
                    sums[row] =
                        _mm512_dpbusd_epi32(sums[row], high, group.word::<ROWS>(word + 1, row));
                }
            }
            add_scaled(group, block, halves(&tile.scales[half]), &sums, totals);
        }
    }
}

/// `totals += sums * scale - min` of one of eight blocks.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add_scaled_less_min<const ROWS: usize>(
    group: Group,
    block: usize,
    scale: __m512,
    min: __m512,
    sums: &[__m512i; ROWS],
    totals: &mut [__m512; ROWS],
) {
    // SAFETY: the caller's contract, here and below.
    unsafe {
        add_scaled(group, block, scale, sums, totals);
        for row in 0..ROWS {
            totals[row] = _mm512_fnmadd_ps(min, group.scaled_sum::<ROWS>(block, row), totals[row]);
        }
    }
}

/// The scales and minima of eight blocks, a byte each.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct SubScales {
    scales: [[u8; LANES]; 8],
    mins: [[u8; LANES]; 8],
}

impl SubScales {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn new(scales: &Scales) -> Self {
        let [scales, mins, low] = &scales.packed;
        let (scales, mins, low) = (load(scales), load(mins), load(low));
        let six = _mm512_set1_epi8(63);
        let nibble = _mm512_set1_epi8(15);
        let unpacked = [
            _mm512_and_si512(scales, six),
            _mm512_or_si512(_mm512_and_si512(low, nibble), top_bits(scales)),
            _mm512_and_si512(mins, six),
            _mm512_or_si512(
                _mm512_and_si512(_mm512_srli_epi16(low, 4), nibble),
                top_bits(mins),
            ),
        ];
        // SAFETY: both are 256 bytes, of which every value is one of each type.
        unsafe { std::mem::transmute::<[__m512i; 4], Self>(unpacked) }
    }
}

/// The two top bits of each byte, where they are in a number of six.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn top_bits(bytes: __m512i) -> __m512i {
    _mm512_and_si512(_mm512_srli_epi16(bytes, 2), _mm512_set1_epi8(48))
}

/// The scale and minimum of one of eight blocks.
#[inline]
#[target_feature(enable = "avx512f")]
fn scale_and_min(scales: &Scales, each: &SubScales, sub: usize) -> (__m512, __m512) {
    (
        _mm512_mul_ps(halves(&scales.scale), bytes(&each.scales[sub])),
        _mm512_mul_ps(halves(&scales.min), bytes(&each.mins[sub])),
    )
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn q4k<const ROWS: usize>(
    tile: &TileQ4K,
    first_block: usize,
    group: Group,
    totals: &mut [__m512; ROWS],
) {
    let scales = SubScales::new(&tile.scales);
    for sub in 0..8 {
        let block = first_block + sub;
        let mut sums = [_mm512_setzero_si512(); ROWS];
        // SAFETY: the caller's contract, here and below.
        unsafe {
            for pair in 0..4 {
                let (low, high) = nibbles(&tile.values[sub * 4 + pair]);
                let word = block * 8 + pair * 2;
                for row in 0..ROWS {
                    sums[row] = _mm512_dpbusd_epi32(sums[row], low, group.word::<ROWS>(word, row));
                    sums[row] =
                        _mm512_dpbusd_epi32(sums[row], high, group.word::<ROWS>(word + 1, row));
                }
            }
            let (scale, min) = scale_and_min(&tile.scales, &scales, sub);
            add_scaled_less_min(group, block, scale, min, &sums, totals);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn q5k<const ROWS: usize>(
    tile: &TileQ5K,
    first_block: usize,
    group: Group,
    totals: &mut [__m512; ROWS],
) {
    let bit = _mm512_set1_epi8(16);
    let scales = SubScales::new(&tile.scales);
    for (sub, weights) in tile.blocks.iter().enumerate() {
        let block = first_block + sub;
        let mut sums = [_mm512_setzero_si512(); ROWS];
        // Bits of the eight words, moved one further for each so that bit 4 is the next word's.
        let mut high_bits = load(&weights.high);
        // SAFETY: the caller's contract, here and below.
        unsafe {
            for pair in 0..4 {
                let (low, high) = nibbles(&weights.values[pair]);
                let low =
                    _mm512_or_si512(low, _mm512_and_si512(_mm512_slli_epi16(high_bits, 4), bit));
                let high =
                    _mm512_or_si512(high, _mm512_and_si512(_mm512_slli_epi16(high_bits, 3), bit));
                high_bits = _mm512_srli_epi16(high_bits, 2);
                let word = block * 8 + pair * 2;
                for row in 0..ROWS {
                    sums[row] = _mm512_dpbusd_epi32(sums[row], low, group.word::<ROWS>(word, row));
                    sums[row] =
                        _mm512_dpbusd_epi32(sums[row], high, group.word::<ROWS>(word + 1, row));
                }
            }
            let (scale, min) = scale_and_min(&tile.scales, &scales, sub);
            add_scaled_less_min(group, block, scale, min, &sums, totals);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn q6k<const ROWS: usize>(
    tile: &TileQ6K,
    first_block: usize,
    group: Group,
    totals: &mut [__m512; ROWS],
) {
    let bits = _mm512_set1_epi8(48);
    let tile_scale = halves(&tile.scale);
    for (sub, block) in tile.blocks.iter().enumerate() {
        let half = first_block * 2 + sub;
        let mut sums = [_mm512_setzero_si512(); ROWS];
        let high = load(&block.high);
        let (a, b) = nibbles(&block.values[0]);
        let (c, d) = nibbles(&block.values[1]);
        let weights = [
            _mm512_or_si512(a, _mm512_and_si512(_mm512_slli_epi16(high, 4), bits)),
            _mm512_or_si512(b, _mm512_and_si512(_mm512_slli_epi16(high, 2), bits)),
            _mm512_or_si512(c, _mm512_and_si512(high, bits)),
            _mm512_or_si512(d, _mm512_and_si512(_mm512_srli_epi16(high, 2), bits)),
        ];
        // SAFETY: the caller's contract, here and below.
        unsafe {
            for row in 0..ROWS {
                sums[row] = group.half_sum::<ROWS>(half, row, -32);
            }
            for (word, weights) in weights.into_iter().enumerate() {
                for row in 0..ROWS {
                    sums[row] = _mm512_dpbusd_epi32(
                        sums[row],
                        weights,
                        group.word::<ROWS>(half * 4 + word, row),
                    );
                }
            }
            let scale = _mm512_mul_ps(tile_scale, signed_bytes(&tile.scales[sub]));
            add_scaled(group, half / 2, scale, &sums, totals);
        }
    }
}
