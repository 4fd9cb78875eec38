//! The tiles: how sixteen rows' blocks lie in memory, and back to numbers.
//!
//! A tile's bytes are in the order in which its kernel reads them, scales first. Memory that is read strictly forward comes
//! half as fast again as with one jump back in each tile.
//!
//! # Source
//! The blocks are those of GGUF files.

use bytemuck::Zeroable;
use half::f16;

use crate::model::simd::LANES;

/// Four bytes of each of sixteen rows.
pub(super) type Quad = [u8; 4 * LANES];

/// Sixteen rows of one type of block.
pub(super) trait Tile: Copy + Zeroable {
    /// Columns of a tile.
    const COLUMNS: usize;
    /// Columns of a block in the file.
    const BLOCK_COLUMNS: usize;
    /// Bytes of a block in the file.
    const BLOCK_BYTES: usize;

    /// Takes over the `index`th block of a row.
    fn set(&mut self, lane: usize, index: usize, block: &[u8]);

    /// A number.
    fn get(&self, lane: usize, column: usize) -> f32;
}

fn f16_bits(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[0], bytes[1]])
}

fn to_f32(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// Puts a value below 16 where two columns share a byte, the second four columns of eight in the high half.
fn set_nibble(pair: &mut Quad, lane: usize, column: usize, value: u8) {
    pair[lane * 4 + column % 4] |= value << (column % 8 / 4 * 4);
}

fn nibble(pair: &Quad, lane: usize, column: usize) -> u8 {
    (pair[lane * 4 + column % 4] >> (column % 8 / 4 * 4)) & 15
}

/// `scale * value`, blocks of 32; values are stored plus 128.
#[derive(Clone, Copy, Zeroable)]
#[repr(C, align(64))]
pub(super) struct TileQ8_0 {
    pub(super) scales: [[u16; LANES]; 2],
    pub(super) values: [Quad; 16],
}

impl Tile for TileQ8_0 {
    const COLUMNS: usize = 64;
    const BLOCK_COLUMNS: usize = 32;
    const BLOCK_BYTES: usize = 34;

    fn set(&mut self, lane: usize, index: usize, block: &[u8]) {
        self.scales[index][lane] = f16_bits(block);
        for (k, &value) in block[2..].iter().enumerate() {
            self.values[index * 8 + k / 4][lane * 4 + k % 4] = value.wrapping_add(128);
        }
    }

    fn get(&self, lane: usize, column: usize) -> f32 {
        let value = self.values[column / 4][lane * 4 + column % 4];
        to_f32(self.scales[column / 32][lane]) * (f32::from(value) - 128.0)
    }
}

/// `scale * (value - 8)`, blocks of 32.
#[derive(Clone, Copy, Zeroable)]
#[repr(C, align(64))]
pub(super) struct TileQ4_0 {
    pub(super) scales: [[u16; LANES]; 2],
    pub(super) values: [Quad; 8],
}

impl Tile for TileQ4_0 {
    const COLUMNS: usize = 64;
    const BLOCK_COLUMNS: usize = 32;
    const BLOCK_BYTES: usize = 18;

    fn set(&mut self, lane: usize, index: usize, block: &[u8]) {
        self.scales[index][lane] = f16_bits(block);
        for (k, &byte) in block[2..].iter().enumerate() {
            let pairs = &mut self.values[index * 4..][..4];
            set_nibble(&mut pairs[k / 8], lane, k, byte & 15);
            set_nibble(&mut pairs[2 + k / 8], lane, k, byte >> 4);
        }
    }

    fn get(&self, lane: usize, column: usize) -> f32 {
        let value = nibble(&self.values[column / 8], lane, column);
        to_f32(self.scales[column / 32][lane]) * (f32::from(value) - 8.0)
    }
}

/// Scales and minima of eight blocks of 32, as Q4_K and Q5_K have them: six bits each, `scale * scales[i]` and
/// `min * mins[i]`.
#[derive(Clone, Copy, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Scales {
    /// The file's twelve bytes, four to a quad, each of sixteen rows: with a scale and, above it, the two high bits of the
    /// scale four further; the same of the minima; with the low bits of the last four scales and, above them, of the last
    /// four minima.
    pub(super) packed: [Quad; 3],
    pub(super) scale: [u16; LANES],
    pub(super) min: [u16; LANES],
}

impl Scales {
    /// From the first 16 bytes of a block.
    fn set(&mut self, lane: usize, block: &[u8]) {
        self.scale[lane] = f16_bits(block);
        self.min[lane] = f16_bits(&block[2..]);
        for (index, &byte) in block[4..16].iter().enumerate() {
            self.packed[index / 4][index % 4 * LANES + lane] = byte;
        }
    }

    /// Six bits each of one of the eight.
    fn scale_and_min(&self, lane: usize, sub: usize) -> (u8, u8) {
        let byte = |index: usize| self.packed[index / 4][index % 4 * LANES + lane];
        if sub < 4 {
            return (byte(sub) & 63, byte(sub + 4) & 63);
        }
        let low = byte(sub + 4);
        (
            (low & 15) | (byte(sub - 4) >> 6 << 4),
            (low >> 4) | (byte(sub) >> 6 << 4),
        )
    }

    fn apply(&self, lane: usize, column: usize, value: u8) -> f32 {
        let (scale, min) = self.scale_and_min(lane, column / 32);
        let scale = to_f32(self.scale[lane]) * f32::from(scale);
        scale * f32::from(value) - to_f32(self.min[lane]) * f32::from(min)
    }
}

/// Columns and their values below 16, as Q4_K and Q5_K have them: of each 32 bytes first the low halves.
fn k_nibbles(bytes: &[u8]) -> impl Iterator<Item = (usize, u8)> {
    bytes.iter().enumerate().flat_map(|(at, &byte)| {
        let column = at / 32 * 64 + at % 32;
        [(column, byte & 15), (column + 32, byte >> 4)]
    })
}

/// `scale * value - min`, blocks of 32 in 256.
#[derive(Clone, Copy, Zeroable)]
#[repr(C, align(64))]
pub(super) struct TileQ4K {
    pub(super) scales: Scales,
    pub(super) values: [Quad; 32],
}

impl Tile for TileQ4K {
    const COLUMNS: usize = 256;
    const BLOCK_COLUMNS: usize = 256;
    const BLOCK_BYTES: usize = 144;

    fn set(&mut self, lane: usize, _index: usize, block: &[u8]) {
        self.scales.set(lane, block);
        for (column, value) in k_nibbles(&block[16..]) {
            set_nibble(&mut self.values[column / 8], lane, column, value);
        }
    }

    fn get(&self, lane: usize, column: usize) -> f32 {
        let value = nibble(&self.values[column / 8], lane, column);
        self.scales.apply(lane, column, value)
    }
}

/// As `TileQ4K` with a fifth bit.
#[derive(Clone, Copy, Zeroable)]
#[repr(C, align(64))]
pub(super) struct TileQ5K {
    pub(super) scales: Scales,
    pub(super) blocks: [BlockQ5K; 8],
}

/// 32 columns; the fifth bit of a value is bit `column / 4` of the byte of its row and `column % 4`.
#[derive(Clone, Copy, Zeroable)]
#[repr(C)]
pub(super) struct BlockQ5K {
    pub(super) high: Quad,
    pub(super) values: [Quad; 4],
}

impl Tile for TileQ5K {
    const COLUMNS: usize = 256;
    const BLOCK_COLUMNS: usize = 256;
    const BLOCK_BYTES: usize = 176;

    fn set(&mut self, lane: usize, _index: usize, block: &[u8]) {
        self.scales.set(lane, block);
        for (k, &bits) in block[16..48].iter().enumerate() {
            for (sub, block) in self.blocks.iter_mut().enumerate() {
                block.high[lane * 4 + k % 4] |= ((bits >> sub) & 1) << (k / 4);
            }
        }
        for (column, value) in k_nibbles(&block[48..]) {
            let pair = &mut self.blocks[column / 32].values[column % 32 / 8];
            set_nibble(pair, lane, column, value);
        }
    }

    fn get(&self, lane: usize, column: usize) -> f32 {
        let block = &self.blocks[column / 32];
        let high = (block.high[lane * 4 + column % 4] >> (column % 32 / 4)) & 1;
        let low = nibble(&block.values[column % 32 / 8], lane, column);
        self.scales.apply(lane, column, low | high << 4)
    }
}

/// `scale * (value - 32)`, blocks of 16 in 256.
#[derive(Clone, Copy, Zeroable)]
#[repr(C, align(64))]
pub(super) struct TileQ6K {
    pub(super) scales: [[i8; LANES]; 16],
    pub(super) scale: [u16; LANES],
    pub(super) blocks: [BlockQ6K; 16],
}

/// Sixteen columns, from a cache line's beginning on; the high bits of a value are bits `column / 4 * 2` and the next of the
/// byte of its row and `column % 4`.
#[derive(Clone, Copy, Zeroable)]
#[repr(C, align(64))]
pub(super) struct BlockQ6K {
    pub(super) high: Quad,
    pub(super) values: [Quad; 2],
}

impl Tile for TileQ6K {
    const COLUMNS: usize = 256;
    const BLOCK_COLUMNS: usize = 256;
    const BLOCK_BYTES: usize = 210;

    fn set(&mut self, lane: usize, _index: usize, block: &[u8]) {
        let (low, rest) = block.split_at(128);
        let (high, rest) = rest.split_at(64);
        for (scales, &byte) in self.scales.iter_mut().zip(rest) {
            scales[lane] = byte.cast_signed();
        }
        self.scale[lane] = f16_bits(&rest[16..]);
        for column in 0..256 {
            let (half, quarter, j) = (column / 128, column % 128 / 32, column % 32);
            let low = (low[half * 64 + quarter % 2 * 32 + j] >> (quarter / 2 * 4)) & 15;
            let high = (high[half * 32 + j] >> (quarter * 2)) & 3;
            let block = &mut self.blocks[column / 16];
            set_nibble(&mut block.values[column % 16 / 8], lane, column, low);
            block.high[lane * 4 + column % 4] |= high << (column % 16 / 4 * 2);
        }
    }

    fn get(&self, lane: usize, column: usize) -> f32 {
        let block = &self.blocks[column / 16];
        let high = (block.high[lane * 4 + column % 4] >> (column % 16 / 4 * 2)) & 3;
        let low = nibble(&block.values[column % 16 / 8], lane, column);
        let value = f32::from(low | high << 4) - 32.0;
        to_f32(self.scale[lane]) * f32::from(self.scales[column / 16][lane]) * value
    }
}

// A tile is as large as the blocks that it holds, as far as cache lines allow: what is read for a token is what it costs.
const _: () = {
    assert!(size_of::<TileQ8_0>() == 2 * LANES * TileQ8_0::BLOCK_BYTES);
    assert!(size_of::<TileQ4_0>() == 2 * LANES * TileQ4_0::BLOCK_BYTES);
    assert!(size_of::<TileQ4K>() == LANES * TileQ4K::BLOCK_BYTES);
    assert!(size_of::<TileQ5K>() == LANES * TileQ5K::BLOCK_BYTES);
    assert!(size_of::<TileQ6K>() == LANES * TileQ6K::BLOCK_BYTES + 32);
};
