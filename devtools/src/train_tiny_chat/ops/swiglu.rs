//! The gate of the feed-forward layer.
//!
//! # Source
//! Shazeer, "GLU Variants Improve Transformer", equation 6 (SwiGLU without biases).

use candle_core::{CpuStorage, CustomOp2, Layout, Shape, Tensor};
use rayon::prelude::*;

use super::{slice, values};

/// Values per task of a thread.
const VALUES_PER_TASK: usize = 8192;

/// `silu(gate) * up`, elementwise.
#[derive(Debug)]
pub(crate) struct SwiGlu;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

impl CustomOp2 for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu-with-gradient"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (gate, up) = (slice(gate, gate_layout)?, slice(up, up_layout)?);
        let mut out = vec![0.0; gate.len()];
        out.par_iter_mut()
            .with_min_len(VALUES_PER_TASK)
            .zip(gate)
            .zip(up)
            .for_each(|((out, gate), up)| *out = gate * sigmoid(*gate) * up);
        Ok((CpuStorage::F32(out), gate_layout.shape().clone()))
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _result: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let (mut gates, mut ups, grad) = (values(gate)?, values(up)?, values(grad)?);
        gates
            .par_iter_mut()
            .with_min_len(VALUES_PER_TASK)
            .zip(&mut ups)
            .zip(&grad)
            .for_each(|((gate, up), grad)| {
                let open = sigmoid(*gate);
                let silu = *gate * open;
                *gate = grad * *up * (open + silu * (1.0 - open));
                *up = grad * silu;
            });
        Ok((
            Some(Tensor::from_vec(gates, gate.shape(), gate.device())?),
            Some(Tensor::from_vec(ups, up.shape(), up.device())?),
        ))
    }
}
