//! Multiplies rows by a transposed weight.
//!
//! Candle can compose it, but then computes the weight's gradient transposed and copies it one number at a time.

use candle_core::backend::BackendStorage as _;
use candle_core::{CpuStorage, CustomOp2, Layout, Shape, Tensor};

/// `x: [rows, in]` times the transposed `weight: [out, in]`.
#[derive(Debug)]
pub(crate) struct Linear;

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "linear-with-gradient"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (rows, inner) = x_layout.shape().dims2()?;
        let (outer, _) = weight_layout.shape().dims2()?;
        let turned = weight_layout.transpose(0, 1)?;
        let product = x.matmul(weight, (1, rows, outer, inner), x_layout, &turned)?;
        Ok((product, Shape::from((rows, outer))))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _result: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(grad.matmul(weight)?), Some(grad.t()?.matmul(x)?)))
    }
}
