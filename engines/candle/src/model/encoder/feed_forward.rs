//! An encoder's feed-forward block, and activations.

use candle_core::{D, Result, Tensor};
use genset_kernels::activated_numbers;

use super::config::Nonlinearity;
use crate::model::host;
use crate::model::linear::Linear;

/// `down(activation(up(x)))`, or if gated, `down(activation(first half of up(x)) * second half)`.
#[derive(Debug)]
pub(super) struct EncoderFeedForward {
    pub(super) up: Linear,
    pub(super) down: Linear,
    pub(super) activation: Nonlinearity,
    pub(super) is_gated: bool,
}

impl EncoderFeedForward {
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inner = self.up.forward(x)?;
        let inner = if self.is_gated {
            let width = inner.dim(1)? / 2;
            let gate = inner.narrow(D::Minus1, width, width)?;
            let inner = inner.narrow(D::Minus1, 0, width)?.contiguous()?;
            (activated(&inner, self.activation)? * gate)?
        } else {
            activated(&inner, self.activation)?
        };
        self.down.forward(&inner)
    }
}

/// Applies the activation to every number.
pub(in crate::model) fn activated(x: &Tensor, activation: Nonlinearity) -> Result<Tensor> {
    if activation == Nonlinearity::Identity {
        return Ok(x.clone());
    }
    if !x.device().is_cpu() {
        return by_tensors(x, activation);
    }
    let out = host::read(x, |x| activated_numbers(x, activation))?;
    Tensor::from_vec(out, x.shape(), x.device())
}

fn by_tensors(x: &Tensor, activation: Nonlinearity) -> Result<Tensor> {
    match activation {
        Nonlinearity::Gelu => x.gelu_erf(),
        Nonlinearity::GeluTanh => x.gelu(),
        Nonlinearity::Relu => x.relu(),
        Nonlinearity::Silu => x.silu(),
        Nonlinearity::Tanh => x.tanh(),
        Nonlinearity::Sigmoid => candle_nn::ops::sigmoid(x),
        Nonlinearity::Identity => Ok(x.clone()),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn activations_are_candles() {
        let data: Vec<f32> = (0..9001).map(|i| (i as f32 - 4500.0) / 400.0).collect();
        let x = Tensor::from_vec(data, 9001, &Device::Cpu).unwrap();
        for activation in [
            Nonlinearity::Gelu,
            Nonlinearity::GeluTanh,
            Nonlinearity::Relu,
            Nonlinearity::Silu,
            Nonlinearity::Tanh,
            Nonlinearity::Sigmoid,
            Nonlinearity::Identity,
        ] {
            let got = activated(&x, activation).unwrap();
            let want = by_tensors(&x, activation).unwrap();
            let error = (got - want).unwrap().abs().unwrap();
            let worst = error.max_all().unwrap().to_scalar::<f32>().unwrap();
            assert!(worst < 3e-6, "{activation:?}: {worst}");
        }
    }
}
