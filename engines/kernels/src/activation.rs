//! Activations of numbers one by one.

use std::mem::MaybeUninit;

use crate::parallel::{SharedMut, for_each_range_if_large, written};
use crate::simd::{by_simd, exp, fma, tanh};

/// An activation of a feed-forward block or of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nonlinearity {
    /// GELU with the error function.
    Gelu,
    /// GELU in its tanh approximation.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// `x * sigmoid(x)`.
    Silu,
    /// `tanh(x)`.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `x`.
    Identity,
}

/// Applies the activation to every number.
#[must_use]
pub fn activated_numbers(x: &[f32], activation: Nonlinearity) -> Vec<f32> {
    /// Numbers per piece of a thread's work.
    const PIECE: usize = 4096;
    let fill = |out: &SharedMut<'_, MaybeUninit<f32>>| {
        for_each_range_if_large(x.len().div_ceil(PIECE), 2 * x.len(), |pieces| {
            let range = pieces.start * PIECE..(pieces.end * PIECE).min(x.len());
            #[expect(unsafe_code, reason = "threads write disjoint parts of one buffer")]
            // SAFETY: ranges do not overlap.
            let out = unsafe { out.part(range.clone()) };
            activate(&x[range], activation, out);
        });
    };
    #[expect(unsafe_code, reason = "each number is written once")]
    // SAFETY: every piece is in a range, and writes all its numbers.
    unsafe {
        written(x.len(), fill)
    }
}

by_simd! {
    fn activate(x: &[f32], activation: Nonlinearity, out: &mut [MaybeUninit<f32>]) = activate_inner
}

#[inline(always)]
fn activate_inner<const FMA: bool>(
    x: &[f32],
    activation: Nonlinearity,
    out: &mut [MaybeUninit<f32>],
) {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    match activation {
        Nonlinearity::Gelu => each(x, out, |x| {
            0.5 * x * (1.0 + erf::<FMA>(x * std::f32::consts::FRAC_1_SQRT_2))
        }),
        Nonlinearity::GeluTanh => each(x, out, |x| {
            let inner = SQRT_2_OVER_PI * x * (1.0 + 0.044_715 * x * x);
            0.5 * x * (1.0 + tanh::<FMA>(inner))
        }),
        Nonlinearity::Relu => each(x, out, |x| x.max(0.0)),
        Nonlinearity::Silu => each(x, out, |x| x / (1.0 + exp::<FMA>(-x))),
        Nonlinearity::Tanh => each(x, out, tanh::<FMA>),
        Nonlinearity::Sigmoid => each(x, out, |x| 1.0 / (1.0 + exp::<FMA>(-x))),
        Nonlinearity::Identity => each(x, out, |x| x),
    }
}

#[inline(always)]
fn each(x: &[f32], out: &mut [MaybeUninit<f32>], f: impl Fn(f32) -> f32) {
    for (out, &x) in out.iter_mut().zip(x) {
        out.write(f(x));
    }
}

/// The error function, to about 3e-7.
///
/// # Source
/// Abramowitz and Stegun, Handbook of Mathematical Functions, formula 7.1.26.
#[inline(always)]
fn erf<const FMA: bool>(x: f32) -> f32 {
    let magnitude = x.abs();
    let t = 1.0 / fma::<FMA>(0.327_591_1, magnitude, 1.0);
    let mut p = 1.061_405_4;
    for c in [-1.453_152, 1.421_413_8, -0.284_496_72, 0.254_829_6] {
        p = fma::<FMA>(p, t, c);
    }
    let erf = 1.0 - p * t * exp::<FMA>(-magnitude * magnitude);
    erf.copysign(x)
}
