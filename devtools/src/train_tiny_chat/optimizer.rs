//! One step of training: clipped gradients, AdamW, and a learning rate that rises, then falls.

use anyhow::Context as _;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::{AdamW, Optimizer as _, ParamsAdamW};
use rayon::prelude::*;

use crate::model::Model;

/// Gradients with a greater global norm are scaled down to it.
const MAX_GRADIENT_NORM: f64 = 1.0;
/// The share of steps in which the learning rate rises. It rises slowly, so that the heads of the initial weights are not
/// lost before anything else is learned.
const WARM_UP: f64 = 0.25;
/// The final learning rate, as a share of the highest.
const FINAL_RATE: f64 = 0.02;

/// The optimizer. Matrices decay; norms do not.
pub(crate) struct Optimizer {
    /// One per weight, so that they can be updated in parallel.
    weights: Vec<(Var, AdamW)>,
    peak_rate: f64,
    steps: usize,
    step: usize,
}

impl Optimizer {
    /// For a training of `steps` steps.
    ///
    /// # Errors
    /// If candle cannot create its state.
    pub(crate) fn try_new(model: &Model, peak_rate: f64, steps: usize) -> anyhow::Result<Self> {
        let of_weight = |(_, var): &(String, Var)| {
            let params = ParamsAdamW {
                lr: 0.0,
                beta1: 0.9,
                beta2: 0.98,
                eps: 1e-8,
                weight_decay: if var.dims().len() > 1 { 0.05 } else { 0.0 },
            };
            Ok((var.clone(), AdamW::new(vec![var.clone()], params)?))
        };
        Ok(Self {
            weights: model
                .vars()
                .iter()
                .map(of_weight)
                .collect::<anyhow::Result<_>>()?,
            peak_rate,
            steps,
            step: 0,
        })
    }

    /// Updates the weights with the sum of the parts' gradients.
    ///
    /// # Errors
    /// If a weight has no gradient, or the gradient is not finite.
    pub(crate) fn descend(&mut self, parts: &[GradStore]) -> anyhow::Result<()> {
        let sums = self
            .weights
            .par_iter()
            .map(|(var, _)| sum(var, parts))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let norm = sums.iter().map(|(_, square)| square).sum::<f64>().sqrt();
        anyhow::ensure!(
            norm.is_finite(),
            "the gradient is {norm} at step {}",
            self.step
        );
        let factor = (MAX_GRADIENT_NORM / norm).min(1.0);
        let rate = self.peak_rate * rate_share(self.step, self.steps);
        self.step += 1;
        self.weights
            .par_iter_mut()
            .zip(sums)
            .try_for_each(|((var, optimizer), (grad, _))| {
                let mut grads = GradStore::default();
                grads.insert(var, (grad * factor)?);
                optimizer.set_learning_rate(rate);
                optimizer.step(&grads)?;
                Ok(())
            })
    }
}

/// A weight's gradient summed over all parts, and the sum of its squares.
fn sum(var: &Var, parts: &[GradStore]) -> anyhow::Result<(Tensor, f64)> {
    let mut all: Option<Tensor> = None;
    for part in parts {
        let grad = part.get(var).context("a weight has no gradient")?;
        all = Some(match all {
            Some(sum) => (sum + grad)?,
            None => grad.clone(),
        });
    }
    let all = all.context("a step without parts")?;
    let square = f64::from(all.sqr()?.sum_all()?.to_scalar::<f32>()?);
    Ok((all, square))
}

/// The learning rate of a step as a share of the highest: half a parabola up, then half a cosine down.
fn rate_share(step: usize, steps: usize) -> f64 {
    let done = (step as f64 + 0.5) / steps as f64;
    if done < WARM_UP {
        return (done / WARM_UP).powi(2);
    }
    let fallen = (done - WARM_UP) / (1.0 - WARM_UP);
    FINAL_RATE + (1.0 - FINAL_RATE) * 0.5 * (1.0 + (std::f64::consts::PI * fallen).cos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_then_falls() {
        let shares: Vec<f64> = (0..1000).map(|step| rate_share(step, 1000)).collect();
        assert!(shares[..250].is_sorted());
        assert!(shares[250..].is_sorted_by(|a, b| a >= b));
        assert!(shares[0] < 0.02 && shares[125] < 0.26 && shares[250] > 0.99);
        assert!((shares[999] - FINAL_RATE).abs() < 1e-3);
    }
}
