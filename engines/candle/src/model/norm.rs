//! Root-mean-square normalization, alone and together with the addition before it.

use candle_core::{D, DType, Result, Tensor};

use super::host;
use super::kernels;
use super::parallel::{SharedMut, for_each_range_if_large};
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
        let width = x.dim(D::Minus1)?;
        let mut normed = vec![0.0f32; x.elem_count()];
        host::read(x, |x| {
            host::read(&self.weight, |weight| {
                let out = SharedMut::new(&mut normed);
                for_each_range_if_large(x.len() / width, x.len(), |rows| {
                    let range = rows.start * width..rows.end * width;
                    #[expect(unsafe_code, reason = "threads write disjoint parts of one buffer")]
                    // SAFETY: ranges of rows do not overlap.
                    let out = unsafe { out.part(range.clone()) };
                    normalize_rows(&x[range], weight, self.eps, out);
                });
            })
        })??;
        Tensor::from_vec(normed, x.shape(), x.device())
    }

    /// `x + delta`, and the same normalized.
    pub(super) fn add_forward(&self, x: &Tensor, delta: &Tensor) -> Result<(Tensor, Tensor)> {
        if !x.device().is_cpu() {
            if kernels::are_for(x.device(), x.dtype()) {
                return kernels::add_norm(x, delta, &self.weight, self.eps);
            }
            let sum = (x + delta)?;
            let normed = self.forward_by_tensors(&sum)?;
            return Ok((sum, normed));
        }
        let width = x.dim(D::Minus1)?;
        let (mut sum, mut normed) = (vec![0.0f32; x.elem_count()], vec![0.0f32; x.elem_count()]);
        host::read(x, |x| {
            host::read(delta, |delta| {
                host::read(&self.weight, |weight| {
                    let (sum, normed) = (SharedMut::new(&mut sum), SharedMut::new(&mut normed));
                    for_each_range_if_large(x.len() / width, 2 * x.len(), |rows| {
                        let range = rows.start * width..rows.end * width;
                        #[expect(
                            unsafe_code,
                            reason = "threads write disjoint parts of one buffer"
                        )]
                        // SAFETY: ranges of rows do not overlap.
                        let (sum, normed) =
                            unsafe { (sum.part(range.clone()), normed.part(range.clone())) };
                        for ((sum, x), delta) in
                            sum.iter_mut().zip(&x[range.clone()]).zip(&delta[range])
                        {
                            *sum = x + delta;
                        }
                        normalize_rows(sum, weight, self.eps, normed);
                    });
                })
            })
        })???;
        let sum = Tensor::from_vec(sum, x.shape(), x.device())?;
        let normed = Tensor::from_vec(normed, x.shape(), x.device())?;
        Ok((sum, normed))
    }

    /// In plain candle operations, in f32 inside.
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

by_simd! {
    /// Normalizes rows as wide as `weight`.
    fn normalize_rows(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = normalize_rows_inner
}

#[inline(always)]
fn normalize_rows_inner<const FMA: bool>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    for (x, out) in x
        .chunks_exact(weight.len())
        .zip(out.chunks_exact_mut(weight.len()))
    {
        let scale = row_scale::<FMA>(x, eps);
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * weight;
        }
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "a row's width")]
pub(super) fn row_scale<const FMA: bool>(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of::<FMA>(x, |v| v * v) / x.len() as f32 + eps).sqrt()
}
