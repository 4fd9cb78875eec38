//! [`Head`]: computes a sequence's embedding from its vectors, in f32 on the CPU.

use candle_core::{Device, Tensor};

use super::pooling::Pooling;
use crate::error::LoadError;
use crate::model::encoder::config::Nonlinearity;
use crate::model::encoder::feed_forward::activated;
use crate::model::encoder::layer_norm::LayerNorm;

/// The operations on a sequence's vectors.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadConfig {
    /// How they are pooled to one vector; several results are concatenated.
    pub pooling: Vec<Pooling>,
    /// The steps on the pooled vector, in order.
    pub steps: Vec<HeadStep>,
}

/// An operation on a pooled vector.
#[derive(Debug, Clone, PartialEq)]
pub enum HeadStep {
    /// `activation(x times weights + bias)`.
    Dense {
        /// The tensors' names without `.weight` and `.bias`.
        name: String,
        /// The folder of the checkout that has them.
        folder: String,
        /// Width of the input.
        in_features: usize,
        /// Width of the output.
        out_features: usize,
        /// Whether there is a bias.
        has_bias: bool,
        /// The activation.
        activation: Nonlinearity,
    },
    /// Layer normalization.
    LayerNorm {
        /// The tensors' names without `.weight` and `.bias`.
        name: String,
        /// The folder of the checkout that has them.
        folder: String,
        /// Width of input and output.
        width: usize,
        /// Whether there is a bias.
        has_bias: bool,
        /// Added to the variance before the square root.
        eps: f64,
    },
    /// Scales the vector to length 1.
    Normalize,
}

impl HeadConfig {
    /// The width of the result, for vectors of `hidden_size`.
    #[must_use]
    pub fn width(&self, hidden_size: usize) -> usize {
        let pooled = self.pooling.len() * hidden_size;
        let dense = self.steps.iter().rev().find_map(|step| match step {
            HeadStep::Dense { out_features, .. } => Some(*out_features),
            HeadStep::LayerNorm { .. } | HeadStep::Normalize => None,
        });
        dense.unwrap_or(pooled)
    }
}

/// A head with its weights.
#[derive(Debug)]
pub(super) struct Head {
    pooling: Vec<Pooling>,
    steps: Vec<Step>,
}

#[derive(Debug)]
enum Step {
    Dense {
        /// `[in_features, out_features]`.
        weight: Tensor,
        bias: Option<Tensor>,
        activation: Nonlinearity,
    },
    LayerNorm(LayerNorm),
    Normalize,
}

/// Reads a tensor of a head's step, in f32 on the CPU: from this folder of the checkout, of this name and shape.
pub(crate) type HeadTensors<'a> = dyn Fn(&str, &str, &[usize]) -> Result<Tensor, LoadError> + 'a;

impl Head {
    pub(super) fn try_new(
        config: &HeadConfig,
        tensor: &HeadTensors<'_>,
    ) -> Result<Self, LoadError> {
        let steps = (config.steps.iter())
            .map(|step| Step::try_new(step, tensor))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            pooling: config.pooling.clone(),
            steps,
        })
    }

    /// Applies the head to one sequence's `rows`, each `width` wide.
    pub(super) fn forward(&self, rows: &[f32], width: usize) -> candle_core::Result<Vec<f32>> {
        if width == 0 || rows.len() < width || !rows.len().is_multiple_of(width) {
            candle_core::bail!("{} numbers in rows of {width}", rows.len());
        }
        let mut pooled = Vec::with_capacity(self.pooling.len() * width);
        for mode in &self.pooling {
            mode.pool(rows, width, &mut pooled);
        }
        for step in &self.steps {
            pooled = step.forward(pooled)?;
        }
        Ok(pooled)
    }
}

impl Step {
    fn try_new(step: &HeadStep, tensor: &HeadTensors<'_>) -> Result<Self, LoadError> {
        let bias_of = |folder: &str, name: &str, width: usize| {
            tensor(folder, &format!("{name}.bias"), &[width])
        };
        match step {
            HeadStep::Dense {
                name,
                folder,
                in_features,
                out_features,
                has_bias,
                activation,
            } => {
                let shape = [*out_features, *in_features];
                let weight = tensor(folder, &format!("{name}.weight"), &shape)?;
                let bias = has_bias.then(|| bias_of(folder, name, *out_features));
                let weight = weight.t().and_then(|weight| weight.contiguous());
                Ok(Self::Dense {
                    weight: weight.map_err(|error| LoadError::candle(name, error))?,
                    bias: bias.transpose()?,
                    activation: *activation,
                })
            }
            HeadStep::LayerNorm {
                name,
                folder,
                width,
                has_bias,
                eps,
            } => {
                let weight = tensor(folder, &format!("{name}.weight"), &[*width])?;
                let bias = has_bias.then(|| bias_of(folder, name, *width));
                let norm = LayerNorm::try_new(&weight, bias.transpose()?, *eps);
                let norm = norm.map_err(|error| LoadError::candle(name, error))?;
                Ok(Self::LayerNorm(norm))
            }
            HeadStep::Normalize => Ok(Self::Normalize),
        }
    }

    fn forward(&self, mut x: Vec<f32>) -> candle_core::Result<Vec<f32>> {
        let row = |x: Vec<f32>| {
            let width = x.len();
            Tensor::from_vec(x, (1, width), &Device::Cpu)
        };
        match self {
            Self::Dense {
                weight,
                bias,
                activation,
            } => {
                let product = row(x)?.matmul(weight)?;
                let sum = match bias {
                    Some(bias) => product.broadcast_add(bias)?,
                    None => product,
                };
                activated(&sum, *activation)?.flatten_all()?.to_vec1()
            }
            Self::LayerNorm(norm) => norm.forward(&row(x)?)?.flatten_all()?.to_vec1(),
            Self::Normalize => {
                let length = x.iter().map(|number| number * number).sum::<f32>().sqrt();
                if length > 0.0 {
                    x.iter_mut().for_each(|number| *number /= length);
                }
                Ok(x)
            }
        }
    }
}
