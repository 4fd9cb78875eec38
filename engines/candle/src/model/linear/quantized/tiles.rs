//! The tiles: how sixteen rows' blocks lie in memory, and back to numbers.
//!
//! # Source
//! The blocks are those of GGUF files.

use half::f16;

use crate::model::simd::LANES;

/// Four bytes of each of sixteen rows.
pub(super) type Quad = [u8; 4 * LANES];

/// Sixteen rows of one type of block.
pub(super) trait Tile: Clone {
    /// Columns of a tile.
    const COLUMNS: usize;
    /// Columns of a block in the file.
    const BLOCK_COLUMNS: usize;
    /// Bytes of a block in the file.
    const BLOCK_BYTES: usize;
    /// A tile of zeros.
    const ZERO: Self;

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

/// Puts a value below 16 of column `column` where two columns share a byte, the second four columns in the high half.
fn set_nibble(pairs: &mut [Quad], lane: usize, column: usize, value: u8) {
    pairs[column / 8][lane * 4 + column % 4] |= value << (column % 8 / 4 * 4);
}

fn nibble(pairs: &[Quad], lane: usize, column: usize) -> u8 {
    (pairs[column / 8][lane * 4 + column % 4] >> (column % 8 / 4 * 4)) & 15
}

/// `scale * value`, blocks of 32; values are stored plus 128.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct TileQ8_0 {
    pub(super) values: [Quad; 16],
    pub(super) scales: [[u16; LANES]; 2],
}

impl Tile for TileQ8_0 {
    const COLUMNS: usize = 64;
    const BLOCK_COLUMNS: usize = 32;
    const BLOCK_BYTES: usize = 34;
    const ZERO: Self = Self {
        values: [[0; 4 * LANES]; 16],
        scales: [[0; LANES]; 2],
    };

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
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct TileQ4_0 {
    pub(super) values: [Quad; 8],
    pub(super) scales: [[u16; LANES]; 2],
}

impl Tile for TileQ4_0 {
    const COLUMNS: usize = 64;
    const BLOCK_COLUMNS: usize = 32;
    const BLOCK_BYTES: usize = 18;
    const ZERO: Self = Self {
        values: [[0; 4 * LANES]; 8],
        scales: [[0; LANES]; 2],
    };

    fn set(&mut self, lane: usize, index: usize, block: &[u8]) {
        self.scales[index][lane] = f16_bits(block);
        for (k, &byte) in block[2..].iter().enumerate() {
            set_nibble(&mut self.values, lane, index * 32 + k, byte & 15);
            set_nibble(&mut self.values, lane, index * 32 + 16 + k, byte >> 4);
        }
    }

    fn get(&self, lane: usize, column: usize) -> f32 {
        to_f32(self.scales[column / 32][lane])
            * (f32::from(nibble(&self.values, lane, column)) - 8.0)
    }
}

/// Scales and minima of eight blocks of 32, as Q4_K and Q5_K have them.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct Scales {
    pub(super) scales: [[u8; LANES]; 8],
    pub(super) mins: [[u8; LANES]; 8],
    pub(super) scale: [u16; LANES],
    pub(super) min: [u16; LANES],
}

impl Scales {
    const ZERO: Self = Self {
        scales: [[0; LANES]; 8],
        mins: [[0; LANES]; 8],
        scale: [0; LANES],
        min: [0; LANES],
    };

    /// From the first 16 bytes of a block.
    fn set(&mut self, lane: usize, block: &[u8]) {
        self.scale[lane] = f16_bits(block);
        self.min[lane] = f16_bits(&block[2..]);
        let packed = &block[4..16];
        for j in 0..4 {
            self.scales[j][lane] = packed[j] & 63;
            self.mins[j][lane] = packed[j + 4] & 63;
            self.scales[j + 4][lane] = (packed[j + 8] & 15) | ((packed[j] >> 6) << 4);
            self.mins[j + 4][lane] = (packed[j + 8] >> 4) | ((packed[j + 4] >> 6) << 4);
        }
    }

    fn apply(&self, lane: usize, column: usize, value: u8) -> f32 {
        let scale = to_f32(self.scale[lane]) * f32::from(self.scales[column / 32][lane]);
        scale * f32::from(value) - to_f32(self.min[lane]) * f32::from(self.mins[column / 32][lane])
    }
}

/// Puts 64 columns of 32 bytes, low halves first, as Q4_K and Q5_K have them.
fn set_k_nibbles(pairs: &mut [Quad], lane: usize, bytes: &[u8]) {
    for (at, &byte) in bytes.iter().enumerate() {
        let column = at / 32 * 64 + at % 32;
        set_nibble(pairs, lane, column, byte & 15);
        set_nibble(pairs, lane, column + 32, byte >> 4);
    }
}

/// `scale * value - min`, blocks of 32 in 256.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct TileQ4K {
    pub(super) values: [Quad; 32],
    pub(super) scales: Scales,
}

impl Tile for TileQ4K {
    const COLUMNS: usize = 256;
    const BLOCK_COLUMNS: usize = 256;
    const BLOCK_BYTES: usize = 144;
    const ZERO: Self = Self {
        values: [[0; 4 * LANES]; 32],
        scales: Scales::ZERO,
    };

    fn set(&mut self, lane: usize, _index: usize, block: &[u8]) {
        self.scales.set(lane, block);
        set_k_nibbles(&mut self.values, lane, &block[16..]);
    }

    fn get(&self, lane: usize, column: usize) -> f32 {
        self.scales
            .apply(lane, column, nibble(&self.values, lane, column))
    }
}

/// As `TileQ4K` with a fifth bit: bit `column % 32 / 4` of the byte of its row and `column % 4`.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct TileQ5K {
    pub(super) values: [Quad; 32],
    pub(super) high: [Quad; 8],
    pub(super) scales: Scales,
}

impl Tile for TileQ5K {
    const COLUMNS: usize = 256;
    const BLOCK_COLUMNS: usize = 256;
    const BLOCK_BYTES: usize = 176;
    const ZERO: Self = Self {
        values: [[0; 4 * LANES]; 32],
        high: [[0; 4 * LANES]; 8],
        scales: Scales::ZERO,
    };

    fn set(&mut self, lane: usize, _index: usize, block: &[u8]) {
        self.scales.set(lane, block);
        for (k, &bits) in block[16..48].iter().enumerate() {
            for sub in 0..8 {
                self.high[sub][lane * 4 + k % 4] |= ((bits >> sub) & 1) << (k / 4);
            }
        }
        set_k_nibbles(&mut self.values, lane, &block[48..]);
    }

    fn get(&self, lane: usize, column: usize) -> f32 {
        let high = (self.high[column / 32][lane * 4 + column % 4] >> (column % 32 / 4)) & 1;
        self.scales
            .apply(lane, column, nibble(&self.values, lane, column) | high << 4)
    }
}

/// `scale * (value - 32)`, blocks of 16 in 256; the high bits of a value are bits `column % 16 / 4 * 2` and the next of
/// the byte of its row and `column % 4`.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct TileQ6K {
    pub(super) values: [Quad; 32],
    pub(super) high: [Quad; 16],
    pub(super) scales: [[i8; LANES]; 16],
    pub(super) scale: [u16; LANES],
}

impl Tile for TileQ6K {
    const COLUMNS: usize = 256;
    const BLOCK_COLUMNS: usize = 256;
    const BLOCK_BYTES: usize = 210;
    const ZERO: Self = Self {
        values: [[0; 4 * LANES]; 32],
        high: [[0; 4 * LANES]; 16],
        scales: [[0; LANES]; 16],
        scale: [0; LANES],
    };

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
            set_nibble(&mut self.values, lane, column, low);
            self.high[column / 16][lane * 4 + column % 4] |= high << (column % 16 / 4 * 2);
        }
    }

    fn get(&self, lane: usize, column: usize) -> f32 {
        let high = (self.high[column / 16][lane * 4 + column % 4] >> (column % 16 / 4 * 2)) & 3;
        let value = f32::from(nibble(&self.values, lane, column) | high << 4) - 32.0;
        to_f32(self.scale[lane]) * f32::from(self.scales[column / 16][lane]) * value
    }
}
