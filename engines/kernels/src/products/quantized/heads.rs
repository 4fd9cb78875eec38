//! The heads of tiles: scales, and minima if a format has them.

#![expect(
    unsafe_code,
    reason = "intrinsics of the processor, which read inside of the heads' arrays"
)]

use bytemuck::Zeroable;
use half::{bf16, f16};

use super::instructions::Instructions;
use super::tiles::Quad;
use crate::simd::LANES;

/// The scales of a tile, and the minima if its format has them.
pub(super) trait Head: Copy + Zeroable + Send + Sync {
    /// Columns that share a scale: 32 or 16.
    const WIDTH: usize;
    /// Whether a minimum is subtracted from each number.
    const HAS_MIN: bool;
    /// The unpacked form that kernels read.
    type Unpacked;

    /// A column's scale and minimum.
    fn get(&self, lane: usize, column: usize) -> (f32, f32);
    fn unpack(&self) -> Self::Unpacked;
    /// The scales and minima of the `at`th `WIDTH` columns, for the rows from `lane` on. Without `HAS_MIN` the minima are
    /// arbitrary.
    ///
    /// # Safety
    /// The processor has the instructions; the tile has these columns, and the rows match a vector.
    unsafe fn vectors<I: Instructions>(
        &self,
        unpacked: &Self::Unpacked,
        at: usize,
        lane: usize,
    ) -> (I::Floats, I::Floats);
}

/// The numbers of the rows from `lane` on, from f16 or from the upper halves of f32.
///
/// # Safety
/// The processor has the instructions, and the rows match a vector.
#[inline(always)]
unsafe fn half_floats<I: Instructions, const UPPER: bool>(
    numbers: &[u16; LANES],
    lane: usize,
) -> I::Floats {
    let start = numbers[lane..].as_ptr();
    // SAFETY: the caller's promise.
    unsafe {
        if UPPER {
            I::load_upper_halves(start)
        } else {
            I::load_halves(start)
        }
    }
}

/// One 16-bit scale for each 32 of 64 columns; if there are four numbers, the others are minima.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Halves<const SCALES: usize, const UPPER: bool = false> {
    /// First scales, then minima: f16, or the upper halves of f32.
    pub(super) numbers: [[u16; LANES]; SCALES],
}

// SAFETY: zero is a valid integer.
unsafe impl<const SCALES: usize, const UPPER: bool> Zeroable for Halves<SCALES, UPPER> {}

impl<const SCALES: usize, const UPPER: bool> Head for Halves<SCALES, UPPER> {
    const WIDTH: usize = 32;
    const HAS_MIN: bool = SCALES > 2;
    type Unpacked = ();

    fn get(&self, lane: usize, column: usize) -> (f32, f32) {
        let number = |index: usize| {
            let bits = self.numbers.get(index).map_or(0, |numbers| numbers[lane]);
            if UPPER {
                bf16::from_bits(bits).to_f32()
            } else {
                f16::from_bits(bits).to_f32()
            }
        };
        (number(column / 32), number(2 + column / 32))
    }

    #[inline(always)]
    fn unpack(&self) {}

    #[inline(always)]
    unsafe fn vectors<I: Instructions>(
        &self,
        _unpacked: &Self::Unpacked,
        at: usize,
        lane: usize,
    ) -> (I::Floats, I::Floats) {
        // SAFETY: the caller's promise.
        unsafe {
            let scale = half_floats::<I, UPPER>(&self.numbers[at], lane);
            if SCALES > 2 {
                (scale, half_floats::<I, UPPER>(&self.numbers[2 + at], lane))
            } else {
                (scale, scale)
            }
        }
    }
}

/// Scales and minima of eight blocks of 32, as in Q4_K and Q5_K: six bits each, `scale * scales[i]` and `min * mins[i]`.
#[derive(Clone, Copy, Zeroable)]
#[repr(C, align(64))]
pub(super) struct SixBits {
    /// The file's twelve bytes, four to a quad, for sixteen rows. The first four hold a scale each, and above it the two high bits
    /// of the scale four places later. The next four hold the same of the minima. The last four hold the low bits of the last four
    /// scales, and above them those of the last four minima.
    pub(super) packed: [Quad; 3],
    pub(super) scale: [u16; LANES],
    pub(super) min: [u16; LANES],
}

/// The scales and minima of eight blocks, one byte each.
#[repr(C, align(64))]
pub(super) struct Bytes {
    pub(super) scales: [Quad; 2],
    pub(super) mins: [Quad; 2],
}

impl Head for SixBits {
    const WIDTH: usize = 32;
    const HAS_MIN: bool = true;
    type Unpacked = Bytes;

    fn get(&self, lane: usize, column: usize) -> (f32, f32) {
        let (bytes, sub) = (self.unpack(), column / 32);
        let of = |half: u16, quads: &[Quad; 2]| {
            f16::from_bits(half).to_f32() * f32::from(quads[sub / 4][sub % 4 * LANES + lane])
        };
        (
            of(self.scale[lane], &bytes.scales),
            of(self.min[lane], &bytes.mins),
        )
    }

    #[inline(always)]
    fn unpack(&self) -> Bytes {
        let [scales, mins, low] = &self.packed;
        let mut bytes = Bytes {
            scales: [[0; 4 * LANES]; 2],
            mins: [[0; 4 * LANES]; 2],
        };
        #[allow(
            clippy::needless_range_loop,
            reason = "one number indexes seven arrays, which become vectors"
        )]
        for i in 0..4 * LANES {
            bytes.scales[0][i] = scales[i] & 63;
            bytes.scales[1][i] = (low[i] & 15) | (scales[i] >> 6 << 4);
            bytes.mins[0][i] = mins[i] & 63;
            bytes.mins[1][i] = (low[i] >> 4) | (mins[i] >> 6 << 4);
        }
        bytes
    }

    #[inline(always)]
    unsafe fn vectors<I: Instructions>(
        &self,
        unpacked: &Self::Unpacked,
        at: usize,
        lane: usize,
    ) -> (I::Floats, I::Floats) {
        // SAFETY: the caller's promise.
        unsafe {
            let from = at % 4 * LANES + lane;
            let scale = I::load_bytes(unpacked.scales[at / 4][from..].as_ptr());
            let min = I::load_bytes(unpacked.mins[at / 4][from..].as_ptr());
            (
                I::multiply(half_floats::<I, false>(&self.scale, lane), scale),
                I::multiply(half_floats::<I, false>(&self.min, lane), min),
            )
        }
    }
}

/// `scale * scales[i]`, one signed byte for each of `N` parts of 256 columns.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Signed<const N: usize> {
    pub(super) scales: [[i8; LANES]; N],
    pub(super) scale: [u16; LANES],
}

// SAFETY: zero is a valid integer.
unsafe impl<const N: usize> Zeroable for Signed<N> {}

impl<const N: usize> Head for Signed<N> {
    const WIDTH: usize = 256 / N;
    const HAS_MIN: bool = false;
    type Unpacked = ();

    fn get(&self, lane: usize, column: usize) -> (f32, f32) {
        let scale = f16::from_bits(self.scale[lane]).to_f32();
        (scale * f32::from(self.scales[column * N / 256][lane]), 0.0)
    }

    #[inline(always)]
    fn unpack(&self) {}

    #[inline(always)]
    unsafe fn vectors<I: Instructions>(
        &self,
        _unpacked: &Self::Unpacked,
        at: usize,
        lane: usize,
    ) -> (I::Floats, I::Floats) {
        // SAFETY: the caller's promise.
        unsafe {
            let scale = I::load_signed_bytes(self.scales[at][lane..].as_ptr());
            let scale = I::multiply(half_floats::<I, false>(&self.scale, lane), scale);
            (scale, scale)
        }
    }
}

/// Scales and minima of sixteen parts of 16 columns, as in Q2_K: four bits each in a byte, the scale in the low ones.
#[derive(Clone, Copy, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Nibbles {
    pub(super) packed: [[u8; LANES]; 16],
    pub(super) scale: [u16; LANES],
    pub(super) min: [u16; LANES],
}

/// The scales and minima of sixteen parts, one byte each.
pub(super) struct Sixteen {
    pub(super) scales: [[u8; LANES]; 16],
    pub(super) mins: [[u8; LANES]; 16],
}

impl Head for Nibbles {
    const WIDTH: usize = 16;
    const HAS_MIN: bool = true;
    type Unpacked = Sixteen;

    fn get(&self, lane: usize, column: usize) -> (f32, f32) {
        let byte = self.packed[column / 16][lane];
        let of = |half: u16, nibble: u8| f16::from_bits(half).to_f32() * f32::from(nibble);
        (
            of(self.scale[lane], byte & 15),
            of(self.min[lane], byte >> 4),
        )
    }

    #[inline(always)]
    fn unpack(&self) -> Sixteen {
        let mut bytes = Sixteen {
            scales: [[0; LANES]; 16],
            mins: [[0; LANES]; 16],
        };
        for (i, packed) in self.packed.iter().enumerate() {
            for (lane, byte) in packed.iter().enumerate() {
                bytes.scales[i][lane] = byte & 15;
                bytes.mins[i][lane] = byte >> 4;
            }
        }
        bytes
    }

    #[inline(always)]
    unsafe fn vectors<I: Instructions>(
        &self,
        unpacked: &Self::Unpacked,
        at: usize,
        lane: usize,
    ) -> (I::Floats, I::Floats) {
        // SAFETY: the caller's promise.
        unsafe {
            let scale = I::load_bytes(unpacked.scales[at][lane..].as_ptr());
            let min = I::load_bytes(unpacked.mins[at][lane..].as_ptr());
            (
                I::multiply(half_floats::<I, false>(&self.scale, lane), scale),
                I::multiply(half_floats::<I, false>(&self.min, lane), min),
            )
        }
    }
}
