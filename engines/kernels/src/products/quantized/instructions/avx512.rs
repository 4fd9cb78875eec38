//! AVX-512 with the 8-bit dot product.

#![expect(
    unsafe_code,
    unsafe_op_in_unsafe_fn,
    reason = "intrinsics of the processor, each under the trait's one promise"
)]

use std::arch::x86_64::*;

use super::{Instructions, word_at};

/// AVX-512 F, BW, DQ, VL and VNNI.
pub(in super::super) struct Avx512Vnni;

impl Instructions for Avx512Vnni {
    const ROWS: usize = 16;
    const HAS_SIGNED_DOT: bool = false;
    type Integers = __m512i;
    type Floats = __m512;

    #[inline(always)]
    unsafe fn load(bytes: *const u8) -> __m512i {
        _mm512_loadu_si512(bytes.cast())
    }

    #[inline(always)]
    unsafe fn splat_byte(byte: u8) -> __m512i {
        _mm512_set1_epi8(byte.cast_signed())
    }

    #[inline(always)]
    unsafe fn splat_integer(integer: i32) -> __m512i {
        _mm512_set1_epi32(integer)
    }

    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        _mm512_and_si512(a, b)
    }

    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        _mm512_or_si512(a, b)
    }

    #[inline(always)]
    unsafe fn xor(a: __m512i, b: __m512i) -> __m512i {
        _mm512_xor_si512(a, b)
    }

    #[inline(always)]
    unsafe fn shift_left(a: __m512i, bits: i32) -> __m512i {
        _mm512_sll_epi16(a, _mm_cvtsi32_si128(bits))
    }

    #[inline(always)]
    unsafe fn shift_right(a: __m512i, bits: i32) -> __m512i {
        _mm512_srl_epi16(a, _mm_cvtsi32_si128(bits))
    }

    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], bytes: __m512i) -> __m512i {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
        _mm512_shuffle_epi8(table, bytes)
    }

    #[inline(always)]
    unsafe fn dot<const N: usize>(
        mut sum: __m512i,
        weights: &[__m512i; N],
        words: *const i32,
        stride: usize,
        _step: usize,
    ) -> __m512i {
        for (index, &weights) in weights.iter().enumerate() {
            let word = words.add(word_at(index, stride)).read_unaligned();
            sum = _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(word));
        }
        sum
    }

    #[inline(always)]
    unsafe fn splat(number: f32) -> __m512 {
        _mm512_set1_ps(number)
    }

    #[inline(always)]
    unsafe fn multiply(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn multiply_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn multiply_subtract(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fnmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn to_floats(integers: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(integers)
    }

    #[inline(always)]
    unsafe fn load_floats(numbers: *const f32) -> __m512 {
        _mm512_loadu_ps(numbers)
    }

    #[inline(always)]
    unsafe fn load_halves(halves: *const u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(halves.cast()))
    }

    #[inline(always)]
    unsafe fn load_upper_halves(halves: *const u16) -> __m512 {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(halves.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }

    #[inline(always)]
    unsafe fn load_bytes(bytes: *const u8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.cast())))
    }

    #[inline(always)]
    unsafe fn load_signed_bytes(bytes: *const i8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes.cast())))
    }

    #[inline(always)]
    unsafe fn store(numbers: *mut f32, from: __m512) {
        _mm512_storeu_ps(numbers, from);
    }
}
