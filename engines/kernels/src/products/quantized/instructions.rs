//! [`Instructions`]: the processor operations of a kernel, so that one source serves all processors.
//!
//! Every function is `#[inline(always)]`, so its instructions belong to the function it is inlined into, which enables the
//! processor's features.

#![expect(unsafe_code, reason = "intrinsics of the processor")]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

#[cfg(target_arch = "x86_64")]
pub(super) use self::avx2::{Avx2, DotProduct, Pairs};
#[cfg(target_arch = "x86_64")]
pub(super) use self::avx512::Avx512Vnni;
#[cfg(target_arch = "aarch64")]
pub(super) use self::neon::{DotProduct, MatrixProduct, Neon, Pairs};

/// The offset of one of a row's words: they come in pairs, `stride` apart.
#[inline(always)]
const fn word_at(index: usize, stride: usize) -> usize {
    index / 2 * stride + index % 2
}

/// Vectors of 32-bit lanes, each of which is one row of a tile.
///
/// # Safety
/// For every function: the processor has the instructions, and pointers are valid for a vector's lanes.
pub(super) trait Instructions {
    /// Rows per vector; a divisor of those of a tile.
    const ROWS: usize;
    /// Whether 8-bit weights are signed; otherwise they are stored plus 128.
    const HAS_SIGNED_DOT: bool;
    /// Whether `dot_two` may return a result.
    const MAY_DOT_TWO: bool = false;
    /// Whether the registers hold the totals of a group of rows beside the weights of a block.
    const HOLDS_TOTALS: bool = true;
    /// Four bytes or one integer per row.
    type Integers: Copy;
    /// One number per row.
    type Floats: Copy;

    unsafe fn load(bytes: *const u8) -> Self::Integers;
    unsafe fn splat_byte(byte: u8) -> Self::Integers;
    unsafe fn splat_integer(integer: i32) -> Self::Integers;
    unsafe fn and(a: Self::Integers, b: Self::Integers) -> Self::Integers;
    unsafe fn or(a: Self::Integers, b: Self::Integers) -> Self::Integers;
    unsafe fn xor(a: Self::Integers, b: Self::Integers) -> Self::Integers;
    /// Shifts pairs of bytes: the caller must mask the bits that cross between them.
    unsafe fn shift_left(a: Self::Integers, bits: i32) -> Self::Integers;
    unsafe fn shift_right(a: Self::Integers, bits: i32) -> Self::Integers;
    /// Looks up bytes below 16 in a table.
    unsafe fn look_up(table: &[u8; 16], bytes: Self::Integers) -> Self::Integers;
    /// `sum` plus, for each row, the products of its bytes in all `weights` with four bytes that all rows share: those of
    /// `words[0]`, `words[1]`, `words[stride]`, `words[stride + 1]` and so on. The sum of `step` products of pairs fits into 16
    /// bits.
    unsafe fn dot<const N: usize>(
        sum: Self::Integers,
        weights: &[Self::Integers; N],
        words: *const i32,
        stride: usize,
        step: usize,
    ) -> Self::Integers;
    /// As `dot` with signed weights, if `HAS_SIGNED_DOT`.
    #[inline(always)]
    unsafe fn signed_dot<const N: usize>(
        sum: Self::Integers,
        weights: &[Self::Integers; N],
        words: *const i32,
        stride: usize,
    ) -> Self::Integers {
        // SAFETY: the caller's promise.
        unsafe { Self::dot(sum, weights, words, stride, 1) }
    }
    /// As `dot`, or as `signed_dot` for signed weights, for two rows with fewer instructions than two calls; `None` if the
    /// processor has no such instruction. Each two words of the second row follow those of the first.
    #[inline(always)]
    unsafe fn dot_two<const N: usize>(
        _sums: [i32; 2],
        _weights: &[Self::Integers; N],
        _words: *const i32,
        _stride: usize,
    ) -> Option<[Self::Integers; 2]> {
        None
    }

    unsafe fn splat(number: f32) -> Self::Floats;
    unsafe fn multiply(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`.
    unsafe fn multiply_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// `c - a * b`.
    unsafe fn multiply_subtract(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    unsafe fn to_floats(integers: Self::Integers) -> Self::Floats;
    unsafe fn load_floats(numbers: *const f32) -> Self::Floats;
    unsafe fn load_halves(halves: *const u16) -> Self::Floats;
    /// Loads numbers stored as the upper halves of f32.
    unsafe fn load_upper_halves(halves: *const u16) -> Self::Floats;
    unsafe fn load_bytes(bytes: *const u8) -> Self::Floats;
    unsafe fn load_signed_bytes(bytes: *const i8) -> Self::Floats;
    unsafe fn store(numbers: *mut f32, from: Self::Floats);
}
