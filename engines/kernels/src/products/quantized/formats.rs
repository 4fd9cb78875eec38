//! The formats of GGUF's blocks: the positions of scales and values in their bytes.
//!
//! # Source
//! The block structures and dequantization functions in ggml's `ggml-common.h` and `ggml-quants.c`.

use super::heads::{Halves, Head, Nibbles, Signed, SixBits};
use super::tiles::{Quads, Values};
use crate::simd::LANES;

/// How blocks of one type are converted to tiles.
pub(super) trait Format: Copy + Send + Sync + 'static {
    /// Scales of a tile.
    type Head: Head;
    /// Values of a tile.
    type Values: Quads;
    /// Columns of a block in the file.
    const BLOCK_COLUMNS: usize;
    /// Bytes of a block in the file.
    const BLOCK_BYTES: usize;
    /// Columns of a tile.
    const COLUMNS: usize = 256;
    /// Bits of a value.
    const BITS: usize;
    /// The zero point, which is subtracted from a value.
    const ZERO: i16 = 0;
    /// The numbers that values stand for, plus `ZERO`.
    const TABLE: Option<[u8; 16]> = None;

    /// The values of a block, in the order of the columns.
    fn codes(block: &[u8], codes: &mut [u8]);
    /// Stores a block's scales in the head.
    fn set_head(head: &mut Self::Head, lane: usize, index: usize, block: &[u8]);
}

fn half_bits(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[0], bytes[1]])
}

/// The low half of each byte, and sixteen columns later the high half.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact(16).zip(codes.chunks_exact_mut(32)) {
        for (k, &byte) in bytes.iter().enumerate() {
            codes[k] = byte & 15;
            codes[k + 16] = byte >> 4;
        }
    }
}

/// As [`nibbles`], with the fifth bit of each column in the first four bytes.
fn five_bits(bytes: &[u8], codes: &mut [u8]) {
    nibbles(&bytes[4..], codes);
    for (k, code) in codes.iter_mut().enumerate() {
        *code |= ((bytes[k / 8] >> (k % 8)) & 1) << 4;
    }
}

/// The order of Q4_K and Q5_K: per 32 bytes, first the low halves.
fn k_nibbles(bytes: &[u8], codes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        for (k, &byte) in bytes.iter().enumerate() {
            codes[k] = byte & 15;
            codes[k + 32] = byte >> 4;
        }
    }
}

/// The order of Q2_K and Q3_K: per 32 bytes, first the lowest two bits.
fn k_pairs(bytes: &[u8], codes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (k, code) in codes.iter_mut().enumerate() {
            *code = (bytes[k % 32] >> (k / 32 * 2)) & 3;
        }
    }
}

/// Formats with blocks of 32 that begin with an f16 scale, and with an f16 minimum if they have one.
macro_rules! simple_format {
    ($(#[$meta:meta])* $name:ident, $numbers:literal numbers, $bytes:literal bytes, $quads:literal quads, zero $zero:expr, table $table:expr, $codes:expr) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        impl Format for $name {
            type Head = Halves<{ 2 * $numbers }>;
            type Values = Values<{ 2 * $quads }>;
            const BLOCK_COLUMNS: usize = 32;
            const BLOCK_BYTES: usize = $bytes;
            const COLUMNS: usize = 64;
            const BITS: usize = $quads;
            const ZERO: i16 = $zero;
            const TABLE: Option<[u8; 16]> = $table;

            fn codes(block: &[u8], codes: &mut [u8]) {
                let codes_of: fn(&[u8], &mut [u8]) = $codes;
                codes_of(&block[2 * $numbers..], codes);
            }

            fn set_head(head: &mut Self::Head, lane: usize, index: usize, block: &[u8]) {
                head.numbers[index][lane] = half_bits(block);
                if let Some(mins) = head.numbers.get_mut(2 + index) {
                    // The file's minimum is added, ours is subtracted.
                    mins[lane] = half_bits(&block[2..]) ^ 0x8000;
                }
            }
        }
    };
}

simple_format!(
    /// `scale * (value - 8)`.
    Q4_0, 1 numbers, 18 bytes, 4 quads, zero 8, table None, nibbles
);
simple_format!(
    /// `scale * value + min`.
    Q4_1, 2 numbers, 20 bytes, 4 quads, zero 0, table None, nibbles
);
simple_format!(
    /// `scale * (value - 16)`.
    Q5_0, 1 numbers, 22 bytes, 5 quads, zero 16, table None, five_bits
);
simple_format!(
    /// `scale * value + min`, with five bits.
    Q5_1, 2 numbers, 24 bytes, 5 quads, zero 0, table None, five_bits
);
simple_format!(
    /// `scale * value`; values are stored plus 128.
    Q8_0, 1 numbers, 34 bytes, 8 quads, zero 128, table None, |bytes, codes| {
        for (code, &byte) in codes.iter_mut().zip(bytes) {
            *code = byte ^ 128;
        }
    }
);
simple_format!(
    /// `scale * table[value]`.
    Iq4Nl, 1 numbers, 18 bytes, 4 quads, zero 128, table Some(IQ4_TABLE), nibbles
);

/// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89 and 113, plus 128.
const IQ4_TABLE: [u8; 16] = [
    1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241,
];

/// `scale * table[value]` with a power of two as scale: four-bit floats, with one sign bit.
#[derive(Clone, Copy)]
pub(super) struct Mxfp4;

impl Format for Mxfp4 {
    type Head = Halves<2, true>;
    type Values = Values<8>;
    const BLOCK_COLUMNS: usize = 32;
    const BLOCK_BYTES: usize = 17;
    const COLUMNS: usize = 64;
    const BITS: usize = 4;
    const ZERO: i16 = 12;
    /// Twice 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same below zero, plus 12.
    const TABLE: Option<[u8; 16]> =
        Some([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0]);

    fn codes(block: &[u8], codes: &mut [u8]) {
        nibbles(&block[1..], codes);
    }

    fn set_head(head: &mut Self::Head, lane: usize, index: usize, block: &[u8]) {
        // The byte is the exponent of an f32. The scale is half of that f32, because the table has doubled numbers. The halves of
        // the two smallest are subnormal.
        head.numbers[index][lane] = match block[0] {
            0 => 0x20,
            1 => 0x40,
            exponent => u16::from(exponent - 1) << 7,
        };
    }
}

/// `scale * value - min`, blocks of 16 in 256.
#[derive(Clone, Copy)]
pub(super) struct Q2K;

impl Format for Q2K {
    type Head = Nibbles;
    type Values = Values<16>;
    const BLOCK_COLUMNS: usize = 256;
    const BLOCK_BYTES: usize = 84;
    const BITS: usize = 2;

    fn codes(block: &[u8], codes: &mut [u8]) {
        k_pairs(&block[16..80], codes);
    }

    fn set_head(head: &mut Nibbles, lane: usize, _index: usize, block: &[u8]) {
        for (packed, &byte) in head.packed.iter_mut().zip(block) {
            packed[lane] = byte;
        }
        head.scale[lane] = half_bits(&block[80..]);
        head.min[lane] = half_bits(&block[82..]);
    }
}

/// `scale * (value - 4)`, blocks of 16 in 256.
#[derive(Clone, Copy)]
pub(super) struct Q3K;

impl Format for Q3K {
    type Head = Signed<16>;
    type Values = Values<24>;
    const BLOCK_COLUMNS: usize = 256;
    const BLOCK_BYTES: usize = 110;
    const BITS: usize = 3;
    const ZERO: i16 = 4;

    fn codes(block: &[u8], codes: &mut [u8]) {
        k_pairs(&block[32..96], codes);
        for (column, code) in codes.iter_mut().enumerate() {
            *code |= ((block[column % 32] >> (column / 32)) & 1) << 2;
        }
    }

    fn set_head(head: &mut Signed<16>, lane: usize, _index: usize, block: &[u8]) {
        let packed = &block[96..108];
        for (i, scales) in head.scales.iter_mut().enumerate() {
            let low = (packed[i % 8] >> (i / 8 * 4)) & 15;
            let high = (packed[8 + i % 4] >> (i / 4 * 2)) & 3;
            scales[lane] = (low | high << 4).cast_signed() - 32;
        }
        head.scale[lane] = half_bits(&block[108..]);
    }
}

fn set_six_bits(head: &mut SixBits, lane: usize, block: &[u8]) {
    head.scale[lane] = half_bits(block);
    head.min[lane] = half_bits(&block[2..]);
    for (index, &byte) in block[4..16].iter().enumerate() {
        head.packed[index / 4][index % 4 * LANES + lane] = byte;
    }
}

/// `scale * value - min`, blocks of 32 in 256.
#[derive(Clone, Copy)]
pub(super) struct Q4K;

impl Format for Q4K {
    type Head = SixBits;
    type Values = Values<32>;
    const BLOCK_COLUMNS: usize = 256;
    const BLOCK_BYTES: usize = 144;
    const BITS: usize = 4;

    fn codes(block: &[u8], codes: &mut [u8]) {
        k_nibbles(&block[16..], codes);
    }

    fn set_head(head: &mut SixBits, lane: usize, _index: usize, block: &[u8]) {
        set_six_bits(head, lane, block);
    }
}

/// As Q4_K with a fifth bit.
#[derive(Clone, Copy)]
pub(super) struct Q5K;

impl Format for Q5K {
    type Head = SixBits;
    type Values = Values<40>;
    const BLOCK_COLUMNS: usize = 256;
    const BLOCK_BYTES: usize = 176;
    const BITS: usize = 5;

    fn codes(block: &[u8], codes: &mut [u8]) {
        k_nibbles(&block[48..], codes);
        for (column, code) in codes.iter_mut().enumerate() {
            *code |= ((block[16 + column % 32] >> (column / 32)) & 1) << 4;
        }
    }

    fn set_head(head: &mut SixBits, lane: usize, _index: usize, block: &[u8]) {
        set_six_bits(head, lane, block);
    }
}

/// `scale * (value - 32)`, blocks of 16 in 256.
#[derive(Clone, Copy)]
pub(super) struct Q6K;

impl Format for Q6K {
    type Head = Signed<16>;
    type Values = Values<48>;
    const BLOCK_COLUMNS: usize = 256;
    const BLOCK_BYTES: usize = 210;
    const BITS: usize = 6;
    const ZERO: i16 = 32;

    fn codes(block: &[u8], codes: &mut [u8]) {
        for (column, code) in codes.iter_mut().enumerate() {
            let (half, quarter, j) = (column / 128, column % 128 / 32, column % 32);
            let low = (block[half * 64 + quarter % 2 * 32 + j] >> (quarter / 2 * 4)) & 15;
            let high = (block[128 + half * 32 + j] >> (quarter * 2)) & 3;
            *code = low | high << 4;
        }
    }

    fn set_head(head: &mut Signed<16>, lane: usize, _index: usize, block: &[u8]) {
        for (scales, &byte) in head.scales.iter_mut().zip(&block[192..208]) {
            scales[lane] = byte.cast_signed();
        }
        head.scale[lane] = half_bits(&block[208..]);
    }
}

/// `scale * table[value]`, blocks of 32 in 256.
#[derive(Clone, Copy)]
pub(super) struct Iq4Xs;

impl Format for Iq4Xs {
    type Head = Signed<8>;
    type Values = Values<32>;
    const BLOCK_COLUMNS: usize = 256;
    const BLOCK_BYTES: usize = 136;
    const BITS: usize = 4;
    const ZERO: i16 = 128;
    const TABLE: Option<[u8; 16]> = Some(IQ4_TABLE);

    fn codes(block: &[u8], codes: &mut [u8]) {
        nibbles(&block[8..], codes);
    }

    fn set_head(head: &mut Signed<8>, lane: usize, _index: usize, block: &[u8]) {
        let high_bits = half_bits(&block[2..]);
        for (i, scales) in head.scales.iter_mut().enumerate() {
            let low = (block[4 + i / 2] >> (i % 2 * 4)) & 15;
            let high = ((high_bits >> (2 * i)) & 3) as u8;
            scales[lane] = (low | high << 4).cast_signed() - 32;
        }
        head.scale[lane] = half_bits(block);
    }
}
