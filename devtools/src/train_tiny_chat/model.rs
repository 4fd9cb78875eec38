//! The model: a Llama in `f32`, with gradients, for packed batches.
//!
//! It has no KV cache: it is only trained, and checked after training.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use candle_core::{DType, Device, Tensor, Var};
use rand::Rng;

use genset_devtools::checkout::{Config, EMBEDDING, FINAL_NORM};

use crate::encode::Encoder;
use crate::first_weights::{Landmarks, first_weights};
use crate::ops::{Attention, Heads, Linear, RmsNorm, SwiGlu};

/// The model and its weights.
#[derive(Debug)]
pub(crate) struct Model {
    config: Config,
    heads: Arc<Heads>,
    vars: Vec<(String, Var)>,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
}

#[derive(Debug)]
struct Layer {
    input_norm: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    post_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

/// `x` times the transposed weight.
fn linear(x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
    x.apply_op2(weight, Linear)
}

impl Layer {
    fn forward(
        &self,
        x: &Tensor,
        model: &Model,
        lengths: &Arc<Vec<usize>>,
    ) -> candle_core::Result<Tensor> {
        let normed = x.apply_op2(&self.input_norm, model.rms_norm())?;
        let attention = Attention {
            heads: model.heads.clone(),
            lengths: lengths.clone(),
        };
        let (k, v) = (linear(&normed, &self.k)?, linear(&normed, &self.v)?);
        let attended = linear(&normed, &self.q)?.apply_op3(&k, &v, attention)?;
        let x = (x + linear(&attended, &self.o)?)?;
        let normed = x.apply_op2(&self.post_norm, model.rms_norm())?;
        let inner = linear(&normed, &self.gate)?.apply_op2(&linear(&normed, &self.up)?, SwiGlu)?;
        x + linear(&inner, &self.down)?
    }
}

impl Model {
    /// A model with the initial weights for training.
    ///
    /// # Errors
    /// The errors of [`first_weights`].
    pub(crate) fn random(
        config: Config,
        encoder: &Encoder,
        rng: &mut impl Rng,
    ) -> anyhow::Result<Self> {
        let tensors = first_weights(&config, &Landmarks::of(encoder)?, rng)?;
        Self::from_tensors(config, &tensors)
    }

    /// A model with these weights, by their names in a Hugging Face checkpoint.
    ///
    /// # Errors
    /// If a tensor is missing or its shape differs from the configuration.
    pub(crate) fn from_tensors(
        config: Config,
        tensors: &HashMap<String, Tensor>,
    ) -> anyhow::Result<Self> {
        ensure!(
            config.tie_word_embeddings,
            "only tie_word_embeddings = true is trained"
        );
        let mut vars = Vec::new();
        let mut by_name = HashMap::new();
        for (name, shape) in config.tensors() {
            let tensor = tensors
                .get(&name)
                .with_context(|| format!("the weights lack {name}"))?;
            ensure!(
                tensor.dims() == shape,
                "{name} has the shape {:?}, the configuration says {shape:?}",
                tensor.dims()
            );
            let var = Var::from_tensor(&tensor.to_dtype(DType::F32)?)?;
            by_name.insert(name.clone(), var.as_tensor().clone());
            vars.push((name, var));
        }
        let take = |name: &str| {
            let tensor = by_name.get(name).cloned();
            tensor.with_context(|| format!("the weights lack {name}"))
        };
        let layers = (0..config.num_hidden_layers)
            .map(|layer| {
                let part = |part: &str| take(&format!("model.layers.{layer}.{part}.weight"));
                Ok(Layer {
                    input_norm: part("input_layernorm")?,
                    q: part("self_attn.q_proj")?,
                    k: part("self_attn.k_proj")?,
                    v: part("self_attn.v_proj")?,
                    o: part("self_attn.o_proj")?,
                    post_norm: part("post_attention_layernorm")?,
                    gate: part("mlp.gate_proj")?,
                    up: part("mlp.up_proj")?,
                    down: part("mlp.down_proj")?,
                })
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Self {
            heads: Arc::new(Heads::new(
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                config.rope_theta,
                config.max_position_embeddings,
            )),
            embedding: take(EMBEDDING)?,
            layers,
            norm: take(FINAL_NORM)?,
            vars,
            config,
        })
    }

    fn rms_norm(&self) -> RmsNorm {
        RmsNorm {
            epsilon: self.config.rms_norm_eps,
        }
    }

    /// The weights, in the order of the configuration.
    pub(crate) fn vars(&self) -> &[(String, Var)] {
        &self.vars
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn parameter_count(&self) -> usize {
        self.vars.iter().map(|(_, var)| var.elem_count()).sum()
    }

    /// The logits `[rows, vocabulary]` after the tokens at `rows` of a packed batch.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, or a sequence is longer than the context.
    pub(crate) fn forward(
        &self,
        tokens: &[u32],
        lengths: &Arc<Vec<usize>>,
        rows: &[u32],
    ) -> anyhow::Result<Tensor> {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        ensure!(
            longest <= self.config.max_position_embeddings,
            "a sequence of {longest} tokens does not fit into the context"
        );
        let tokens = Tensor::new(tokens, &Device::Cpu)?;
        let mut x = self.embedding.index_select(&tokens, 0)?;
        for layer in &self.layers {
            x = layer.forward(&x, self, lengths)?;
        }
        let x = x.index_select(&Tensor::new(rows, &Device::Cpu)?, 0)?;
        let x = x.apply_op2(&self.norm, self.rms_norm())?;
        Ok(linear(&x, &self.embedding)?)
    }
}

#[cfg(test)]
mod tests {
    use genset_devtools::tiny_chat::folder;
    use rand::SeedableRng as _;
    use rand::rngs::StdRng;

    use super::*;

    fn config() -> Config {
        Config::read(folder()).unwrap()
    }

    fn random() -> Model {
        let encoder = Encoder::read(folder()).unwrap();
        Model::random(config(), &encoder, &mut StdRng::seed_from_u64(1)).unwrap()
    }

    #[test]
    fn parameters_are_between_one_and_four_million() {
        let model = random();
        assert!((1_000_000..4_000_000).contains(&model.parameter_count()));
    }

    #[test]
    fn logits_of_a_sequence_do_not_depend_on_its_neighbours() {
        let model = random();
        let alone = model.forward(&[5, 6, 7], &Arc::new(vec![3]), &[2]).unwrap();
        let packed = model
            .forward(&[9, 8, 5, 6, 7], &Arc::new(vec![2, 3]), &[4])
            .unwrap();
        let far = (alone - packed).unwrap().abs().unwrap().max_all().unwrap();
        assert!(far.to_scalar::<f32>().unwrap() < 1e-5);
    }

    #[test]
    fn a_missing_tensor_is_named() {
        let error = Model::from_tensors(config(), &HashMap::new()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the weights lack model.embed_tokens.weight"
        );
    }
}
