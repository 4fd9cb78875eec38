//! One step of training: clipped gradients, AdamW, and a learning rate that rises, then falls.

use anyhow::Context as _;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::{AdamW, Optimizer as _, ParamsAdamW};

use crate::model::Model;

/// Gradients longer than this, all of them taken as one vector, are shortened to it.
const MAX_GRADIENT_NORM: f64 = 1.0;
/// The share of the steps in which the learning rate rises.
const WARM_UP: f64 = 0.05;
/// The learning rate at the end, as a share of the highest.
const FINAL_RATE: f64 = 0.02;

/// The optimizer. Matrices decay; norms do not.
pub(crate) struct Optimizer {
    matrices: AdamW,
    norms: AdamW,
    vars: Vec<Var>,
    peak_rate: f64,
    steps: usize,
    step: usize,
}

impl Optimizer {
    /// For a training of `steps` steps.
    ///
    /// # Errors
    /// When candle cannot make its state.
    pub(crate) fn try_new(model: &Model, peak_rate: f64, steps: usize) -> anyhow::Result<Self> {
        let vars: Vec<Var> = model.vars().iter().map(|(_, var)| var.clone()).collect();
        let (matrices, norms) = vars.iter().cloned().partition(|var| var.dims().len() > 1);
        let params = |weight_decay| ParamsAdamW {
            lr: 0.0,
            beta1: 0.9,
            beta2: 0.98,
            eps: 1e-8,
            weight_decay,
        };
        Ok(Self {
            matrices: AdamW::new(matrices, params(0.05))?,
            norms: AdamW::new(norms, params(0.0))?,
            vars,
            peak_rate,
            steps,
            step: 0,
        })
    }

    /// Moves the weights against the gradient of the loss.
    ///
    /// # Errors
    /// When a weight has no gradient, or the gradient is not finite.
    pub(crate) fn descend(&mut self, loss: &Tensor) -> anyhow::Result<()> {
        let mut grads = loss.backward()?;
        let norm = self.norm(&grads)?;
        anyhow::ensure!(
            norm.is_finite(),
            "the gradient is {norm} at step {}",
            self.step
        );
        if norm > MAX_GRADIENT_NORM {
            for var in &self.vars {
                let grad = grads.remove(var).context("a weight has no gradient")?;
                grads.insert(var, (grad * (MAX_GRADIENT_NORM / norm))?);
            }
        }
        let rate = self.peak_rate * rate_share(self.step, self.steps);
        self.step += 1;
        for optimizer in [&mut self.matrices, &mut self.norms] {
            optimizer.set_learning_rate(rate);
            optimizer.step(&grads)?;
        }
        Ok(())
    }

    /// The length of all gradients taken as one vector.
    fn norm(&self, grads: &GradStore) -> anyhow::Result<f64> {
        let mut sum = 0.0;
        for var in &self.vars {
            let grad = grads.get(var).context("a weight has no gradient")?;
            sum += f64::from(grad.sqr()?.sum_all()?.to_scalar::<f32>()?);
        }
        Ok(sum.sqrt())
    }
}

/// The learning rate of a step as a share of the highest: a straight line up, then half a cosine down.
fn rate_share(step: usize, steps: usize) -> f64 {
    let done = (step as f64 + 0.5) / steps as f64;
    if done < WARM_UP {
        return done / WARM_UP;
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
        assert!(shares[..50].is_sorted());
        assert!(shares[50..].is_sorted_by(|a, b| a >= b));
        assert!(shares[0] < 0.02 && shares[50] > 0.99);
        assert!((shares[999] - FINAL_RATE).abs() < 1e-3);
    }
}
