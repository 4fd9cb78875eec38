//! The loss.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor, bail};
use rayon::prelude::*;

use super::{ROWS_PER_TASK, slice, values};

/// The mean negative log probability of the targets over the rows of `logits: [rows, vocabulary]`, in nats.
#[derive(Debug)]
pub(crate) struct CrossEntropy {
    /// The target token of each row, below the size of the vocabulary.
    pub(crate) targets: Vec<u32>,
}

/// The greatest logit, and the logarithm of the sum of exponentials.
fn log_sum(logits: &[f32]) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    max + logits.iter().map(|x| (x - max).exp()).sum::<f32>().ln()
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy-with-gradient"
    }

    fn cpu_fwd(
        &self,
        logits: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (rows, vocabulary) = layout.shape().dims2()?;
        if rows != self.targets.len() {
            bail!("{} targets for {rows} rows", self.targets.len());
        }
        let losses: Vec<f32> = slice(logits, layout)?
            .par_chunks_exact(vocabulary)
            .with_min_len(ROWS_PER_TASK)
            .zip(&self.targets)
            .map(|(logits, &target)| log_sum(logits) - logits[target as usize])
            .collect();
        let mean = losses.iter().sum::<f32>() / rows as f32;
        Ok((CpuStorage::F32(vec![mean]), Shape::from(())))
    }

    fn bwd(
        &self,
        logits: &Tensor,
        _result: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<Option<Tensor>> {
        let (rows, vocabulary) = logits.dims2()?;
        let factor = grad.to_scalar::<f32>()? / rows as f32;
        let mut out = values(logits)?;
        out.par_chunks_exact_mut(vocabulary)
            .with_min_len(ROWS_PER_TASK)
            .zip(&self.targets)
            .for_each(|(row, &target)| {
                let log_sum = log_sum(row);
                for value in row.iter_mut() {
                    *value = (*value - log_sum).exp() * factor;
                }
                row[target as usize] -= factor;
            });
        Tensor::from_vec(out, logits.shape(), logits.device()).map(Some)
    }
}
