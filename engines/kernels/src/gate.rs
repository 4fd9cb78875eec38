//! The gates of feed-forward blocks: `activation(gate) * up`.

use std::mem::MaybeUninit;

use crate::parallel::{SharedMut, for_each_range_if_large, written};
use crate::simd::{by_simd, exp, tanh};

/// The activation of a gated feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU in its tanh approximation.
    GeluTanh,
    /// `x * sigmoid(1.702 * x)` with gates clamped to at most `limit`. The other factor is clamped to `-limit..=limit`, plus 1
    /// (gpt-oss).
    ClampedSwish {
        /// Above 0.
        limit: f32,
    },
}

impl Activation {
    /// The factor inside the sigmoid of `ClampedSwish`.
    pub const SWISH_SLOPE: f32 = 1.702;
}

/// `activation(first half) * second half` of every row of `gate_up`, `[rows, 2 * width]`: `[rows, width]`.
///
/// # Panics
/// `width` is 0.
#[must_use]
pub fn gate_rows(gate_up: &[f32], width: usize, activation: Activation) -> Vec<f32> {
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
