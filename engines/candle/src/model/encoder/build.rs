//! Builds an encoder from its weights.

use candle_core::Tensor;
use genset_kernels::{AttentionHeads, Direction, WeightMemory};

use super::config::{EncoderConfig, EncoderFamily, Positions};
use super::{Encoder, EncoderFeedForward, Layer, LayerNorm, Norms, PositionTable, TokenTypes};
use crate::error::LoadError;
use crate::model::attention::Attention;
use crate::model::linear::Linear;
use crate::model::rope::Frequencies;
use crate::model::weights::Weights;

type Result<T> = std::result::Result<T, LoadError>;

/// Requests each weight once.
pub(super) struct Builder<'a> {
    config: &'a EncoderConfig,
    weights: &'a mut dyn Weights,
    memory: WeightMemory,
}

impl<'a> Builder<'a> {
    pub(super) fn new(config: &'a EncoderConfig, weights: &'a mut dyn Weights) -> Self {
        Self {
            config,
            weights,
            memory: WeightMemory::default(),
        }
    }

    /// Builds the whole encoder.
    pub(super) fn encoder(mut self) -> Result<Encoder> {
        let config = self.config;
        let head_dim = config.head_dim();
        let frequencies = match &config.positions {
            Positions::Absolute { .. } => {
                [Frequencies::still(head_dim), Frequencies::still(head_dim)]
            }
            Positions::Rotary {
                theta,
                window_theta,
                ..
            } => [
                Frequencies::of_theta(*theta, head_dim),
                Frequencies::of_theta(*window_theta, head_dim),
            ],
        };
        let (words_name, norm_name) = match config.family {
            EncoderFamily::Bert => ("embeddings.word_embeddings.weight", "embeddings.LayerNorm"),
            EncoderFamily::ModernBert => ("embeddings.tok_embeddings.weight", "embeddings.norm"),
        };
        let words = (self.weights).matrix(words_name, config.vocab_size, config.hidden_size)?;
        let positions = self.positions()?;
        let token_types = self.token_types()?;
        let embedding_norm = self.norm(norm_name)?;
        let layers = (0..config.num_layers)
            .map(|index| match config.family {
                EncoderFamily::Bert => self.bert_layer(index),
                EncoderFamily::ModernBert => self.modern_layer(index),
            })
            .collect::<Result<_>>()?;
        let last_norm = match config.family {
            EncoderFamily::Bert => None,
            EncoderFamily::ModernBert => Some(self.norm("final_norm")?),
        };
        Ok(Encoder {
            words,
            positions,
            token_types,
            embedding_norm,
            layers,
            last_norm,
            frequencies,
            device: self.weights.device().clone(),
        })
    }

    fn positions(&mut self) -> Result<Option<PositionTable>> {
        let Positions::Absolute { table_len, first } = self.config.positions else {
            return Ok(None);
        };
        let shape = [table_len, self.config.hidden_size];
        let name = "embeddings.position_embeddings.weight";
        Ok(Some(PositionTable {
            rows: self.weights.tensor(name, &shape)?,
            first: u32::try_from(first).unwrap_or(u32::MAX),
        }))
    }

    fn token_types(&mut self) -> Result<Option<TokenTypes>> {
        if self.config.num_token_types == 0 {
            return Ok(None);
        }
        let shape = [self.config.num_token_types, self.config.hidden_size];
        let name = "embeddings.token_type_embeddings.weight";
        let rows = self.weights.tensor(name, &shape)?;
        let candle = |error| LoadError::candle(name, error);
        let both = if self.config.num_token_types > 1 {
            Some(rows.narrow(0, 0, 2).map_err(candle)?)
        } else {
            None
        };
        let first = rows.get(0).map_err(candle)?;
        Ok(Some(TokenTypes { first, both }))
    }

    fn bert_layer(&mut self, index: usize) -> Result<Layer> {
        let config = self.config;
        let name = |tail: &str| format!("encoder.layer.{index}.{tail}");
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let of_self = |part: &str| (name(&format!("attention.self.{part}")), hidden, hidden);
        let qkv = [of_self("query"), of_self("key"), of_self("value")];
        let qkv = self.linear(&qkv, config.has_attention_bias)?;
        let output = (name("attention.output.dense"), hidden, hidden);
        let output = self.linear(&[output], config.has_attention_bias)?;
        let attention_norm = self.norm(&name("attention.output.LayerNorm"))?;
        let up = (name("intermediate.dense"), inner, hidden);
        let up = self.linear(&[up], config.has_mlp_bias)?;
        let down = (name("output.dense"), hidden, inner);
        let down = self.linear(&[down], config.has_mlp_bias)?;
        let feed_forward_norm = self.norm(&name("output.LayerNorm"))?;
        Ok(Layer {
            norms: Norms::After {
                attention: attention_norm,
                feed_forward: feed_forward_norm,
            },
            qkv,
            attention: self.attention(index),
            output,
            feed_forward: self.feed_forward(up, down, false),
        })
    }

    fn modern_layer(&mut self, index: usize) -> Result<Layer> {
        let config = self.config;
        let name = |tail: &str| format!("layers.{index}.{tail}");
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let attention_norm = if index == 0 {
            None
        } else {
            Some(self.norm(&name("attn_norm"))?)
        };
        let qkv = (name("attn.Wqkv"), 3 * hidden, hidden);
        let qkv = self.linear(&[qkv], config.has_attention_bias)?;
        let output = (name("attn.Wo"), hidden, hidden);
        let output = self.linear(&[output], config.has_attention_bias)?;
        let feed_forward_norm = self.norm(&name("mlp_norm"))?;
        let up = (name("mlp.Wi"), 2 * inner, hidden);
        let up = self.linear(&[up], config.has_mlp_bias)?;
        let down = (name("mlp.Wo"), hidden, inner);
        let down = self.linear(&[down], config.has_mlp_bias)?;
        Ok(Layer {
            norms: Norms::Before {
                attention: attention_norm,
                feed_forward: feed_forward_norm,
            },
            qkv,
            attention: self.attention(index),
            output,
            feed_forward: self.feed_forward(up, down, true),
        })
    }

    fn feed_forward(&self, up: Linear, down: Linear, is_gated: bool) -> EncoderFeedForward {
        EncoderFeedForward {
            up,
            down,
            activation: self.config.activation,
            is_gated,
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a head's width")]
    fn attention(&self, index: usize) -> Attention {
        let config = self.config;
        let window = match &config.positions {
            Positions::Rotary {
                is_windowed,
                window_tokens,
                ..
            } if is_windowed.get(index) == Some(&true) => Some(*window_tokens),
            Positions::Rotary { .. } | Positions::Absolute { .. } => None,
        };
        Attention {
            heads: AttentionHeads {
                num_heads: config.num_heads,
                num_kv_heads: config.num_heads,
                head_dim: config.head_dim(),
                direction: Direction::Both,
                window,
                softcap: None,
                scale: (config.head_dim() as f32).sqrt().recip(),
            },
            query_norm: None,
            key_norm: None,
            norms_are_last: false,
            rotation: usize::from(window.is_some()),
            sinks: None,
        }
    }

    /// Matrices that share an input, each `(name, out_features, in_features)`, with their biases.
    fn linear(&mut self, parts: &[(String, usize, usize)], has_bias: bool) -> Result<Linear> {
        let mut matrices = Vec::with_capacity(parts.len());
        let mut biases = Vec::new();
        for (name, out_features, in_features) in parts {
            let weight = format!("{name}.weight");
            matrices.push(self.weights.matrix(&weight, *out_features, *in_features)?);
            if has_bias {
                let bias = format!("{name}.bias");
                biases.push(self.weights.tensor(&bias, &[*out_features])?);
            }
        }
        let name = parts.first().map_or("", |(name, ..)| name);
        let candle = |error| LoadError::candle(name, error);
        let bias = match biases.as_slice() {
            [] => None,
            biases => Some(Tensor::cat(biases, 0).map_err(candle)?),
        };
        Linear::try_new(matrices, bias, &mut self.memory).map_err(candle)
    }

    fn norm(&mut self, name: &str) -> Result<LayerNorm> {
        let shape = [self.config.hidden_size];
        let weight = self.weights.tensor(&format!("{name}.weight"), &shape)?;
        let bias = if self.config.has_norm_bias {
            Some(self.weights.tensor(&format!("{name}.bias"), &shape)?)
        } else {
            None
        };
        LayerNorm::try_new(&weight, bias, self.config.norm_eps)
            .map_err(|error| LoadError::candle(name, error))
    }
}
