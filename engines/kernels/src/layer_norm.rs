//! Layer normalization of rows, alone and fused with the preceding addition:
//! `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`.

#![expect(
    unsafe_code,
    reason = "threads write disjoint parts of buffers that are not zeroed first"
)]

use std::io;
use std::mem::MaybeUninit;

use crate::parallel::{SharedMut, for_each_range_if_large, written};
use crate::simd::{by_simd, sum_of};

/// The rows of `x`, plus those of `delta` if there is one, normalized; each is as wide as the weights and the biases in `weights`.
///
/// # Errors
/// `x`, `delta` or the biases are of another size.
pub fn layer_normed_rows(
    x: &[f32],
    delta: Option<&[f32]>,
    weights: (&[f32], &[f32]),
    eps: f32,
) -> io::Result<Vec<f32>> {
    let width = weights.0.len();
    let is_even = width > 0 && x.len().is_multiple_of(width) && weights.1.len() == width;
    if !is_even || delta.is_some_and(|delta| delta.len() != x.len()) {
        let problem = format!("{} numbers in rows of {width}", x.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    let fill = |out: &SharedMut<'_, MaybeUninit<f32>>| {
        for_each_range_if_large(x.len() / width, 2 * x.len(), |rows| {
            let range = rows.start * width..rows.end * width;
            // SAFETY: ranges do not overlap.
            let out = unsafe { out.part(range.clone()) };
            let sum = out.write_copy_of_slice(&x[range.clone()]);
            if let Some(delta) = delta {
                for (sum, delta) in sum.iter_mut().zip(&delta[range]) {
                    *sum += delta;
                }
            }
            normalize_rows(sum, weights.0, weights.1, eps);
        });
    };
    // SAFETY: every row is in a range, and is written.
    Ok(unsafe { written(x.len(), fill) })
}

by_simd! {
    /// Normalizes rows as wide as `weight`, in place.
    fn normalize_rows(rows: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) = normalize_rows_inner
}

#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "a row's width")]
fn normalize_rows_inner<const FMA: bool>(rows: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
    let width = weight.len() as f32;
    for row in rows.chunks_exact_mut(weight.len()) {
        let mean = sum_of::<FMA>(row, |v| v) / width;
        let variance = sum_of::<FMA>(row, |v| (v - mean) * (v - mean)) / width;
        let scale = 1.0 / (variance + eps).sqrt();
        for ((v, weight), bias) in row.iter_mut().zip(weight).zip(bias) {
            *v = (*v - mean) * scale * weight + bias;
        }
    }
}
