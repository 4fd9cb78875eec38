//! The decoder: embedding, layers, last norm, output matrix.

use candle_core::{DType, Device, Tensor};

use super::attention::{Attention, Step};
use super::batch::{BatchError, BatchLimits, StepBatch};
use super::config::ModelConfig;
use super::feed_forward::FeedForward;
use super::kv_cache::KvCache;
use super::linear::{Linear, Matrix};
use super::norm::Norm;
use super::rope::Frequencies;
use super::weights::Weights;
use crate::error::LoadError;

/// A decoder-only language model with its weights.
#[derive(Debug)]
pub struct Model {
    embedding: Matrix,
    embedding_scale: f32,
    layers: Vec<Layer>,
    norm: Norm,
    /// The output matrix.
    output: Linear,
    logit_softcap: Option<f32>,
    full_frequencies: Frequencies,
    windowed_frequencies: Frequencies,
    vocab_size: usize,
    device: Device,
}

/// Why a step could not be computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// The batch does not fit the model or the KV cache.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The KV cache belongs to another model.
    #[error("a KV cache of {cache} layers for a model of {model}")]
    KvCache {
        /// Layers of the KV cache.
        cache: usize,
        /// Layers of the model.
        model: usize,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl Model {
    /// Takes the weights that `config` calls for, asking for each once, in the order in which they are used.
    ///
    /// # Errors
    /// A weight is missing, has another shape or cannot be read.
    pub fn try_new(config: &ModelConfig, weights: &mut dyn Weights) -> Result<Self, LoadError> {
        let embedding_name = "model.embed_tokens.weight";
        let (vocab_size, hidden_size) = (config.vocab_size, config.hidden_size);
        let embedding = weights.embedding(embedding_name, vocab_size, hidden_size)?;
        let layers = (0..config.num_layers)
            .map(|layer| Layer::try_new(config, layer, weights))
            .collect::<Result<_, _>>()?;
        let norm = norm(config, weights, "model.norm.weight", hidden_size)?;
        let (embedding, output) = if config.is_tied {
            let packed = embedding
                .into_packed()
                .map_err(|error| LoadError::candle(embedding_name, error))?;
            (packed.clone(), packed)
        } else {
            (
                embedding,
                weights.matrix("lm_head.weight", vocab_size, hidden_size)?,
            )
        };
        Ok(Self {
            embedding,
            embedding_scale: config.embedding_scale,
            layers,
            norm,
            output: linear("lm_head.weight", vec![output], None)?,
            logit_softcap: config.logit_softcap,
            full_frequencies: Frequencies::full(&config.rope, config.head_dim),
            windowed_frequencies: Frequencies::windowed(&config.rope, config.head_dim),
            vocab_size,
            device: weights.device().clone(),
        })
    }

    /// Computes one step: stores the keys and values of all rows, and returns the logits of `batch.logit_rows`,
    /// `[logit_rows, vocab_size]` in f32.
    ///
    /// # Errors
    /// The batch does not fit, or a tensor operation fails; the slots of the batch's rows may have been written.
    pub fn forward(&self, kv: &mut KvCache, batch: &StepBatch) -> Result<Tensor, ForwardError> {
        if kv.num_layers() != self.layers.len() {
            return Err(ForwardError::KvCache {
                cache: kv.num_layers(),
                model: self.layers.len(),
            });
        }
        let spec = kv.spec();
        let (num_blocks, block_size) = (spec.num_blocks, spec.block_size);
        batch.check(BatchLimits {
            vocab_size: self.vocab_size,
            num_blocks,
            block_size,
        })?;
        if batch.tokens.is_empty() {
            return Ok(Tensor::zeros(
                (0, self.vocab_size),
                DType::F32,
                &self.device,
            )?);
        }
        let hidden = self.hidden_states(kv, batch)?;
        Ok(self.logits(&hidden, batch)?)
    }

    /// What the last layer leaves, before the last norm; `[rows, hidden_size]`.
    fn hidden_states(&self, kv: &mut KvCache, batch: &StepBatch) -> candle_core::Result<Tensor> {
        let mut stream = Stream {
            x: self.embed(&batch.tokens)?,
            delta: None,
        };
        let Some(first) = self.layers.first() else {
            return stream.into_sum();
        };
        let has_windows = self
            .layers
            .iter()
            .any(|layer| layer.attention.window.is_some());
        let frequencies = [&self.full_frequencies, &self.windowed_frequencies];
        let step = Step::try_new(batch, &first.attention, frequencies, has_windows, kv)?;
        for (index, layer) in self.layers.iter().enumerate() {
            layer.forward(&mut stream, &step, kv, index, batch)?;
        }
        stream.into_sum()
    }

    fn embed(&self, tokens: &[u32]) -> candle_core::Result<Tensor> {
        let x = self
            .embedding
            .rows(tokens, &self.device, self.norm.weight().dtype())?;
        if self.embedding_scale == 1.0 {
            Ok(x)
        } else {
            x.affine(f64::from(self.embedding_scale), 0.0)
        }
    }

    fn logits(&self, hidden: &Tensor, batch: &StepBatch) -> candle_core::Result<Tensor> {
        let everything = batch
            .logit_rows
            .iter()
            .map(|&row| row as usize)
            .eq(0..batch.tokens.len());
        let hidden = if everything {
            hidden.clone()
        } else {
            let rows = Tensor::from_slice(&batch.logit_rows, batch.logit_rows.len(), &self.device)?;
            hidden.index_select(&rows, 0)?
        };
        if batch.logit_rows.is_empty() {
            return Tensor::zeros((0, self.vocab_size), DType::F32, &self.device);
        }
        let logits = self
            .output
            .forward(&self.norm.forward(&hidden)?)?
            .to_dtype(DType::F32)?;
        match self.logit_softcap {
            Some(cap) => logits
                .affine(1.0 / f64::from(cap), 0.0)?
                .tanh()?
                .affine(f64::from(cap), 0.0),
            None => Ok(logits),
        }
    }
}

/// The residual stream. What a block adds to it is added together with the norm that follows.
#[derive(Debug)]
struct Stream {
    x: Tensor,
    delta: Option<Tensor>,
}

impl Stream {
    /// Adds what is outstanding, and gives the sum normalized.
    fn normed(&mut self, norm: &Norm) -> candle_core::Result<Tensor> {
        match self.delta.take() {
            None => norm.forward(&self.x),
            Some(delta) => {
                let (x, normed) = norm.add_forward(&self.x, &delta)?;
                self.x = x;
                Ok(normed)
            }
        }
    }

    fn into_sum(self) -> candle_core::Result<Tensor> {
        match self.delta {
            None => Ok(self.x),
            Some(delta) => self.x + delta,
        }
    }
}

/// One decoder block.
#[derive(Debug)]
struct Layer {
    input_norm: Norm,
    qkv: Linear,
    attention: Attention,
    output: Linear,
    attention_post_norm: Option<Norm>,
    feed_forward_norm: Norm,
    feed_forward: FeedForward,
    feed_forward_post_norm: Option<Norm>,
}

impl Layer {
    fn forward(
        &self,
        stream: &mut Stream,
        step: &Step,
        kv: &mut KvCache,
        index: usize,
        batch: &StepBatch,
    ) -> candle_core::Result<()> {
        let qkv = self.qkv.forward(&stream.normed(&self.input_norm)?)?;
        let attended = self.attention.forward(&qkv, step, kv.layer(index), batch)?;
        stream.delta = Some(post(
            self.attention_post_norm.as_ref(),
            self.output.forward(&attended)?,
        )?);
        let fed = self
            .feed_forward
            .forward(&stream.normed(&self.feed_forward_norm)?)?;
        stream.delta = Some(post(self.feed_forward_post_norm.as_ref(), fed)?);
        Ok(())
    }

    fn try_new(
        config: &ModelConfig,
        index: usize,
        weights: &mut dyn Weights,
    ) -> Result<Self, LoadError> {
        let name = |tail: &str| format!("model.layers.{index}.{tail}");
        let hidden = config.hidden_size;
        let input_norm = norm(config, weights, &name("input_layernorm.weight"), hidden)?;
        let qkv = qkv(config, index, weights)?;
        let attention = attention(config, index, weights)?;
        let q_width = config.num_heads * config.head_dim;
        let o_proj = (name("self_attn.o_proj"), hidden, q_width);
        let output = projections(weights, &[o_proj], config.has_output_bias)?;
        // Gemma 2 and 3 call the norm after attention what others call the norm before the feed-forward block.
        let after_attention = norm(
            config,
            weights,
            &name("post_attention_layernorm.weight"),
            hidden,
        )?;
        let (attention_post_norm, feed_forward_norm, feed_forward_post_norm) =
            if config.has_post_norms {
                let before = norm(
                    config,
                    weights,
                    &name("pre_feedforward_layernorm.weight"),
                    hidden,
                )?;
                let after = norm(
                    config,
                    weights,
                    &name("post_feedforward_layernorm.weight"),
                    hidden,
                )?;
                (Some(after_attention), before, Some(after))
            } else {
                (None, after_attention, None)
            };
        let feed_forward = feed_forward(config, index, weights)?;
        Ok(Self {
            input_norm,
            qkv,
            attention,
            output,
            attention_post_norm,
            feed_forward_norm,
            feed_forward,
            feed_forward_post_norm,
        })
    }
}

fn post(norm: Option<&Norm>, x: Tensor) -> candle_core::Result<Tensor> {
    match norm {
        Some(norm) => norm.forward(&x),
        None => Ok(x),
    }
}

fn norm(
    config: &ModelConfig,
    weights: &mut dyn Weights,
    name: &str,
    width: usize,
) -> Result<Norm, LoadError> {
    let weight = weights.tensor(name, &[width])?;
    Norm::try_new(&weight, config.norm_weight_offset, config.rms_norm_eps)
        .map_err(|error| LoadError::candle(name, error))
}

fn linear(name: &str, parts: Vec<Matrix>, bias: Option<Tensor>) -> Result<Linear, LoadError> {
    Linear::try_new(parts, bias).map_err(|error| LoadError::candle(name, error))
}

/// Matrices of one input, each `(name, out_features, in_features)`, with their biases.
fn projections(
    weights: &mut dyn Weights,
    parts: &[(String, usize, usize)],
    has_bias: bool,
) -> Result<Linear, LoadError> {
    let mut matrices = Vec::with_capacity(parts.len());
    let mut biases = Vec::new();
    for (name, out_features, in_features) in parts {
        matrices.push(weights.matrix(&format!("{name}.weight"), *out_features, *in_features)?);
        if has_bias {
            biases.push(weights.tensor(&format!("{name}.bias"), &[*out_features])?);
        }
    }
    let name = parts.first().map_or("", |(name, ..)| name);
    let bias = match biases.as_slice() {
        [] => None,
        biases => Some(Tensor::cat(biases, 0).map_err(|error| LoadError::candle(name, error))?),
    };
    linear(name, matrices, bias)
}

fn qkv(config: &ModelConfig, index: usize, weights: &mut dyn Weights) -> Result<Linear, LoadError> {
    let name = |tail: &str| format!("model.layers.{index}.self_attn.{tail}");
    let hidden = config.hidden_size;
    let (q, kv) = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    );
    let parts = [
        (name("q_proj"), q, hidden),
        (name("k_proj"), kv, hidden),
        (name("v_proj"), kv, hidden),
    ];
    projections(weights, &parts, config.has_qkv_bias)
}

fn attention(
    config: &ModelConfig,
    index: usize,
    weights: &mut dyn Weights,
) -> Result<Attention, LoadError> {
    let name = |tail: &str| format!("model.layers.{index}.self_attn.{tail}");
    let (query_norm, key_norm) = if config.has_qk_norm {
        let query = norm(config, weights, &name("q_norm.weight"), config.head_dim)?;
        let key = norm(config, weights, &name("k_norm.weight"), config.head_dim)?;
        (Some(query), Some(key))
    } else {
        (None, None)
    };
    let window = config.window.filter(|window| {
        window
            .full_every
            .is_none_or(|every| !(index + 1).is_multiple_of(every))
    });
    Ok(Attention {
        num_heads: config.num_heads,
        num_kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        window: window.map(|window| window.size_tokens),
        softcap: config.attention_softcap,
        scale: config.attention_scale,
        query_norm,
        key_norm,
    })
}

fn feed_forward(
    config: &ModelConfig,
    index: usize,
    weights: &mut dyn Weights,
) -> Result<FeedForward, LoadError> {
    let name = |tail: &str| format!("model.layers.{index}.mlp.{tail}");
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let parts = [
        (name("gate_proj"), inner, hidden),
        (name("up_proj"), inner, hidden),
    ];
    let gate_up = projections(weights, &parts, config.has_mlp_bias)?;
    let down = projections(
        weights,
        &[(name("down_proj"), hidden, inner)],
        config.has_mlp_bias,
    )?;
    Ok(FeedForward {
        gate_up,
        down,
        activation: config.activation,
    })
}
