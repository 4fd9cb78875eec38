//! The tiles: the memory layout of sixteen rows' blocks, and the conversion back to numbers.
//!
//! A tile's bytes are in the order in which its kernel reads them, scales first. Strictly sequential reads are 1.5 times as
//! fast as reads with one jump back per tile.

use bytemuck::Zeroable;

use super::formats::Format;
use super::heads::Head;
use super::int8::BLOCK;
use crate::simd::LANES;

/// Four bytes of each of sixteen rows.
pub(super) type Quad = [u8; 4 * LANES];

/// Sixteen rows of blocks of one format.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Tile<F: Format> {
    pub(super) head: F::Head,
    pub(super) values: F::Values,
}

#[expect(unsafe_code, reason = "a derived implementation asks it of the format")]
// SAFETY: both parts may be zero.
unsafe impl<F: Format> Zeroable for Tile<F> {}

/// Quads of a tile's values; [`quads`] of them for each 32 columns.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Values<const N: usize>([Quad; N]);

#[expect(unsafe_code, reason = "bytemuck has no array of any length")]
// SAFETY: bytes may be zero.
unsafe impl<const N: usize> Zeroable for Values<N> {}

/// [`Values`] of some number of quads.
pub(super) trait Quads: Copy + Zeroable + Send + Sync {
    fn quads(&self) -> &[Quad];
    fn quads_mut(&mut self) -> &mut [Quad];
}

impl<const N: usize> Quads for Values<N> {
    #[inline(always)]
    fn quads(&self) -> &[Quad] {
        &self.0
    }

    fn quads_mut(&mut self) -> &mut [Quad] {
        &mut self.0
    }
}

impl<F: Format> Tile<F> {
    /// Checks that a tile has the quads of its columns, which kernels rely on; that blocks are whole units of 32; and that a
    /// tile is about as large as its blocks, because the bytes read per token determine its cost.
    pub(super) const IS_SOUND: bool = size_of::<F::Values>()
        == F::COLUMNS / BLOCK * quads(F::BITS) * size_of::<Quad>()
        && F::BLOCK_COLUMNS % BLOCK == 0
        && size_of::<Self>() * 16 <= 17 * LANES * (F::COLUMNS / F::BLOCK_COLUMNS) * F::BLOCK_BYTES;

    /// Stores the `index`th block of a row.
    pub(super) fn set(&mut self, lane: usize, index: usize, block: &[u8]) {
        let mut codes = [0; 256];
        let codes = &mut codes[..F::BLOCK_COLUMNS];
        F::codes(block, codes);
        F::set_head(&mut self.head, lane, index, block);
        // Four columns have the same places, so they are moved as one word.
        let first = index * F::BLOCK_COLUMNS / BLOCK;
        for (unit, codes) in codes.chunks_exact(BLOCK).enumerate() {
            let quads = &mut self.values.quads_mut()[(first + unit) * quads(F::BITS)..];
            for (word, codes) in codes.as_chunks().0.iter().enumerate() {
                let codes = u32::from_le_bytes(*codes);
                for place in places(F::BITS, 4 * word) {
                    let mask = u32::from_le_bytes([mask(place.bits); 4]);
                    let part = (codes >> place.from_bit & mask) << place.at_bit;
                    let (words, _) = quads[place.quad].as_chunks_mut();
                    words[lane] = (u32::from_le_bytes(words[lane]) | part).to_le_bytes();
                }
            }
        }
    }

    /// A number.
    pub(super) fn get(&self, lane: usize, column: usize) -> f32 {
        let quads = &self.values.quads()[column / BLOCK * quads(F::BITS)..];
        let mut code = 0;
        for place in places(F::BITS, column % BLOCK) {
            let part =
                (quads[place.quad][lane * 4 + column % 4] >> place.at_bit) & mask(place.bits);
            code |= part << place.from_bit;
        }
        let value = match F::TABLE {
            Some(table) => table[usize::from(code)],
            None => code,
        };
        let value = f32::from(i16::from(value) - F::ZERO);
        let (scale, min) = self.head.get(lane, column);
        scale * value - min
    }
}

/// The number of quads for 32 columns of values with `bits` bits.
pub(super) const fn quads(bits: usize) -> usize {
    bits
}

/// The position of some bits of a value in the quads of its 32 columns.
#[derive(Clone, Copy)]
struct Place {
    quad: usize,
    at_bit: usize,
    from_bit: usize,
    bits: usize,
}

fn mask(bits: usize) -> u8 {
    u8::MAX >> (8 - bits)
}

/// The positions of the bits of a column's value. A word is four columns that share bytes. A quad holds two bits of four words,
/// or four bits of two. A third or fifth bit of all eight words is in a quad before them. The fifth and sixth bits of four words
/// are in a quad before theirs, so that sixteen columns are together.
fn places(bits: usize, column: usize) -> impl Iterator<Item = Place> {
    let word = column / 4;
    let place = |quad, at_bit, from_bit, bits| Place {
        quad,
        at_bit,
        from_bit,
        bits,
    };
    let (low, high) = match bits {
        2 => (place(word / 4, word % 4 * 2, 0, 2), None),
        3 => (
            place(1 + word / 4, word % 4 * 2, 0, 2),
            Some(place(0, word, 2, 1)),
        ),
        4 => (place(word / 2, word % 2 * 4, 0, 4), None),
        5 => (
            place(1 + word / 2, word % 2 * 4, 0, 4),
            Some(place(0, word, 4, 1)),
        ),
        6 => {
            let (half, word) = (word / 4, word % 4);
            (
                place(half * 3 + 1 + word / 2, word % 2 * 4, 0, 4),
                Some(place(half * 3, word * 2, 4, 2)),
            )
        }
        _ => (place(word, 0, 0, 8), None),
    };
    std::iter::once(low).chain(high)
}
