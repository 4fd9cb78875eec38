//! The decoder: embedding, layers, last norm, output matrix.

mod build;
mod timing;

use candle_core::{DType, Device, Tensor};

use self::build::Builder;
pub use self::timing::ProductTime;
#[cfg(feature = "cuda")]
use super::attention::plan::{Places, Plan};
use super::attention::{Attention, Step};
use super::batch::{BatchError, BatchLimits, StepBatch};
use super::config::{ModelConfig, QueryGrowth};
use super::experts::ExpertMixture;
use super::feed_forward::FeedForward;
use super::kv_cache::{KvCache, LayerKv};
use super::linear::{Linear, Matrix, WeightType};
use super::lora::{Beside, Site};
use super::norm::{StreamNorm, WholeNorms};
use super::rope::Frequencies;
use super::weights::Weights;
use crate::error::LoadError;

/// A decoder-only language model with its weights.
#[derive(Debug)]
pub struct Model {
    embedding: Matrix,
    embedding_scale: f32,
    layers: Vec<Layer>,
    norm: StreamNorm,
    /// The output matrix.
    output: Linear,
    logit_scale: f32,
    logit_softcap: Option<f32>,
    query_growth: Option<QueryGrowth>,
    /// The frequencies of all kinds of layers.
    frequencies: Vec<Frequencies>,
    vocab_size: usize,
    device: Device,
    slow: Vec<SlowMatrix>,
}

/// A matrix on the CPU whose products would be faster in another form.
#[derive(Debug, Clone, PartialEq)]
pub struct SlowMatrix {
    /// The name in `transformers`.
    pub name: String,
    /// The type of its numbers.
    pub dtype: WeightType,
    /// Its share of a step's multiplications, 0 to 1.
    pub share: f64,
}

/// Why a step failed.
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
    /// Builds the model that `config` describes. Requests each weight once, in the order of use.
    ///
    /// # Errors
    /// A weight is missing, has another shape or cannot be read.
    pub fn try_new(config: &ModelConfig, weights: &mut dyn Weights) -> Result<Self, LoadError> {
        Builder::new(config, weights).model()
    }

    /// The slow matrices: those in f32, and quantized ones without kernels for this processor.
    #[must_use]
    pub fn slow_matrices(&self) -> &[SlowMatrix] {
        &self.slow
    }

    /// Computes one step: stores the keys and values of all rows, and returns the logits of `batch.logit_rows`,
    /// `[logit_rows, vocab_size]` in f32.
    ///
    /// # Errors
    /// The batch does not fit, or a tensor operation failed; the slots of the batch's rows may have been written.
    pub fn forward(&self, kv: &mut KvCache, batch: &StepBatch) -> Result<Tensor, ForwardError> {
        self.check(kv, batch)?;
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

    /// Checks that the batch fits the model and the KV cache.
    pub(super) fn check(&self, kv: &KvCache, batch: &StepBatch) -> Result<(), ForwardError> {
        if kv.num_layers() != self.layers.len() {
            return Err(ForwardError::KvCache {
                cache: kv.num_layers(),
                model: self.layers.len(),
            });
        }
        let spec = kv.spec();
        batch.check(BatchLimits {
            vocab_size: self.vocab_size,
            num_blocks: spec.num_blocks,
            block_size: spec.block_size,
        })?;
        Ok(())
    }

    /// The output of the last norm for every row, `[rows, hidden_size]`, for embeddings. The rows must be whole sequences. They
    /// read only keys and values of this step, so the layers can share the `kv` of one layer in turn.
    pub(super) fn normed_states(
        &self,
        kv: &mut KvCache,
        batch: &StepBatch,
    ) -> candle_core::Result<Tensor> {
        self.norm.forward(&self.hidden_states(kv, batch)?)
    }

    /// The type of rows.
    pub(super) fn dtype(&self) -> DType {
        self.norm.dtype()
    }

    /// The output of the last layer, before the last norm; `[rows, hidden_size]`.
    fn hidden_states(&self, kv: &mut KvCache, batch: &StepBatch) -> candle_core::Result<Tensor> {
        let x = self.embed(&batch.tokens)?;
        let Some(first) = self.layers.first() else {
            return Ok(x);
        };
        let step = Step::try_new(batch, &first.attention, &self.frequencies, kv)?;
        self.through_layers(x, &step, kv, batch)
    }

    fn through_layers(
        &self,
        x: Tensor,
        step: &Step,
        kv: &mut KvCache,
        batch: &StepBatch,
    ) -> candle_core::Result<Tensor> {
        let mut stream = Stream { x, delta: None };
        let kv_layers = kv.num_layers().max(1);
        let query_factors = self.query_factors(batch)?;
        let query_factors = query_factors.as_ref();
        for (index, layer) in self.layers.iter().enumerate() {
            let beside = Beside::layer(batch, index);
            let kv = kv.layer(index % kv_layers);
            layer.forward(&mut stream, step, kv, batch, beside, query_factors)?;
        }
        stream.into_sum()
    }

    /// The factor of each row's queries, `[rows, 1]`; `None` if all are 1.
    fn query_factors(&self, batch: &StepBatch) -> candle_core::Result<Option<Tensor>> {
        let Some(growth) = self.query_growth else {
            return Ok(None);
        };
        let positions = batch.positions.iter();
        let factors: Vec<f32> = positions.map(|at| growth.factor(*at)).collect();
        if factors.iter().all(|factor| *factor == 1.0) {
            return Ok(None);
        }
        let shape = (factors.len(), 1);
        let factors = Tensor::from_vec(factors, shape, &self.device)?;
        factors.to_dtype(self.dtype()).map(Some)
    }

    fn embed(&self, tokens: &[u32]) -> candle_core::Result<Tensor> {
        let x = self.embedding.rows(tokens, &self.device, self.dtype())?;
        scaled(x, self.embedding_scale)
    }

    fn logits(&self, hidden: &Tensor, batch: &StepBatch) -> candle_core::Result<Tensor> {
        // A GPU cannot run kernels on empty tensors.
        if batch.logit_rows.is_empty() {
            return Tensor::zeros((0, self.vocab_size), DType::F32, &self.device);
        }
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
        let logits = self
            .output
            .forward(&self.norm.forward(&hidden)?)?
            .to_dtype(DType::F32)?;
        let logits = scaled(logits, self.logit_scale)?;
        match self.logit_softcap {
            Some(cap) => logits
                .affine(1.0 / f64::from(cap), 0.0)?
                .tanh()?
                .affine(f64::from(cap), 0.0),
            None => Ok(logits),
        }
    }
}

/// The parts that [`Graphs`](super::graphs::Graphs) records.
#[cfg(feature = "cuda")]
impl Model {
    /// A step's plan, as words and their offsets; `None` for a model without layers, or without kernels for its KV cache.
    pub(super) fn plan(
        &self,
        kv: &KvCache,
        batch: &StepBatch,
    ) -> candle_core::Result<Option<(Vec<u32>, Places)>> {
        let (Some(first), Some(_)) = (self.layers.first(), kv.device_with_kernels()) else {
            return Ok(None);
        };
        let of = first.attention.plan_for(&self.frequencies, kv);
        Places::try_new(batch, of).map(Some)
    }

    /// As [`Self::forward`] for a checked batch. Everything that differs between batches of the same shape is read from the device:
    /// `tokens`, `[rows]` in u32, and the plan.
    pub(super) fn forward_by(
        &self,
        tokens: &Tensor,
        plan: Plan,
        kv: &mut KvCache,
        batch: &StepBatch,
    ) -> candle_core::Result<Tensor> {
        let x = scaled(
            self.embedding.rows_of(tokens, self.dtype())?,
            self.embedding_scale,
        )?;
        let hidden = self.through_layers(x, &Step::Plan(plan), kv, batch)?;
        self.logits(&hidden, batch)
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }
}

impl Model {
    /// Whether a step consists only of kernels. A mixture of experts returns to the CPU to group rows by expert. Candle's
    /// operations with quantized weights cannot be recorded, nor those that send the shape of a part of a tensor, or
    /// factors by position, to the GPU.
    #[cfg(any(feature = "cuda", test))]
    pub(super) fn can_be_recorded(&self) -> bool {
        !self.embedding.is_quantized()
            && !self.output.is_quantized()
            && self.norm.is_one_kernel()
            && self.query_growth.is_none()
            && self.layers.iter().all(Layer::can_be_recorded)
    }
}

/// The residual stream. A block's output is added together with the following norm.
#[derive(Debug)]
struct Stream {
    x: Tensor,
    delta: Option<Tensor>,
}

impl Stream {
    /// Adds the pending output, and returns the sum, normalized if there is a norm.
    fn normed(&mut self, norm: Option<&StreamNorm>) -> candle_core::Result<Tensor> {
        match (norm, self.delta.take()) {
            (None, None) => Ok(self.x.clone()),
            (None, Some(delta)) => {
                self.x = (&self.x + delta)?;
                Ok(self.x.clone())
            }
            (Some(norm), None) => norm.forward(&self.x),
            (Some(norm), Some(delta)) => {
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
    input_norm: Option<StreamNorm>,
    qkv: Linear,
    query_key_norms: Option<WholeNorms>,
    attention: Attention,
    output: Linear,
    attention_post_norm: Option<StreamNorm>,
    feed_forward_norm: Option<StreamNorm>,
    feed_forward: Block,
    feed_forward_post_norm: Option<StreamNorm>,
    residual_scale: f32,
    /// Whether the feed-forward block has the input of attention.
    is_parallel: bool,
}

/// The part of a layer after attention.
#[derive(Debug)]
enum Block {
    Dense(FeedForward),
    Experts(ExpertMixture),
}

impl Block {
    fn forward(&self, x: &Tensor, beside: Beside<'_>) -> candle_core::Result<Tensor> {
        match self {
            Self::Dense(block) => block.forward(x, beside),
            Self::Experts(experts) => experts.forward(x),
        }
    }
}

impl Layer {
    #[cfg(any(feature = "cuda", test))]
    fn can_be_recorded(&self) -> bool {
        self.query_key_norms.is_none()
            && !self.qkv.is_quantized()
            && !self.output.is_quantized()
            && match &self.feed_forward {
                Block::Dense(block) => !block.is_quantized(),
                Block::Experts(_) => false,
            }
    }

    fn forward(
        &self,
        stream: &mut Stream,
        step: &Step,
        kv: LayerKv<'_>,
        batch: &StepBatch,
        beside: Beside<'_>,
        query_factors: Option<&Tensor>,
    ) -> candle_core::Result<()> {
        let x = stream.normed(self.input_norm.as_ref())?;
        let qkv = beside.add(Site::Qkv, &x, self.qkv.forward(&x)?)?;
        let qkv = match &self.query_key_norms {
            Some(norms) => norms.forward(&qkv)?,
            None => qkv,
        };
        // Rotation keeps the factor.
        let qkv = match query_factors {
            Some(factors) => self.attention.scale_queries(&qkv, factors)?,
            None => qkv,
        };
        let attended = self.attention.forward(&qkv, step, kv, batch)?;
        let output = beside.add(Site::Output, &attended, self.output.forward(&attended)?)?;
        if self.is_parallel {
            let both = (output + self.feed_forward.forward(&x, beside)?)?;
            stream.delta = Some(self.post(None, both)?);
            return Ok(());
        }
        stream.delta = Some(self.post(self.attention_post_norm.as_ref(), output)?);
        let x = stream.normed(self.feed_forward_norm.as_ref())?;
        let fed = self.feed_forward.forward(&x, beside)?;
        stream.delta = Some(self.post(self.feed_forward_post_norm.as_ref(), fed)?);
        Ok(())
    }

    /// An output as it is added to the residual stream.
    fn post(&self, norm: Option<&StreamNorm>, x: Tensor) -> candle_core::Result<Tensor> {
        let x = match norm {
            Some(norm) => norm.forward(&x)?,
            None => x,
        };
        scaled(x, self.residual_scale)
    }
}

fn scaled(x: Tensor, factor: f32) -> candle_core::Result<Tensor> {
    if factor == 1.0 {
        Ok(x)
    } else {
        x.affine(f64::from(factor), 0.0)
    }
}
