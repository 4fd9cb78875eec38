//! [`Embedder`]: computes one vector per token sequence, by an encoder or a decoder and a head. A cross-encoder's has one number.
//!
//! It knows no requests or files: the engine calls [`Embedder::forward`] with the sequences of one step.

pub(crate) mod head;
pub(crate) mod pooling;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Tensor};

use self::head::{Head, HeadConfig, HeadTensors};
use super::batch::{BatchLimits, StepBatch};
use super::config::ModelConfig;
use super::decoder::{ForwardError, Model};
use super::encoder::Encoder;
use super::encoder::config::EncoderConfig;
use super::host;
use super::kv_cache::{KvCache, KvCacheSpec, KvShape};
use super::weights::Weights;
use crate::error::LoadError;

/// Tokens per KV block. Keys and values live for one step, so the size is not configurable.
const BLOCK_SIZE: usize = 16;

/// The model that computes a sequence's vectors.
#[derive(Debug, Clone, PartialEq)]
pub enum BackboneConfig {
    /// An encoder.
    Encoder(EncoderConfig),
    /// A decoder without its output matrix.
    Decoder(Box<ModelConfig>),
}

impl BackboneConfig {
    /// Width of a vector.
    #[must_use]
    pub fn hidden_size(&self) -> usize {
        match self {
            Self::Encoder(config) => config.hidden_size,
            Self::Decoder(config) => config.hidden_size,
        }
    }

    /// Numbers that a step holds at once per token: a layer's activations, and one layer's keys and values.
    pub(crate) fn step_numbers_per_token(&self) -> usize {
        match self {
            Self::Encoder(config) => {
                let (hidden, inner) = (config.hidden_size, config.intermediate_size);
                10 * hidden + 3 * inner
            }
            Self::Decoder(config) => config.step_numbers_per_token(),
        }
    }

    /// The size of the vocabulary.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Encoder(config) => config.vocab_size,
            Self::Decoder(config) => config.vocab_size,
        }
    }
}

/// A token sequence that is computed as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WholeSequence {
    pub(crate) tokens: Vec<u32>,
    /// The number of tokens of the first kind; the rest are of the second.
    pub(crate) first_tokens: usize,
}

impl WholeSequence {
    /// A single text: all tokens are of the first kind.
    pub(crate) fn of_one_text(tokens: Vec<u32>) -> Self {
        let first_tokens = tokens.len();
        Self {
            tokens,
            first_tokens,
        }
    }

    /// Each token's kind.
    fn kinds(&self) -> impl Iterator<Item = u32> {
        let first_tokens = self.first_tokens;
        (0..self.tokens.len()).map(move |place| u32::from(place >= first_tokens))
    }
}

/// A model that computes one vector per token sequence.
#[derive(Debug)]
pub(crate) struct Embedder {
    backbone: Backbone,
    head: Head,
    kv: KvCache,
    vocab_size: usize,
}

#[derive(Debug)]
enum Backbone {
    Encoder(Encoder),
    Decoder(Model),
}

/// The limits of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StepRoom {
    /// Tokens of all sequences.
    pub(crate) tokens: usize,
    pub(crate) sequences: usize,
}

impl StepRoom {
    /// A sufficient number of KV blocks: each sequence may leave most of its last one empty.
    fn blocks(self) -> usize {
        self.tokens / BLOCK_SIZE + self.sequences + 1
    }
}

impl Embedder {
    /// Builds the embedder that the configurations describe.
    pub(crate) fn try_new(
        config: &BackboneConfig,
        head: &HeadConfig,
        weights: &mut dyn Weights,
        head_tensor: &HeadTensors<'_>,
        room: StepRoom,
    ) -> Result<Self, LoadError> {
        let device = weights.device().clone();
        let backbone = match config {
            BackboneConfig::Encoder(config) => {
                Backbone::Encoder(Encoder::try_new(config, weights)?)
            }
            BackboneConfig::Decoder(config) => Backbone::Decoder(Model::try_new(config, weights)?),
        };
        let head = Head::try_new(head, head_tensor)?;
        let kv = kv_for(config, &backbone, room, &device)
            .map_err(|error| LoadError::candle("keys and values of a step", error))?;
        Ok(Self {
            backbone,
            head,
            kv,
            vocab_size: config.vocab_size(),
        })
    }

    /// Computes a vector for each input, in order.
    ///
    /// # Errors
    /// The inputs do not fit the model or the room, or a tensor operation failed.
    pub(crate) fn forward(
        &mut self,
        inputs: &[&WholeSequence],
    ) -> Result<Vec<Vec<f32>>, ForwardError> {
        let tokens = inputs.iter().map(|input| input.tokens.as_slice());
        let batch = StepBatch::of_whole(tokens, BLOCK_SIZE);
        batch.check(BatchLimits {
            vocab_size: self.vocab_size,
            num_blocks: self.kv.spec().num_blocks,
            block_size: BLOCK_SIZE,
        })?;
        let hidden = match &self.backbone {
            Backbone::Encoder(encoder) => {
                let kinds: Vec<u32> = inputs.iter().flat_map(|input| input.kinds()).collect();
                encoder.forward(&mut self.kv, &batch, &kinds)?
            }
            Backbone::Decoder(model) => model.normed_states(&mut self.kv, &batch)?,
        };
        Ok(self.pooled(&hidden, &batch)?)
    }

    fn pooled(&self, hidden: &Tensor, batch: &StepBatch) -> candle_core::Result<Vec<Vec<f32>>> {
        let (_, width) = hidden.dims2()?;
        let hidden = hidden
            .to_device(&Device::Cpu)?
            .to_dtype(DType::F32)?
            .contiguous()?;
        host::read(&hidden, |numbers| {
            let vector = |rows: std::ops::Range<usize>| {
                let rows = &numbers[rows.start * width..rows.end * width];
                self.head.forward(rows, width)
            };
            let sequences = batch.sequences.iter();
            sequences
                .map(|sequence| vector(sequence.rows.clone()))
                .collect()
        })?
    }
}

/// Room for one layer's keys and values of a step. Layers use it in turn, because no later step reads them.
fn kv_for(
    config: &BackboneConfig,
    backbone: &Backbone,
    room: StepRoom,
    device: &Device,
) -> candle_core::Result<KvCache> {
    let spec = KvCacheSpec {
        num_blocks: room.blocks(),
        block_size: BLOCK_SIZE,
        dtype: match backbone {
            _ if device.is_cpu() => DType::F32,
            Backbone::Encoder(encoder) => encoder.dtype(),
            Backbone::Decoder(model) => model.dtype(),
        },
    };
    match config {
        BackboneConfig::Encoder(encoder) => {
            let one_layer = KvShape {
                num_layers: 1,
                num_heads: encoder.num_heads,
                head_dim: encoder.head_dim(),
            };
            KvCache::of_shape(one_layer, spec, device, false)
        }
        BackboneConfig::Decoder(model) => {
            let one_layer = ModelConfig {
                num_layers: 1,
                ..(**model).clone()
            };
            KvCache::try_new(&one_layer, spec, device)
        }
    }
}
