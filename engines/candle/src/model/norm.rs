//! Root-mean-square normalization, alone and fused with the preceding addition.

#![expect(
    unsafe_code,
    reason = "threads write disjoint parts of buffers that are not zeroed first"
)]

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{D, DType, Result, Tensor};

use super::host;
use super::kernels;
use super::parallel::{SharedMut, for_each_range_if_large, written};
use super::simd::{by_simd, sum_of};

/// `x / sqrt(mean(x^2) + eps) * weight`, over the last dimension.
#[derive(Debug)]
pub(super) struct Norm {
    weight: Tensor,
    eps: f32,
}

impl Norm {
    /// `offset` is added to every weight.
    pub(super) fn try_new(weight: &Tensor, offset: f32, eps: f64) -> Result<Self> {
        let weight = if offset == 0.0 {
            weight.clone()
        } else {
            weight.affine(1.0, f64::from(offset))?
        };
        #[expect(
            clippy::cast_possible_truncation,
            reason = "of order 1e-6; f32 is what rows are in"
        )]
        let eps = eps as f32;
        Ok(Self {
            weight: weight.contiguous()?,
            eps,
        })
    }

    pub(super) fn weight(&self) -> &Tensor {
        &self.weight
    }

    pub(super) fn eps(&self) -> f32 {
        self.eps
    }

    /// Normalizes `x`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if !x.device().is_cpu() {
            if kernels::are_for(x.device(), x.dtype()) {
                return kernels::norm(x, &self.weight, self.eps);
            }
            return self.forward_by_tensors(x);
        }
        let normed = host::read(x, |x| {
            host::read(&self.weight, |weight| self.normed_rows(x, weight))
        })??;
        Tensor::from_vec(normed, x.shape(), x.device())
    }

    /// `x + delta`, and that sum normalized.
    pub(super) fn add_forward(&self, x: &Tensor, delta: &Tensor) -> Result<(Tensor, Tensor)> {
        if !x.device().is_cpu() {
            if kernels::are_for(x.device(), x.dtype()) {
                return kernels::add_norm(x, delta, &self.weight, self.eps);
            }
            let sum = (x + delta)?;
            let normed = self.forward_by_tensors(&sum)?;
            return Ok((sum, normed));
        }
        let (sum, normed) = host::read(x, |x| {
            host::read(delta, |delta| {
                host::read(&self.weight, |weight| self.add_rows(x, delta, weight))
            })
        })???;
        let sum = Tensor::from_vec(sum, x.shape(), x.device())?;
        let normed = Tensor::from_vec(normed, x.shape(), x.device())?;
        Ok((sum, normed))
    }

    /// As `forward`, for rows as wide as `weight`.
    fn normed_rows(&self, x: &[f32], weight: &[f32]) -> Vec<f32> {
        let fill = |normed: &SharedMut<'_, MaybeUninit<f32>>| {
            for_each_range_of_rows(x.len(), weight.len(), x.len(), |range| {
                // SAFETY: ranges do not overlap.
                let normed = unsafe { normed.part(range.clone()) };
                normalize_rows(&x[range], weight, self.eps, normed);
            });
        };
        // SAFETY: every row is in a range, and is written.
        unsafe { written(x.len(), fill) }
    }

    /// As `add_forward`, for rows as wide as `weight`.
    fn add_rows(&self, x: &[f32], delta: &[f32], weight: &[f32]) -> (Vec<f32>, Vec<f32>) {
        assert_eq!(x.len(), delta.len(), "what is added is as large");
        let fill = |sum: &SharedMut<'_, MaybeUninit<f32>>,
                    normed: &SharedMut<'_, MaybeUninit<f32>>| {
            for_each_range_of_rows(x.len(), weight.len(), 2 * x.len(), |range| {
                // SAFETY: ranges do not overlap.
                let (sum, normed) =
                    unsafe { (sum.part(range.clone()), normed.part(range.clone())) };
                for ((sum, x), delta) in sum.iter_mut().zip(&x[range.clone()]).zip(&delta[range]) {
                    sum.write(x + delta);
                }
                // SAFETY: just written.
                normalize_rows(unsafe { sum.assume_init_ref() }, weight, self.eps, normed);
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

    /// In plain candle operations, computed in f32.
    pub(super) fn forward_by_tensors(&self, x: &Tensor) -> Result<Tensor> {
        let wide = x.to_dtype(DType::F32)?;
        let scale = (wide.sqr()?.mean_keepdim(D::Minus1)? + f64::from(self.eps))?
            .sqrt()?
            .recip()?;
        let normed = wide
            .broadcast_mul(&scale)?
            .broadcast_mul(&self.weight.to_dtype(DType::F32)?)?;
        normed.to_dtype(x.dtype())
    }
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
