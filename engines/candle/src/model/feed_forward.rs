//! The feed-forward block: `down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))`.

use candle_core::{D, Result, Tensor};
use genset_kernels::gate_rows;

use super::config::Activation;
use super::encoder::config::Nonlinearity;
use super::encoder::feed_forward::activated;
use super::host;
use super::kernels;
use super::linear::Linear;
use super::lora::{Beside, Site};

/// One layer's feed-forward block.
#[derive(Debug)]
pub(super) struct FeedForward {
    /// The two products of the input, concatenated; if it is not gated, the only one.
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
    pub(super) activation: Activation,
    pub(super) is_gated: bool,
}

impl FeedForward {
    pub(super) fn forward(&self, x: &Tensor, beside: Beside<'_>) -> Result<Tensor> {
        let gated = self.gated(x, beside)?;
        beside.add(Site::Down, &gated, self.down.forward(&gated)?)
    }

    fn gated(&self, x: &Tensor, beside: Beside<'_>) -> Result<Tensor> {
        if !self.is_gated {
            return self.activated(x);
        }
        if !beside.adds(Site::GateUp)
            && let Some(gated) = self.gate_up.gated(x, self.activation)?
        {
            return Ok(gated);
        }
        let gate_up = beside.add(Site::GateUp, x, self.gate_up.forward(x)?)?;
        gate(&gate_up, self.activation)
    }

    /// The activation of a product that is not gated. Adapters do not change it.
    fn activated(&self, x: &Tensor) -> Result<Tensor> {
        let nonlinearity = match self.activation {
            Activation::Silu => Nonlinearity::Silu,
            Activation::GeluTanh => Nonlinearity::GeluTanh,
            Activation::ClampedSwish { .. } => {
                candle_core::bail!("a clamped activation without a gate")
            }
        };
        activated(&self.gate_up.forward(x)?, nonlinearity)
    }

    /// Whether any of its matrices is quantized.
    #[cfg(any(feature = "cuda", test))]
    pub(super) fn is_quantized(&self) -> bool {
        self.gate_up.is_quantized() || self.down.is_quantized()
    }
}

/// `activation(first half) * second half` of every row.
fn gate(gate_up: &Tensor, activation: Activation) -> Result<Tensor> {
    let (rows, both) = gate_up.dims2()?;
    let width = both / 2;
    if !gate_up.device().is_cpu() {
        if kernels::are_for(gate_up.device(), gate_up.dtype()) {
            return kernels::gate(gate_up, activation);
        }
        let gate = gate_up.narrow(D::Minus1, 0, width)?;
        let up = gate_up.narrow(D::Minus1, width, width)?;
        return match activation {
            Activation::Silu => gate.silu()? * up,
            Activation::GeluTanh => gate.gelu()? * up,
            Activation::ClampedSwish { limit } => {
                let gate = gate.clamp(f32::NEG_INFINITY, limit)?;
                let inner = gate.affine(f64::from(Activation::SWISH_SLOPE), 0.0)?;
                let swish = gate * candle_nn::ops::sigmoid(&inner)?;
                swish? * up.clamp(-limit, limit)?.affine(1.0, 1.0)?
            }
        };
    }
    let out = host::read(gate_up, |gate_up| gate_rows(gate_up, width, activation))?;
    Tensor::from_vec(out, (rows, width), gate_up.device())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn gates_are_candles() {
        let data: Vec<f32> = (0..2 * 66).map(|i| (i as f32 - 60.0) / 7.0).collect();
        let x = Tensor::from_vec(data, (2, 66), &Device::Cpu).unwrap();
        let (first, second) = (x.narrow(1, 0, 33).unwrap(), x.narrow(1, 33, 33).unwrap());
        let limit = 2.5;
        let clamped = first.clamp(-100.0, limit).unwrap();
        let sigmoid = candle_nn::ops::sigmoid(&(&clamped * 1.702).unwrap()).unwrap();
        let more = (second.clamp(-limit, limit).unwrap() + 1.0).unwrap();
        let cases = [
            (Activation::Silu, first.silu().unwrap(), &second),
            (Activation::GeluTanh, first.gelu().unwrap(), &second),
            (
                Activation::ClampedSwish { limit },
                (clamped * sigmoid).unwrap(),
                &more,
            ),
        ];
        for (activation, want, up) in cases {
            let want = (want * up).unwrap();
            let got = gate(&x, activation).unwrap();
            let error = (want - got)
                .unwrap()
                .abs()
                .unwrap()
                .max_all()
                .unwrap()
                .to_scalar::<f32>()
                .unwrap();
            assert!(error < 2e-5, "{activation:?}: {error}");
        }
    }
}
