//! The gated feed-forward block: `down(activation(gate(x)) * up(x))`.

use std::mem::MaybeUninit;

use candle_core::{D, Result, Tensor};

use super::config::Activation;
use super::host;
use super::kernels;
use super::linear::Linear;
use super::lora::{Beside, Site};
use super::parallel::{SharedMut, for_each_range_if_large, written};
use super::simd::{by_simd, exp, tanh};

/// One layer's feed-forward block.
#[derive(Debug)]
pub(super) struct FeedForward {
    /// The two products of the input, concatenated.
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
    pub(super) activation: Activation,
}

impl FeedForward {
    pub(super) fn forward(&self, x: &Tensor, beside: Beside<'_>) -> Result<Tensor> {
        let gated = self.gated(x, beside)?;
        beside.add(Site::Down, &gated, self.down.forward(&gated)?)
    }

    fn gated(&self, x: &Tensor, beside: Beside<'_>) -> Result<Tensor> {
        if !beside.adds(Site::GateUp)
            && let Some(gated) = self.gate_up.gated(x, self.activation)?
        {
            return Ok(gated);
        }
        let gate_up = beside.add(Site::GateUp, x, self.gate_up.forward(x)?)?;
        gate(&gate_up, self.activation)
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

/// As [`gate`], for rows of twice `width`.
fn gate_rows(gate_up: &[f32], width: usize, activation: Activation) -> Vec<f32> {
    let rows = gate_up.len() / (2 * width);
    let fill = |out: &SharedMut<'_, MaybeUninit<f32>>| {
        for_each_range_if_large(rows * GATE_PIECES, 8 * rows * width, |pieces| {
            for piece in pieces {
                let (row, piece) = (piece / GATE_PIECES, piece % GATE_PIECES);
                let columns = piece * width / GATE_PIECES..(piece + 1) * width / GATE_PIECES;
                let (gate, up) = gate_up[row * 2 * width..(row + 1) * 2 * width].split_at(width);
                #[expect(unsafe_code, reason = "threads write disjoint parts of one buffer")]
                // SAFETY: pieces do not overlap, and each is in only one range.
                let out =
                    unsafe { out.part(row * width + columns.start..row * width + columns.end) };
                let (gate, up) = (&gate[columns.clone()], &up[columns]);
                match activation {
                    Activation::Silu => silu_times(gate, up, out),
                    Activation::GeluTanh => gelu_times(gate, up, out),
                    Activation::ClampedSwish { limit } => clamped_times(gate, up, limit, out),
                }
            }
        });
    };
    #[expect(unsafe_code, reason = "the pieces write each number once")]
    // SAFETY: every piece is in a range, and writes all its columns.
    unsafe {
        written(rows * width, fill)
    }
}

/// Pieces per row, so that threads can share a single row.
const GATE_PIECES: usize = 4;

by_simd! {
    fn silu_times(gate: &[f32], up: &[f32], out: &mut [MaybeUninit<f32>]) = silu_times_inner
}

#[inline(always)]
fn silu_times_inner<const FMA: bool>(gate: &[f32], up: &[f32], out: &mut [MaybeUninit<f32>]) {
    for ((out, &gate), up) in out.iter_mut().zip(gate).zip(up) {
        out.write(gate / (1.0 + exp::<FMA>(-gate)) * up);
    }
}

by_simd! {
    fn gelu_times(gate: &[f32], up: &[f32], out: &mut [MaybeUninit<f32>]) = gelu_times_inner
}

#[inline(always)]
fn gelu_times_inner<const FMA: bool>(gate: &[f32], up: &[f32], out: &mut [MaybeUninit<f32>]) {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    for ((out, &gate), up) in out.iter_mut().zip(gate).zip(up) {
        let inner = SQRT_2_OVER_PI * gate * (1.0 + 0.044_715 * gate * gate);
        out.write(0.5 * gate * (1.0 + tanh::<FMA>(inner)) * up);
    }
}

by_simd! {
    fn clamped_times(gate: &[f32], up: &[f32], limit: f32, out: &mut [MaybeUninit<f32>]) = clamped_times_inner
}

#[inline(always)]
fn clamped_times_inner<const FMA: bool>(
    gate: &[f32],
    up: &[f32],
    limit: f32,
    out: &mut [MaybeUninit<f32>],
) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        // A NaN stays, because every comparison with it is false.
        let gate = if gate > limit { limit } else { gate };
        let up = if up > limit { limit } else { up };
        let up = if up < -limit { -limit } else { up };
        let swish = gate / (1.0 + exp::<FMA>(-Activation::SWISH_SLOPE * gate));
        out.write(swish * (up + 1.0));
    }
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
