//! ARM's NEON, with the available byte products.

#![expect(
    unsafe_code,
    unsafe_op_in_unsafe_fn,
    reason = "intrinsics of the processor, each under the trait's one promise"
)]

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Instructions, word_at};

/// How four byte products are added to an integer. Weights are signed, or below 128.
pub(in super::super) trait FourProducts {
    /// # Safety
    /// The processor has the instructions.
    unsafe fn add(sum: int32x4_t, weights: int8x16_t, word: int8x16_t) -> int32x4_t;

    /// With two rows of eight bytes on either side, adds the dot product of each left row with each right row, ordered by the left
    /// one; `None` if there is no such instruction.
    ///
    /// # Safety
    /// As of `add`.
    #[inline(always)]
    unsafe fn add_two_by_two(
        _sum: int32x4_t,
        _left: int8x16_t,
        _right: int8x16_t,
    ) -> Option<int32x4_t> {
        None
    }
}

/// The dot product of ARMv8.2 and later, `sdot`.
pub(in super::super) struct DotProduct;

impl FourProducts for DotProduct {
    #[inline(always)]
    unsafe fn add(mut sum: int32x4_t, weights: int8x16_t, word: int8x16_t) -> int32x4_t {
        // The intrinsic, `vdotq_s32`, is not stable yet.
        asm!(
            ".arch_extension dotprod",
            "sdot {sum:v}.4s, {weights:v}.16b, {word:v}.16b",
            sum = inout(vreg) sum,
            weights = in(vreg) weights,
            word = in(vreg) word,
            options(pure, nomem, nostack, preserves_flags),
        );
        sum
    }
}

/// The 8-bit matrix product of ARMv8.6 and later (i8mm), `smmla`, with the dot product for single rows.
pub(in super::super) struct MatrixProduct;

impl FourProducts for MatrixProduct {
    #[inline(always)]
    unsafe fn add(sum: int32x4_t, weights: int8x16_t, word: int8x16_t) -> int32x4_t {
        DotProduct::add(sum, weights, word)
    }

    #[inline(always)]
    unsafe fn add_two_by_two(
        mut sum: int32x4_t,
        left: int8x16_t,
        right: int8x16_t,
    ) -> Option<int32x4_t> {
        // The intrinsic, `vmmlaq_s32`, is not stable yet.
        asm!(
            ".arch_extension i8mm",
            "smmla {sum:v}.4s, {left:v}.16b, {right:v}.16b",
            sum = inout(vreg) sum,
            left = in(vreg) left,
            right = in(vreg) right,
            options(pure, nomem, nostack, preserves_flags),
        );
        Some(sum)
    }
}

/// The baseline of 64-bit ARM.
pub(in super::super) struct Pairs;

impl FourProducts for Pairs {
    #[inline(always)]
    unsafe fn add(sum: int32x4_t, weights: int8x16_t, word: int8x16_t) -> int32x4_t {
        let low = vmull_s8(vget_low_s8(weights), vget_low_s8(word));
        let high = vmull_high_s8(weights, word);
        vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))
    }
}

/// NEON. `P` selects how products are accumulated.
pub(in super::super) struct Neon<P>(P);

impl<P: FourProducts> Instructions for Neon<P> {
    const ROWS: usize = 4;
    const HAS_SIGNED_DOT: bool = true;
    const MAY_DOT_TWO: bool = true;
    type Integers = int32x4_t;
    type Floats = float32x4_t;

    #[inline(always)]
    unsafe fn load(bytes: *const u8) -> int32x4_t {
        vreinterpretq_s32_u8(vld1q_u8(bytes))
    }

    #[inline(always)]
    unsafe fn splat_byte(byte: u8) -> int32x4_t {
        vreinterpretq_s32_u8(vdupq_n_u8(byte))
    }

    #[inline(always)]
    unsafe fn splat_integer(integer: i32) -> int32x4_t {
        vdupq_n_s32(integer)
    }

    #[inline(always)]
    unsafe fn and(a: int32x4_t, b: int32x4_t) -> int32x4_t {
        vandq_s32(a, b)
    }

    #[inline(always)]
    unsafe fn or(a: int32x4_t, b: int32x4_t) -> int32x4_t {
        vorrq_s32(a, b)
    }

    #[inline(always)]
    unsafe fn xor(a: int32x4_t, b: int32x4_t) -> int32x4_t {
        veorq_s32(a, b)
    }

    #[inline(always)]
    unsafe fn shift_left(a: int32x4_t, bits: i32) -> int32x4_t {
        #[expect(clippy::cast_possible_truncation, reason = "below 16")]
        let bits = vdupq_n_s16(bits as i16);
        vreinterpretq_s32_u16(vshlq_u16(vreinterpretq_u16_s32(a), bits))
    }

    #[inline(always)]
    unsafe fn shift_right(a: int32x4_t, bits: i32) -> int32x4_t {
        Self::shift_left(a, -bits)
    }

    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], bytes: int32x4_t) -> int32x4_t {
        let table = vld1q_u8(table.as_ptr());
        vreinterpretq_s32_u8(vqtbl1q_u8(table, vreinterpretq_u8_s32(bytes)))
    }

    #[inline(always)]
    unsafe fn dot<const N: usize>(
        sum: int32x4_t,
        weights: &[int32x4_t; N],
        words: *const i32,
        stride: usize,
        _step: usize,
    ) -> int32x4_t {
        // Unsigned weights have at most seven bits.
        Self::signed_dot(sum, weights, words, stride)
    }

    #[inline(always)]
    unsafe fn signed_dot<const N: usize>(
        mut sum: int32x4_t,
        weights: &[int32x4_t; N],
        words: *const i32,
        stride: usize,
    ) -> int32x4_t {
        for (index, &weights) in weights.iter().enumerate() {
            let word = vdupq_n_s32(words.add(word_at(index, stride)).read_unaligned());
            sum = P::add(
                sum,
                vreinterpretq_s8_s32(weights),
                vreinterpretq_s8_s32(word),
            );
        }
        sum
    }

    #[inline(always)]
    unsafe fn dot_two<const N: usize>(
        [first, second]: [i32; 2],
        weights: &[int32x4_t; N],
        words: *const i32,
        stride: usize,
    ) -> Option<[int32x4_t; 2]> {
        let start = vset_lane_s32::<1>(second, vdup_n_s32(first));
        let start = vcombine_s32(start, start);
        // The first two rows of the weights, and the last two.
        let (mut low, mut high) = (start, start);
        for (index, &[left, right]) in weights.as_chunks::<2>().0.iter().enumerate() {
            let both = vreinterpretq_s8_s32(vld1q_s32(words.add(index * stride)));
            low = P::add_two_by_two(low, vreinterpretq_s8_s32(vzip1q_s32(left, right)), both)?;
            high = P::add_two_by_two(high, vreinterpretq_s8_s32(vzip2q_s32(left, right)), both)?;
        }
        Some([vuzp1q_s32(low, high), vuzp2q_s32(low, high)])
    }

    #[inline(always)]
    unsafe fn splat(number: f32) -> float32x4_t {
        vdupq_n_f32(number)
    }

    #[inline(always)]
    unsafe fn multiply(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmulq_f32(a, b)
    }

    #[inline(always)]
    unsafe fn multiply_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }

    #[inline(always)]
    unsafe fn multiply_subtract(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmsq_f32(c, a, b)
    }

    #[inline(always)]
    unsafe fn to_floats(integers: int32x4_t) -> float32x4_t {
        vcvtq_f32_s32(integers)
    }

    #[inline(always)]
    unsafe fn load_floats(numbers: *const f32) -> float32x4_t {
        vld1q_f32(numbers)
    }

    #[inline(always)]
    unsafe fn load_halves(halves: *const u16) -> float32x4_t {
        let halves = vld1_u16(halves);
        let wide: float32x4_t;
        // Every 64-bit ARM has the instruction, but the intrinsic requires more features.
        asm!(
            "fcvtl {wide:v}.4s, {halves:v}.4h",
            wide = lateout(vreg) wide,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags),
        );
        wide
    }

    #[inline(always)]
    unsafe fn load_upper_halves(halves: *const u16) -> float32x4_t {
        vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(halves)))
    }

    #[inline(always)]
    unsafe fn load_bytes(bytes: *const u8) -> float32x4_t {
        let four = vdup_n_u32(bytes.cast::<u32>().read_unaligned());
        let wide = vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(four))));
        vcvtq_f32_u32(wide)
    }

    #[inline(always)]
    unsafe fn load_signed_bytes(bytes: *const i8) -> float32x4_t {
        let four = vdup_n_s32(bytes.cast::<i32>().read_unaligned());
        let wide = vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(four))));
        vcvtq_f32_s32(wide)
    }

    #[inline(always)]
    unsafe fn store(numbers: *mut f32, from: float32x4_t) {
        vst1q_f32(numbers, from);
    }
}
