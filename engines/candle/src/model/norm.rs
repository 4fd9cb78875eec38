//! Root-mean-square normalization, alone and fused with the preceding addition.

use candle_core::{D, DType, Result, Tensor};
use genset_kernels::{added_and_normed_rows, normed_rows};

use super::encoder::layer_norm::LayerNorm;
use super::host;
use super::kernels;

/// `x / sqrt(mean(x^2) + eps) * weight`, over the last dimension.
#[derive(Debug)]
pub(super) struct Norm {
    weight: Tensor,
    eps: f32,
}

/// A norm of the residual stream.
#[derive(Debug)]
pub(super) enum StreamNorm {
    RootMeanSquare(Norm),
    Layer(LayerNorm),
}

impl StreamNorm {
    /// The type of rows.
    pub(super) fn dtype(&self) -> DType {
        match self {
            Self::RootMeanSquare(norm) => norm.weight.dtype(),
            Self::Layer(norm) => norm.dtype(),
        }
    }

    /// Whether a GPU computes it in one of our kernels, not in several operations.
    #[cfg(any(feature = "cuda", test))]
    pub(super) fn is_one_kernel(&self) -> bool {
        matches!(self, Self::RootMeanSquare(_))
    }

    /// Normalizes `x`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::RootMeanSquare(norm) => norm.forward(x),
            Self::Layer(norm) => norm.forward(x),
        }
    }

    /// `x + delta`, and that sum normalized.
    pub(super) fn add_forward(&self, x: &Tensor, delta: &Tensor) -> Result<(Tensor, Tensor)> {
        match self {
            Self::RootMeanSquare(norm) => norm.add_forward(x, delta),
            Self::Layer(norm) => {
                let sum = (x + delta)?;
                let normed = norm.forward(&sum)?;
                Ok((sum, normed))
            }
        }
    }
}

/// Normalizes the queries of all heads together, and the keys likewise.
#[derive(Debug)]
pub(super) struct WholeNorms {
    /// As wide as all queries of a row.
    pub(super) queries: Norm,
    /// As wide as all keys of a row.
    pub(super) keys: Norm,
}

impl WholeNorms {
    /// Normalizes `qkv`, the projections of rows to queries, keys and values, one beside the other.
    pub(super) fn forward(&self, qkv: &Tensor) -> Result<Tensor> {
        let queries = self.queries.weight.elem_count();
        let keys = self.keys.weight.elem_count();
        let part = |start, width| qkv.narrow(D::Minus1, start, width)?.contiguous();
        let parts = [
            self.queries.forward(&part(0, queries)?)?,
            self.keys.forward(&part(queries, keys)?)?,
            part(queries + keys, keys)?,
        ];
        Tensor::cat(&parts, D::Minus1)?.contiguous()
    }
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
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if !x.device().is_cpu() {
            if kernels::are_for(x.device(), x.dtype()) {
                return kernels::norm(x, &self.weight, self.eps);
            }
            return self.forward_by_tensors(x);
        }
        let normed = host::read(x, |x| {
            host::read(&self.weight, |weight| normed_rows(x, weight, self.eps))
        })??;
        Tensor::from_vec(normed, x.shape(), x.device())
    }

    /// `x + delta`, and that sum normalized.
    fn add_forward(&self, x: &Tensor, delta: &Tensor) -> Result<(Tensor, Tensor)> {
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
                host::read(&self.weight, |weight| {
                    added_and_normed_rows(x, delta, weight, self.eps)
                })
            })
        })???;
        let sum = Tensor::from_vec(sum, x.shape(), x.device())?;
        let normed = Tensor::from_vec(normed, x.shape(), x.device())?;
        Ok((sum, normed))
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
