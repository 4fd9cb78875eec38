//! The model's own operations, with gradients: candle's fused ones have none, and its composed ones are slow.
//!
//! All of them read contiguous `f32` on the CPU. Rows and sequences are distributed over rayon's threads; sums are never
//! split, so results do not depend on the number of threads.

mod attention;
mod cross_entropy;
mod linear;
mod rms_norm;
mod swiglu;

pub(crate) use attention::{Attention, Heads};
pub(crate) use cross_entropy::CrossEntropy;
pub(crate) use linear::Linear;
pub(crate) use rms_norm::RmsNorm;
pub(crate) use swiglu::SwiGlu;

use candle_core::{CpuStorage, Layout, Tensor, bail};

/// Rows per task of a thread.
const ROWS_PER_TASK: usize = 32;

/// The values of an operation's argument.
fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((begin, end)) => Ok(&storage.as_slice::<f32>()?[begin..end]),
        None => bail!("the training operations take contiguous tensors"),
    }
}

/// The values of a tensor in row-major order.
fn values(tensor: &Tensor) -> candle_core::Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

/// The dot product, with enough independent sums to keep the arithmetic units busy.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 32;
    let mut sums = [0.0f32; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a
        .remainder()
        .iter()
        .zip(b.remainder())
        .map(|(x, y)| x * y)
        .sum();
    for (a, b) in a.zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    for width in [16, 8, 4, 2, 1] {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
    }
    sums[0] + rest
}

/// `target += factor * source`.
fn add_scaled(target: &mut [f32], factor: f32, source: &[f32]) {
    for (target, source) in target.iter_mut().zip(source) {
        *target += factor * source;
    }
}

#[cfg(test)]
mod tests;
