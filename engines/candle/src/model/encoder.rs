//! Encoders: every token attends to its whole sequence, and gets a vector.
//!
//! BERT, RoBERTa, XLM-RoBERTa and ModernBERT; [`EncoderConfig`] selects the variant. Sequences are packed without padding.
//! Attention, products and rotation are the decoder's. `embedder` combines a sequence's vectors into one.
//!
//! # Source
//! BERT (Devlin et al. 2018), RoBERTa (Liu et al. 2019), ModernBERT (Warner et al. 2024), as `transformers` computes them.

mod build;
pub(crate) mod config;
pub(super) mod feed_forward;
pub(super) mod layer_norm;

use candle_core::{DType, Device, Result, Tensor};

use self::build::Builder;
use self::config::EncoderConfig;
use self::feed_forward::EncoderFeedForward;
use self::layer_norm::LayerNorm;
use super::attention::{Attention, Step};
use super::batch::StepBatch;
use super::kv_cache::KvCache;
use super::linear::{Linear, Matrix};
use super::rope::Frequencies;
use super::weights::Weights;
use crate::error::LoadError;

/// An encoder with its weights.
#[derive(Debug)]
pub(super) struct Encoder {
    words: Matrix,
    positions: Option<PositionTable>,
    token_types: Option<TokenTypes>,
    embedding_norm: LayerNorm,
    layers: Vec<Layer>,
    last_norm: Option<LayerNorm>,
    /// The frequencies of layers with full attention, then of those with a window.
    frequencies: [Frequencies; 2],
    device: Device,
}

/// Embeddings of positions.
#[derive(Debug)]
struct PositionTable {
    /// `[positions, hidden_size]`.
    rows: Tensor,
    /// The first position's row.
    first: u32,
}

/// Embeddings of token kinds.
#[derive(Debug)]
struct TokenTypes {
    /// The row of the first kind, `[hidden_size]`.
    first: Tensor,
    /// Both kinds' rows, `[2, hidden_size]`; `None` if the model knows one kind.
    both: Option<Tensor>,
}

impl TokenTypes {
    /// Adds the embedding of each row's kind. `kinds` has a row's kind, 0 or 1; if it is empty, all are of the first kind.
    fn add_to(&self, x: &Tensor, kinds: &[u32]) -> Result<Tensor> {
        match &self.both {
            Some(both) if kinds.contains(&1) => {
                let kinds = Tensor::from_slice(kinds, kinds.len(), x.device())?;
                x + both.index_select(&kinds, 0)?
            }
            Some(_) | None => x.broadcast_add(&self.first),
        }
    }
}

impl Encoder {
    /// Builds the encoder that `config` describes. Requests each weight once.
    pub(super) fn try_new(
        config: &EncoderConfig,
        weights: &mut dyn Weights,
    ) -> std::result::Result<Self, LoadError> {
        Builder::new(config, weights).encoder()
    }

    /// Computes a vector for each row of `batch`, whose sequences are whole; `[rows, hidden_size]`. `kinds` has each row's token
    /// kind, 0 or 1; if it is empty, all are 0.
    pub(super) fn forward(
        &self,
        kv: &mut KvCache,
        batch: &StepBatch,
        kinds: &[u32],
    ) -> Result<Tensor> {
        let mut x = self.embedding_norm.forward(&self.embed(batch, kinds)?)?;
        let Some(first) = self.layers.first() else {
            return Ok(x);
        };
        let step = Step::try_new(batch, &first.attention, &self.frequencies, kv)?;
        for layer in &self.layers {
            x = layer.forward(&x, &step, kv, batch)?;
        }
        match &self.last_norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        }
    }

    /// The type of rows.
    pub(super) fn dtype(&self) -> DType {
        self.embedding_norm.dtype()
    }

    fn embed(&self, batch: &StepBatch, kinds: &[u32]) -> Result<Tensor> {
        let device = &self.device;
        let mut x = self.words.rows(&batch.tokens, device, self.dtype())?;
        if let Some(table) = &self.positions {
            let places: Vec<u32> = (batch.positions.iter())
                .map(|position| position + table.first)
                .collect();
            let places = Tensor::from_slice(&places, places.len(), device)?;
            x = (x + table.rows.index_select(&places, 0)?)?;
        }
        if let Some(types) = &self.token_types {
            x = types.add_to(&x, kinds)?;
        }
        Ok(x)
    }
}

/// One layer.
#[derive(Debug)]
struct Layer {
    norms: Norms,
    qkv: Linear,
    attention: Attention,
    output: Linear,
    feed_forward: EncoderFeedForward,
}

/// The place of a layer's norms.
#[derive(Debug)]
enum Norms {
    /// After each block, on the sum with its input.
    After {
        attention: LayerNorm,
        feed_forward: LayerNorm,
    },
    /// Before each block, on its input. The first layer's attention has none: the embeddings are normalized already.
    Before {
        attention: Option<LayerNorm>,
        feed_forward: LayerNorm,
    },
}

impl Layer {
    fn forward(
        &self,
        x: &Tensor,
        step: &Step,
        kv: &mut KvCache,
        batch: &StepBatch,
    ) -> Result<Tensor> {
        match &self.norms {
            Norms::After {
                attention,
                feed_forward,
            } => {
                let x = attention.add_forward(x, &self.attend(x, step, kv, batch)?)?;
                feed_forward.add_forward(&x, &self.feed_forward.forward(&x)?)
            }
            Norms::Before {
                attention,
                feed_forward,
            } => {
                let normed = match attention {
                    Some(norm) => norm.forward(x)?,
                    None => x.clone(),
                };
                let x = (x + self.attend(&normed, step, kv, batch)?)?;
                let fed = self.feed_forward.forward(&feed_forward.forward(&x)?)?;
                x + fed
            }
        }
    }

    /// All layers share the room for keys and values in turn.
    fn attend(
        &self,
        x: &Tensor,
        step: &Step,
        kv: &mut KvCache,
        batch: &StepBatch,
    ) -> Result<Tensor> {
        let qkv = self.qkv.forward(x)?;
        let attended = self.attention.forward(&qkv, step, kv.layer(0), batch)?;
        self.output.forward(&attended)
    }
}
