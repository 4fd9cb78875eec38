//! Attention of packed rows over KV blocks: one operation for prefill chunks and decode rows of many sequences.
//!
//! In main memory, `genset_kernels` computes it directly on the KV blocks. On a GPU, `by_kernels` does the same; `tensors` computes
//! unsupported cases with plain candle operations.

pub(super) mod by_kernels;
pub(super) mod plan;
mod tensors;

use candle_core::{DType, Result, Tensor};
use genset_kernels::{
    AttentionHeads, HeadNorm, HostLayer, Projections, Turns, attend, prepared_queries,
    store_keys_and_values,
};

use self::plan::{Plan, PlanFor};
use super::batch::StepBatch;
use super::kv_cache::{KvCache, LayerKv};
use super::norm::Norm;
use super::rope::Frequencies;
use crate::model::host;

/// One layer's attention, without its projections.
#[derive(Debug)]
pub(super) struct Attention {
    pub(super) heads: AttentionHeads,
    /// Normalizes each head of the queries.
    pub(super) query_norm: Option<Norm>,
    /// Normalizes each head of the keys.
    pub(super) key_norm: Option<Norm>,
    /// Whether these norms come after the rotation, not before it.
    pub(super) norms_are_last: bool,
    /// The index of the step's frequencies that rotate the heads.
    pub(super) rotation: usize,
    pub(super) sinks: Option<Sinks>,
}

/// An additional score per query head, which enters the softmax but has no value.
///
/// # Source
/// gpt-oss; "Efficient Streaming Language Models with Attention Sinks" (Xiao et al. 2023).
#[derive(Debug, Clone)]
pub(super) struct Sinks {
    /// `[num_heads]`.
    host: Vec<f32>,
    /// The same in f32 on the device that computes attention.
    tensor: Tensor,
}

impl Sinks {
    /// `scores` are `[num_heads]`.
    pub(super) fn try_new(scores: &Tensor) -> Result<Self> {
        let tensor = scores.to_dtype(DType::F32)?.contiguous()?;
        Ok(Self {
            host: tensor.to_vec1()?,
            tensor,
        })
    }
}

/// State that the layers of a step share.
#[derive(Debug)]
pub(super) enum Step {
    /// The rotations, one entry per set of frequencies.
    Turns(Vec<Turns>),
    /// The input of the GPU kernels.
    Plan(Plan),
}

impl Step {
    /// Creates it for layers like `attention`, each of which uses one of `frequencies`.
    pub(super) fn try_new(
        batch: &StepBatch,
        attention: &Attention,
        frequencies: &[Frequencies],
        kv: &KvCache,
    ) -> Result<Self> {
        if let Some(device) = kv.device_with_kernels() {
            let of = attention.plan_for(frequencies, kv);
            return Ok(Self::Plan(Plan::try_new(batch, of, device)?));
        }
        let turns = frequencies
            .iter()
            .map(|frequencies| frequencies.turns(&batch.positions));
        Ok(Self::Turns(turns.collect()))
    }
}

impl Attention {
    /// Stores the keys and values of the rows, then attends: from `qkv`, `[rows, (num_heads + 2 * num_kv_heads) * head_dim]`, to
    /// `[rows, num_heads * head_dim]`. The batch must be checked.
    pub(super) fn forward(
        &self,
        qkv: &Tensor,
        step: &Step,
        kv: LayerKv<'_>,
        batch: &StepBatch,
    ) -> Result<Tensor> {
        let turns = match step {
            Step::Turns(turns) => &turns[self.rotation],
            Step::Plan(plan) => return self.forward_by_kernels(qkv, plan, kv),
        };
        match kv {
            LayerKv::Host(kv) => self.forward_on_host(qkv, turns, kv, batch),
            LayerKv::Device(kv) => {
                let tensors = (&kv.keys, &kv.values);
                tensors::forward(self, qkv, turns, tensors, batch, kv.block_size)
            }
        }
    }

    /// `qkv` with queries that are multiplied by each row's factor, `[rows, 1]`.
    pub(super) fn scale_queries(&self, qkv: &Tensor, factors: &Tensor) -> Result<Tensor> {
        let queries = self.heads.num_heads * self.heads.head_dim;
        let others = self.heads.qkv_width() - queries;
        let parts = [
            qkv.narrow(1, 0, queries)?.broadcast_mul(factors)?,
            qkv.narrow(1, queries, others)?.contiguous()?,
        ];
        Tensor::cat(&parts, 1)?.contiguous()
    }

    /// The inputs of a plan for layers like this.
    pub(super) fn plan_for<'a>(&self, frequencies: &'a [Frequencies], kv: &KvCache) -> PlanFor<'a> {
        PlanFor {
            frequencies,
            group: self.heads.group(),
            has_many: by_kernels::has_many(kv.spec().dtype),
        }
    }

    fn forward_by_kernels(&self, qkv: &Tensor, plan: &Plan, kv: LayerKv<'_>) -> Result<Tensor> {
        let LayerKv::Device(kv) = kv else {
            candle_core::bail!("a step for kernels on a KV cache that is not for them");
        };
        let kv = by_kernels::Kv {
            keys: &kv.keys,
            values: &kv.values,
            block_size: kv.block_size,
        };
        by_kernels::forward(self, qkv, plan, kv)
    }

    fn forward_on_host(
        &self,
        qkv: &Tensor,
        turns: &Turns,
        mut kv: HostLayer<'_>,
        batch: &StepBatch,
    ) -> Result<Tensor> {
        let queries = host::read(qkv, |qkv| {
            self.with_norm(self.query_norm.as_ref(), |query_norm| {
                self.with_norm(self.key_norm.as_ref(), |key_norm| {
                    let projections = Projections {
                        qkv,
                        turns,
                        query_norm,
                        key_norm,
                    };
                    let slots = &batch.slots;
                    store_keys_and_values(&self.heads, &projections, &mut kv, slots);
                    prepared_queries(&self.heads, &projections)
                })
            })
        })???;
        let sinks = self.sinks.as_ref().map(|sinks| &sinks.host[..]);
        let out = attend(&self.heads, sinks, &queries, &kv, &batch.sequences);
        Tensor::from_vec(
            out,
            (
                batch.tokens.len(),
                self.heads.num_heads * self.heads.head_dim,
            ),
            qkv.device(),
        )
    }

    /// Calls `f` with the numbers of a norm, if there is one.
    fn with_norm<R>(
        &self,
        norm: Option<&Norm>,
        f: impl FnOnce(Option<HeadNorm<'_>>) -> R,
    ) -> Result<R> {
        let Some(norm) = norm else {
            return Ok(f(None));
        };
        host::read(norm.weight(), |weight| {
            f(Some(HeadNorm {
                weight,
                eps: norm.eps(),
                is_last: self.norms_are_last,
            }))
        })
    }
}
