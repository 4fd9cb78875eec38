//! Root-mean-square normalization of rows.
//!
//! # Source
//! Zhang and Sennrich, "Root Mean Square Layer Normalization", equation 4.

use candle_core::{CpuStorage, CustomOp2, Layout, Shape, Tensor};
use rayon::prelude::*;

use super::{ROWS_PER_TASK, dot, slice, values};

/// `x / rms(x) * weight` for each row of `x: [rows, width]`, with `weight: [width]`.
#[derive(Debug)]
pub(crate) struct RmsNorm {
    /// Added to the mean of the squares.
    pub(crate) epsilon: f32,
}

impl RmsNorm {
    /// One divided by the row's root mean square.
    fn scale(&self, row: &[f32]) -> f32 {
        (dot(row, row) / row.len() as f32 + self.epsilon)
            .sqrt()
            .recip()
    }

    /// The gradients of `x` and `weight`.
    fn gradients(&self, x: &[f32], weight: &[f32], grad: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let width = weight.len();
        let mut weight_grad = vec![0.0; width];
        for (x, grad) in x.chunks_exact(width).zip(grad.chunks_exact(width)) {
            let scale = self.scale(x);
            for ((sum, x), grad) in weight_grad.iter_mut().zip(x).zip(grad) {
                *sum += grad * x * scale;
            }
        }
        let mut x_grad = vec![0.0; x.len()];
        x_grad
            .par_chunks_exact_mut(width)
            .with_min_len(ROWS_PER_TASK)
            .zip(x.par_chunks_exact(width))
            .zip(grad.par_chunks_exact(width))
            .for_each(|((x_grad, x), grad)| {
                let scale = self.scale(x);
                for ((out, grad), weight) in x_grad.iter_mut().zip(grad).zip(weight) {
                    *out = grad * weight * scale;
                }
                let along = dot(x_grad, x) * scale * scale / width as f32;
                for (out, x) in x_grad.iter_mut().zip(x) {
                    *out -= along * x;
                }
            });
        (x_grad, weight_grad)
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm-with-gradient"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (x, weight) = (slice(x, x_layout)?, slice(weight, weight_layout)?);
        let width = weight.len();
        let mut out = vec![0.0; x.len()];
        out.par_chunks_exact_mut(width)
            .with_min_len(ROWS_PER_TASK)
            .zip(x.par_chunks_exact(width))
            .for_each(|(out, x)| {
                let scale = self.scale(x);
                for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                    *out = x * scale * weight;
                }
            });
        Ok((CpuStorage::F32(out), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _result: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let (x_grad, weight_grad) = self.gradients(&values(x)?, &values(weight)?, &values(grad)?);
        Ok((
            Some(Tensor::from_vec(x_grad, x.shape(), x.device())?),
            Some(Tensor::from_vec(weight_grad, weight.shape(), x.device())?),
        ))
    }
}
