//! Builds a decoder from its weights.

use candle_core::Tensor;
use genset_kernels::{AttentionHeads, Direction, WeightMemory};

use super::{Block, Layer, Model, SlowMatrix};
use crate::error::LoadError;
use crate::model::attention::{Attention, Sinks};
use crate::model::config::{BlockNorms, Experts, ModelConfig, NormKind, QueryKeyNorm};
use crate::model::encoder::layer_norm::LayerNorm;
use crate::model::experts::{ExpertMixture, SharedExpert};
use crate::model::feed_forward::FeedForward;
use crate::model::linear::{Linear, Matrix};
use crate::model::norm::{Norm, StreamNorm, WholeNorms};
use crate::model::rope::Frequencies;
use crate::model::weights::Weights;

type Result<T> = std::result::Result<T, LoadError>;

/// Requests each weight once, in the order of use.
pub(super) struct Builder<'a> {
    config: &'a ModelConfig,
    weights: &'a mut dyn Weights,
    memory: WeightMemory,
    slow: Vec<SlowMatrix>,
    /// The number of weights of all products.
    all_weights: f64,
    /// The share of a matrix's products that a row takes part in: less than 1 for experts.
    use_of_weights: f64,
    /// The frequencies of the layers so far.
    frequencies: Vec<Frequencies>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(config: &'a ModelConfig, weights: &'a mut dyn Weights) -> Self {
        Self {
            config,
            weights,
            memory: WeightMemory::default(),
            slow: Vec::new(),
            all_weights: 0.0,
            use_of_weights: 1.0,
            frequencies: Vec::new(),
        }
    }

    /// Builds the whole decoder.
    pub(super) fn model(mut self) -> Result<Model> {
        let config = self.config;
        let (vocab_size, hidden) = (config.vocab_size, config.hidden_size);
        let (embedding_name, output_name) = ("model.embed_tokens.weight", "lm_head.weight");
        let embedding = self.weights.matrix(embedding_name, vocab_size, hidden)?;
        let layers = (0..config.num_layers)
            .map(|index| self.layer(index))
            .collect::<Result<_>>()?;
        let norm = self.stream_norm("model.norm.weight")?;
        let (embedding, output) = if config.is_tied {
            self.look_at(embedding_name, &embedding);
            let packed = embedding
                .into_packed(&mut self.memory)
                .map_err(|error| LoadError::candle(embedding_name, error))?;
            (packed.clone(), packed)
        } else {
            let output = self.weights.matrix(output_name, vocab_size, hidden)?;
            self.look_at(output_name, &output);
            (embedding, output)
        };
        let output = self.linear(output_name, vec![output], None)?;
        for matrix in &mut self.slow {
            matrix.share /= self.all_weights;
        }
        Ok(Model {
            embedding,
            embedding_scale: config.embedding_scale,
            layers,
            norm,
            output,
            logit_scale: config.logit_scale,
            logit_softcap: config.logit_softcap,
            query_growth: config.query_growth,
            frequencies: self.frequencies,
            vocab_size,
            device: self.weights.device().clone(),
            slow: self.slow,
        })
    }

    /// Records a matrix if its products are slow.
    fn look_at(&mut self, name: &str, matrix: &Matrix) {
        #[expect(clippy::cast_precision_loss, reason = "a share for people")]
        let weights = (matrix.out_features() * matrix.in_features()) as f64 * self.use_of_weights;
        self.all_weights += weights;
        if let Some(dtype) = matrix.slow_type() {
            self.slow.push(SlowMatrix {
                name: name.to_owned(),
                dtype,
                share: weights,
            });
        }
    }

    fn layer(&mut self, index: usize) -> Result<Layer> {
        let config = self.config;
        let name = |tail: &str| format!("model.layers.{index}.{tail}");
        let hidden = config.hidden_size;
        let input_norm = if config.block_norms.has_inputs() {
            Some(self.stream_norm(&name("input_layernorm.weight"))?)
        } else {
            None
        };
        let qkv = self.qkv(index)?;
        let query_key_norms = if config.query_key_norm == QueryKeyNorm::Whole {
            let norms = self.query_key_norms(index)?;
            norms.map(|(queries, keys)| WholeNorms { queries, keys })
        } else {
            None
        };
        let attention = self.attention(index)?;
        let q_width = config.num_heads * config.head_dim;
        let o_proj = (name("self_attn.o_proj"), hidden, q_width);
        let output = self.projections(&[o_proj], config.has_output_bias)?;
        // If outputs are normalized, the first is the norm after attention; else the norm before the feed-forward block.
        let after_attention = name("post_attention_layernorm.weight");
        let before = name("pre_feedforward_layernorm.weight");
        let after = name("post_feedforward_layernorm.weight");
        let mut norm = |name: &str| self.stream_norm(name).map(Some);
        let (attention_post_norm, feed_forward_norm, feed_forward_post_norm) =
            match config.block_norms {
                BlockNorms::Inputs => (None, norm(&after_attention)?, None),
                BlockNorms::Outputs => (norm(&after_attention)?, None, norm(&after)?),
                BlockNorms::Both => (norm(&after_attention)?, norm(&before)?, norm(&after)?),
                BlockNorms::Shared => (None, None, None),
            };
        let feed_forward = self.block(index)?;
        Ok(Layer {
            input_norm,
            qkv,
            query_key_norms,
            attention,
            output,
            attention_post_norm,
            feed_forward_norm,
            feed_forward,
            feed_forward_post_norm,
            residual_scale: config.residual_scale,
            is_parallel: config.block_norms == BlockNorms::Shared,
        })
    }

    fn qkv(&mut self, index: usize) -> Result<Linear> {
        let config = self.config;
        let name = |tail: &str| format!("model.layers.{index}.self_attn.{tail}");
        let hidden = config.hidden_size;
        let q = config.num_heads * config.head_dim;
        let kv = config.num_kv_heads * config.head_dim;
        let parts = [
            (name("q_proj"), q, hidden),
            (name("k_proj"), kv, hidden),
            (name("v_proj"), kv, hidden),
        ];
        self.projections(&parts, config.has_qkv_bias)
    }

    fn attention(&mut self, index: usize) -> Result<Attention> {
        let config = self.config;
        let name = |tail: &str| format!("model.layers.{index}.self_attn.{tail}");
        let norms_are_last = config.query_key_norm == QueryKeyNorm::RotatedHeads;
        let (query_norm, key_norm) = if config.query_key_norm == QueryKeyNorm::Whole {
            (None, None)
        } else {
            self.query_key_norms(index)?.unzip()
        };
        let window = config.window.filter(|window| {
            window
                .full_every
                .is_none_or(|every| !(index + 1).is_multiple_of(every))
        });
        Ok(Attention {
            heads: AttentionHeads {
                num_heads: config.num_heads,
                num_kv_heads: config.num_kv_heads,
                head_dim: config.head_dim,
                direction: Direction::Causal,
                window: window.map(|window| window.size_tokens),
                softcap: config.attention_softcap,
                scale: config.attention_scale,
            },
            query_norm,
            key_norm,
            norms_are_last,
            rotation: self.rotation(index, window.is_some()),
            sinks: self.sinks(name("sinks"))?,
        })
    }

    /// The norms of queries and keys, if there are any.
    fn query_key_norms(&mut self, index: usize) -> Result<Option<(Norm, Norm)>> {
        let config = self.config;
        if config.query_key_norm == QueryKeyNorm::None {
            return Ok(None);
        }
        let name = |tail: &str| format!("model.layers.{index}.self_attn.{tail}.weight");
        let query = self.norm(&name("q_norm"), config.query_norm_width())?;
        let key = self.norm(&name("k_norm"), config.key_norm_width())?;
        Ok(Some((query, key)))
    }

    fn sinks(&mut self, name: String) -> Result<Option<Sinks>> {
        if !self.config.has_sinks {
            return Ok(None);
        }
        let scores = self.weights.tensor(&name, &[self.config.num_heads])?;
        let sinks = Sinks::try_new(&scores);
        Ok(Some(
            sinks.map_err(|error| LoadError::candle(&name, error))?,
        ))
    }

    /// The index of a layer's frequencies; adds new ones.
    fn rotation(&mut self, index: usize, has_window: bool) -> usize {
        let (rope, head_dim) = (&self.config.rope, self.config.head_dim);
        let is_still = rope
            .still_every
            .is_some_and(|every| (index + 1).is_multiple_of(every));
        let wanted = if is_still {
            Frequencies::still(head_dim)
        } else if has_window {
            Frequencies::windowed(rope, head_dim)
        } else {
            Frequencies::full(rope, head_dim)
        };
        let known = self.frequencies.iter().position(|known| *known == wanted);
        known.unwrap_or_else(|| {
            self.frequencies.push(wanted);
            self.frequencies.len() - 1
        })
    }

    fn block(&mut self, index: usize) -> Result<Block> {
        let prefix = format!("model.layers.{index}.mlp");
        match self.config.experts {
            None => {
                let inner = self.config.intermediate_size;
                Ok(Block::Dense(self.feed_forward(&prefix, inner)?))
            }
            Some(experts) => Ok(Block::Experts(self.mixture(&prefix, experts)?)),
        }
    }

    fn mixture(&mut self, prefix: &str, config: Experts) -> Result<ExpertMixture> {
        let name = format!("{prefix}.gate.weight");
        let (hidden, inner) = (self.config.hidden_size, self.config.intermediate_size);
        // Not recorded as slow: it is small, and in f32 on purpose.
        let router = self.weights.matrix(&name, config.count, hidden)?;
        let bias = if config.has_router_bias {
            let name = format!("{prefix}.gate.bias");
            Some(self.weights.tensor(&name, &[config.count])?)
        } else {
            None
        };
        let router = self.linear(&name, vec![router], bias)?;
        #[expect(clippy::cast_precision_loss, reason = "a share for people")]
        let used = config.per_token as f64 / config.count as f64;
        self.use_of_weights = used;
        let experts = (0..config.count)
            .map(|expert| self.feed_forward(&format!("{prefix}.experts.{expert}"), inner))
            .collect::<Result<_>>();
        self.use_of_weights = 1.0;
        let shared = match config.shared_size {
            Some(inner) => Some(self.shared_expert(&format!("{prefix}.shared_expert"), inner)?),
            None => None,
        };
        Ok(ExpertMixture {
            router,
            experts: experts?,
            config,
            shared,
        })
    }

    fn shared_expert(&mut self, prefix: &str, inner: usize) -> Result<SharedExpert> {
        let name = format!("{prefix}_gate.weight");
        let gate = self.weights.matrix(&name, 1, self.config.hidden_size)?;
        Ok(SharedExpert {
            gate: self.linear(&name, vec![gate], None)?,
            expert: self.feed_forward(prefix, inner)?,
        })
    }

    fn feed_forward(&mut self, prefix: &str, inner: usize) -> Result<FeedForward> {
        let config = self.config;
        let name = |tail: &str| format!("{prefix}.{tail}");
        let hidden = config.hidden_size;
        let mut gate_up = vec![(name("up_proj"), inner, hidden)];
        if config.is_gated {
            gate_up.insert(0, (name("gate_proj"), inner, hidden));
        }
        let down = [(name("down_proj"), hidden, inner)];
        Ok(FeedForward {
            gate_up: self.projections(&gate_up, config.has_mlp_bias)?,
            down: self.projections(&down, config.has_mlp_bias)?,
            activation: config.activation,
            is_gated: config.is_gated,
        })
    }

    /// Matrices that share an input, each `(name, out_features, in_features)`, with their biases.
    fn projections(&mut self, parts: &[(String, usize, usize)], has_bias: bool) -> Result<Linear> {
        let mut matrices = Vec::with_capacity(parts.len());
        let mut biases = Vec::new();
        for (name, out_features, in_features) in parts {
            let weight = format!("{name}.weight");
            let matrix = self.weights.matrix(&weight, *out_features, *in_features)?;
            self.look_at(&weight, &matrix);
            matrices.push(matrix);
            if has_bias {
                let bias = format!("{name}.bias");
                biases.push(self.weights.tensor(&bias, &[*out_features])?);
            }
        }
        let name = parts.first().map_or("", |(name, ..)| name);
        let bias = match biases.as_slice() {
            [] => None,
            biases => Some(Tensor::cat(biases, 0).map_err(|error| LoadError::candle(name, error))?),
        };
        self.linear(name, matrices, bias)
    }

    fn linear(&mut self, name: &str, parts: Vec<Matrix>, bias: Option<Tensor>) -> Result<Linear> {
        Linear::try_new(parts, bias, &mut self.memory)
            .map_err(|error| LoadError::candle(name, error))
    }

    /// A norm of the residual stream.
    fn stream_norm(&mut self, name: &str) -> Result<StreamNorm> {
        let config = self.config;
        match config.norm_kind {
            NormKind::RootMeanSquare => {
                let norm = self.norm(name, config.hidden_size)?;
                Ok(StreamNorm::RootMeanSquare(norm))
            }
            NormKind::Layer { has_bias } => {
                let shape = [config.hidden_size];
                let weight = self.weights.tensor(name, &shape)?;
                let bias = if has_bias {
                    let name = name.replace(".weight", ".bias");
                    Some(self.weights.tensor(&name, &shape)?)
                } else {
                    None
                };
                LayerNorm::try_new(&weight, bias, config.norm_eps)
                    .map(StreamNorm::Layer)
                    .map_err(|error| LoadError::candle(name, error))
            }
        }
    }

    fn norm(&mut self, name: &str, width: usize) -> Result<Norm> {
        let weight = self.weights.tensor(name, &[width])?;
        let config = self.config;
        Norm::try_new(&weight, config.norm_weight_offset, config.norm_eps)
            .map_err(|error| LoadError::candle(name, error))
    }
}
