//! Root-mean-square normalization of rows, alone and fused with the preceding addition:
//! `x / sqrt(mean(x^2) + eps) * weight`.

#![expect(
    unsafe_code,
    reason = "threads write disjoint parts of buffers that are not zeroed first"
)]

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::parallel::{SharedMut, for_each_range_if_large, written};
use crate::simd::{by_simd, sum_of};

/// The rows of `x`, normalized; each is as wide as `weight`.
///
/// # Panics
/// `x` does not consist of such rows.
#[must_use]
pub fn normed_rows(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let fill = |normed: &SharedMut<'_, MaybeUninit<f32>>| {
        for_each_range_of_rows(x.len(), weight.len(), x.len(), |range| {
            // SAFETY: ranges do not overlap.
            let normed = unsafe { normed.part(range.clone()) };
            normalize_rows(&x[range], weight, eps, normed);
        });
    };
    // SAFETY: every row is in a range, and is written.
    unsafe { written(x.len(), fill) }
}

/// The rows of `x + delta`, and those normalized; each is as wide as `weight`.
///
/// # Panics
/// `x` does not consist of such rows, or `delta` is not as large as `x`.
#[must_use]
pub fn added_and_normed_rows(
    x: &[f32],
    delta: &[f32],
    weight: &[f32],
    eps: f32,
) -> (Vec<f32>, Vec<f32>) {
    assert_eq!(x.len(), delta.len(), "what is added is as large");
    let fill = |sum: &SharedMut<'_, MaybeUninit<f32>>, normed: &SharedMut<'_, MaybeUninit<f32>>| {
        for_each_range_of_rows(x.len(), weight.len(), 2 * x.len(), |range| {
            // SAFETY: ranges do not overlap.
            let (sum, normed) = unsafe { (sum.part(range.clone()), normed.part(range.clone())) };
            for ((sum, x), delta) in sum.iter_mut().zip(&x[range.clone()]).zip(&delta[range]) {
                sum.write(x + delta);
            }
            // SAFETY: just written.
            normalize_rows(unsafe { sum.assume_init_ref() }, weight, eps, normed);
        });
    };
    let mut normed = Vec::new();
    // SAFETY: every row is in a range, and is written to both.
    let sum = unsafe {
        written(x.len(), |sum| {
            normed = written(x.len(), |normed| fill(sum, normed))
        })
    };
    (sum, normed)
}

/// Calls `work`, on several threads, with ranges of whole rows that together are `0..len`.
///
/// # Panics
/// `len` is not a multiple of `width`.
fn for_each_range_of_rows(
    len: usize,
    width: usize,
    operations: usize,
    work: impl Fn(Range<usize>) + Sync,
) {
    assert!(
        len.is_multiple_of(width),
        "{len} numbers in rows of {width}"
    );
    for_each_range_if_large(len / width, operations, |rows| {
        work(rows.start * width..rows.end * width);
    });
}

by_simd! {
    /// Normalizes rows as wide as `weight`.
    fn normalize_rows(x: &[f32], weight: &[f32], eps: f32, out: &mut [MaybeUninit<f32>]) = normalize_rows_inner
}

#[inline(always)]
fn normalize_rows_inner<const FMA: bool>(
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [MaybeUninit<f32>],
) {
    for (x, out) in x
        .chunks_exact(weight.len())
        .zip(out.chunks_exact_mut(weight.len()))
    {
        let scale = row_scale::<FMA>(x, eps);
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            out.write(x * scale * weight);
        }
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "a row's width")]
pub(super) fn row_scale<const FMA: bool>(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of::<FMA>(x, |v| v * v) / x.len() as f32 + eps).sqrt()
}
