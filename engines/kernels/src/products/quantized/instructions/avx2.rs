//! AVX2, with the available byte products.

#![expect(
    unsafe_code,
    unsafe_op_in_unsafe_fn,
    reason = "intrinsics of the processor, each under the trait's one promise"
)]

use std::arch::x86_64::*;

use super::{Instructions, word_at};

/// How byte products are accumulated.
pub(in super::super) trait Products {
    /// As of [`Instructions`].
    const HAS_SIGNED_DOT: bool;

    /// # Safety
    /// As of [`Instructions`].
    unsafe fn dot<const N: usize>(
        sum: __m256i,
        weights: &[__m256i; N],
        words: *const i32,
        stride: usize,
        step: usize,
    ) -> __m256i;

    /// # Safety
    /// As of [`Instructions`].
    #[inline(always)]
    unsafe fn signed_dot<const N: usize>(
        sum: __m256i,
        weights: &[__m256i; N],
        words: *const i32,
        stride: usize,
    ) -> __m256i {
        Self::dot(sum, weights, words, stride, 1)
    }
}

/// Sums pairs in 16 bits with saturation, so weights must be small or signed.
pub(in super::super) struct Pairs;

impl Products for Pairs {
    const HAS_SIGNED_DOT: bool = true;

    #[inline(always)]
    unsafe fn dot<const N: usize>(
        mut sum: __m256i,
        weights: &[__m256i; N],
        words: *const i32,
        stride: usize,
        step: usize,
    ) -> __m256i {
        let step = step.min(N);
        for first in 0..N / step {
            let mut pairs = _mm256_setzero_si256();
            #[allow(
                clippy::needless_range_loop,
                reason = "it counts weights and words alike"
            )]
            for index in first * step..(first + 1) * step {
                let word = _mm256_set1_epi32(words.add(word_at(index, stride)).read_unaligned());
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(weights[index], word));
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
        sum
    }

    #[inline(always)]
    unsafe fn signed_dot<const N: usize>(
        mut sum: __m256i,
        weights: &[__m256i; N],
        words: *const i32,
        stride: usize,
    ) -> __m256i {
        for (index, &weights) in weights.iter().enumerate() {
            let word = _mm256_set1_epi32(words.add(word_at(index, stride)).read_unaligned());
            // Two products of at most 128 * 127 fit into 16 bits.
            let pairs =
                _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(word, weights));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
        sum
    }
}

/// The 8-bit dot product: of AVX-VNNI, or the equivalent of AVX-512.
pub(in super::super) struct DotProduct<const OF_AVX512: bool>;

impl<const OF_AVX512: bool> Products for DotProduct<OF_AVX512> {
    const HAS_SIGNED_DOT: bool = false;

    #[inline(always)]
    unsafe fn dot<const N: usize>(
        mut sum: __m256i,
        weights: &[__m256i; N],
        words: *const i32,
        stride: usize,
        _step: usize,
    ) -> __m256i {
        for (index, &weights) in weights.iter().enumerate() {
            let word = _mm256_set1_epi32(words.add(word_at(index, stride)).read_unaligned());
            sum = if OF_AVX512 {
                _mm256_dpbusd_epi32(sum, weights, word)
            } else {
                _mm256_dpbusd_avx_epi32(sum, weights, word)
            };
        }
        sum
    }
}

/// AVX2, FMA and F16C. `P` selects how products are accumulated.
pub(in super::super) struct Avx2<P>(P);

impl<P: Products> Instructions for Avx2<P> {
    const ROWS: usize = 8;
    const HAS_SIGNED_DOT: bool = P::HAS_SIGNED_DOT;
    const HOLDS_TOTALS: bool = false;
    type Integers = __m256i;
    type Floats = __m256;

    #[inline(always)]
    unsafe fn load(bytes: *const u8) -> __m256i {
        _mm256_loadu_si256(bytes.cast())
    }

    #[inline(always)]
    unsafe fn splat_byte(byte: u8) -> __m256i {
        _mm256_set1_epi8(byte.cast_signed())
    }

    #[inline(always)]
    unsafe fn splat_integer(integer: i32) -> __m256i {
        _mm256_set1_epi32(integer)
    }

    #[inline(always)]
    unsafe fn and(a: __m256i, b: __m256i) -> __m256i {
        _mm256_and_si256(a, b)
    }

    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        _mm256_or_si256(a, b)
    }

    #[inline(always)]
    unsafe fn xor(a: __m256i, b: __m256i) -> __m256i {
        _mm256_xor_si256(a, b)
    }

    #[inline(always)]
    unsafe fn shift_left(a: __m256i, bits: i32) -> __m256i {
        _mm256_sll_epi16(a, _mm_cvtsi32_si128(bits))
    }

    #[inline(always)]
    unsafe fn shift_right(a: __m256i, bits: i32) -> __m256i {
        _mm256_srl_epi16(a, _mm_cvtsi32_si128(bits))
    }

    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], bytes: __m256i) -> __m256i {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        _mm256_shuffle_epi8(table, bytes)
    }

    #[inline(always)]
    unsafe fn dot<const N: usize>(
        sum: __m256i,
        weights: &[__m256i; N],
        words: *const i32,
        stride: usize,
        step: usize,
    ) -> __m256i {
        P::dot(sum, weights, words, stride, step)
    }

    #[inline(always)]
    unsafe fn signed_dot<const N: usize>(
        sum: __m256i,
        weights: &[__m256i; N],
        words: *const i32,
        stride: usize,
    ) -> __m256i {
        P::signed_dot(sum, weights, words, stride)
    }

    #[inline(always)]
    unsafe fn splat(number: f32) -> __m256 {
        _mm256_set1_ps(number)
    }

    #[inline(always)]
    unsafe fn multiply(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn multiply_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn multiply_subtract(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fnmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn to_floats(integers: __m256i) -> __m256 {
        _mm256_cvtepi32_ps(integers)
    }

    #[inline(always)]
    unsafe fn load_floats(numbers: *const f32) -> __m256 {
        _mm256_loadu_ps(numbers)
    }

    #[inline(always)]
    unsafe fn load_halves(halves: *const u16) -> __m256 {
        _mm256_cvtph_ps(_mm_loadu_si128(halves.cast()))
    }

    #[inline(always)]
    unsafe fn load_upper_halves(halves: *const u16) -> __m256 {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(halves.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    }

    #[inline(always)]
    unsafe fn load_bytes(bytes: *const u8) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes.cast())))
    }

    #[inline(always)]
    unsafe fn load_signed_bytes(bytes: *const i8) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(bytes.cast())))
    }

    #[inline(always)]
    unsafe fn store(numbers: *mut f32, from: __m256) {
        _mm256_storeu_ps(numbers, from);
    }
}
