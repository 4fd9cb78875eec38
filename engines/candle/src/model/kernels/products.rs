//! Products of one or two rows with a matrix of unquantized numbers.

use bytemuck::NoUninit;
use candle_core::{Result, Tensor};

use super::super::config::Activation;
use super::{Launch, address, are_for, module_of, narrow, numbers_of, to_write};

/// For more rows, candle's product is faster: it uses tensor cores.
const MOST_ROWS: usize = 2;
/// Threads per block; `PRODUCT_THREADS` in `products.cuh`.
const THREADS: u32 = 256;
/// Warps per block.
const WARPS: usize = THREADS as usize / 32;
/// Weights of a row that a warp reads at once.
const READ_AT_ONCE: usize = 1024;

/// As in `products.cuh`.
#[derive(Debug, Clone, Copy, NoUninit)]
#[repr(C)]
struct ProductArguments {
    out: u64,
    x: u64,
    weight: u64,
    in_features: u32,
    out_features: u32,
    parts: u32,
    activation: u32,
    limit: f32,
    unused: u32,
}

const _: () = assert!(size_of::<ProductArguments>() == 48);

/// Whether [`product`] and [`gated_product`] support these: one or two rows as wide as the weights, a multiple of eight.
pub(in crate::model) fn can_multiply(x: &Tensor, weight: &Tensor) -> bool {
    let (Ok((rows, width)), Ok((_, in_features))) = (x.dims2(), weight.dims2()) else {
        return false;
    };
    (1..=MOST_ROWS).contains(&rows)
        && width == in_features
        && width.is_multiple_of(8)
        && x.dtype() == weight.dtype()
        && x.is_contiguous()
        && weight.is_contiguous()
        && are_for(x.device(), x.dtype())
}

/// `x` times the transposed weights: `[rows, in_features]` and `[out_features, in_features]` to `[rows, out_features]`. A row's
/// bits do not depend on the other rows.
///
/// # Errors
/// [`can_multiply`] returns `false`, or the device fails.
pub(in crate::model) fn product(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    launch("product", x, weight, weight.dim(0)?, None)
}

/// `activation(first half) * second half` of the product's columns, bit for bit equal to [`product`] and [`gate`](super::gate).
///
/// # Errors
/// As for [`product`].
pub(in crate::model) fn gated_product(
    x: &Tensor,
    weight: &Tensor,
    activation: Activation,
) -> Result<Tensor> {
    let both = weight.dim(0)?;
    launch("gated_product", x, weight, both / 2, Some(activation))
}

fn launch(
    kernel: &str,
    x: &Tensor,
    weight: &Tensor,
    out_features: usize,
    activation: Option<Activation>,
) -> Result<Tensor> {
    if !can_multiply(x, weight) {
        candle_core::bail!("no kernel {kernel} for {x:?} and {weight:?}");
    }
    let (rows, in_features) = x.dims2()?;
    let out = to_write(&[rows, out_features], x.dtype(), x.device())?;
    let (activation, limit) = activation.map_or((0, 0.0), numbers_of);
    // The parts depend only on the width of rows, so sums always have the same order.
    let parts = in_features.div_ceil(READ_AT_ONCE).next_power_of_two();
    let parts = parts.min(WARPS);
    let launch = Launch {
        kernel: &format!("{kernel}_r{rows}"),
        module: module_of(x)?,
        grid: [out_features.div_ceil(WARPS / parts), 1, 1],
        threads: THREADS,
        arguments: ProductArguments {
            out: address(&out)?,
            x: address(x)?,
            weight: address(weight)?,
            in_features: narrow(in_features)?,
            out_features: narrow(out_features)?,
            parts: narrow(parts)?,
            activation,
            limit,
            unused: 0,
        },
    };
    #[expect(unsafe_code, reason = "kernels write through addresses")]
    // SAFETY: shapes, types and layouts were checked; `out` is new and has a place for each number; the weights have as many rows
    // as the kernel reads, or twice as many if gated.
    unsafe {
        launch.on(x.device())?;
    }
    Ok(out)
}
