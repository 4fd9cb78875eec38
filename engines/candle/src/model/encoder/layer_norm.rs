//! Layer normalization, alone and fused with the preceding addition.

use candle_core::{D, DType, Result, Tensor};
use genset_kernels::layer_normed_rows;

use crate::model::host;

/// `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`, over the last dimension.
#[derive(Debug)]
pub(in crate::model) struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f32,
}

impl LayerNorm {
    /// Without a bias tensor, the bias is 0.
    pub(in crate::model) fn try_new(
        weight: &Tensor,
        bias: Option<Tensor>,
        eps: f64,
    ) -> Result<Self> {
        let bias = match bias {
            Some(bias) => bias,
            None => weight.zeros_like()?,
        };
        #[expect(
            clippy::cast_possible_truncation,
            reason = "of order 1e-12 to 1e-5; f32 is what rows are in"
        )]
        let eps = eps as f32;
        Ok(Self {
            weight: weight.contiguous()?,
            bias: bias.contiguous()?,
            eps,
        })
    }

    /// The type of rows.
    pub(in crate::model) fn dtype(&self) -> DType {
        self.weight.dtype()
    }

    /// Normalizes `x`.
    pub(in crate::model) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if !x.device().is_cpu() {
            return self.forward_by_tensors(x);
        }
        self.on_host(x, None)
    }

    /// `x + delta`, normalized.
    pub(in crate::model) fn add_forward(&self, x: &Tensor, delta: &Tensor) -> Result<Tensor> {
        if !x.device().is_cpu() {
            return self.forward_by_tensors(&(x + delta)?);
        }
        host::read(delta, |delta| self.on_host(x, Some(delta)))?
    }

    fn on_host(&self, x: &Tensor, delta: Option<&[f32]>) -> Result<Tensor> {
        let normed = host::read(x, |x| {
            host::read(&self.weight, |weight| {
                host::read(&self.bias, |bias| {
                    layer_normed_rows(x, delta, (weight, bias), self.eps)
                })
            })
        })???;
        Tensor::from_vec(normed?, x.shape(), x.device())
    }

    fn forward_by_tensors(&self, x: &Tensor) -> Result<Tensor> {
        let wide = x.to_dtype(DType::F32)?;
        let centered = wide.broadcast_sub(&wide.mean_keepdim(D::Minus1)?)?;
        let variance = centered.sqr()?.mean_keepdim(D::Minus1)?;
        let scale = (variance + f64::from(self.eps))?.sqrt()?.recip()?;
        let normed = centered
            .broadcast_mul(&scale)?
            .broadcast_mul(&self.weight.to_dtype(DType::F32)?)?
            .broadcast_add(&self.bias.to_dtype(DType::F32)?)?;
        normed.to_dtype(x.dtype())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn rows_are_centered_scaled_and_the_same_by_tensors() {
        let x = Tensor::arange(0f32, 7.0 * 37.0, &Device::Cpu).unwrap();
        let x = (x.sin().unwrap() * 3.0).unwrap().reshape((7, 37)).unwrap();
        let weight = Tensor::arange(1f32, 38.0, &Device::Cpu).unwrap();
        let bias = weight.affine(0.5, -1.0).unwrap();
        for bias in [None, Some(bias)] {
            let norm = LayerNorm::try_new(&weight, bias, 1e-5).unwrap();
            let delta = x.affine(-2.0, 1.0).unwrap();
            let pairs = [
                (norm.forward(&x), norm.forward_by_tensors(&x)),
                (
                    norm.add_forward(&x, &delta),
                    norm.forward_by_tensors(&(&x + &delta).unwrap()),
                ),
            ];
            for (got, want) in pairs {
                let error = (got.unwrap() - want.unwrap()).unwrap().abs().unwrap();
                let worst = error.max_all().unwrap().to_scalar::<f32>().unwrap();
                assert!(worst < 1e-4, "{worst}");
            }
        }
    }

    #[test]
    fn rows_of_another_width_are_refused() {
        let weight = Tensor::ones(5, DType::F32, &Device::Cpu).unwrap();
        let norm = LayerNorm::try_new(&weight, None, 1e-5).unwrap();
        let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu).unwrap();
        assert!(norm.forward(&x).is_err());
    }
}
