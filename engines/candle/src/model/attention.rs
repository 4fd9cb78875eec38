//! Attention of packed rows over KV blocks: one operation for prefill chunks and decode rows of many sequences.
//!
//! In main memory `prepare` and `paged` compute it with kernels of our own, straight on the KV blocks; elsewhere
//! `tensors` does, in plain candle operations.

mod paged;
mod prepare;
mod tensors;

use candle_core::{Result, Tensor};

use super::batch::StepBatch;
use super::kv_cache::{HostKv, KvNumber, LayerKv};
use super::norm::Norm;
use super::rope::Turns;
use crate::model::host;

/// One layer's attention, without its projections.
#[derive(Debug)]
pub(super) struct Attention {
    pub(super) num_heads: usize,
    /// Divides `num_heads`.
    pub(super) num_kv_heads: usize,
    pub(super) head_dim: usize,
    /// Tokens a row sees, its own included; `None` for all.
    pub(super) window: Option<usize>,
    pub(super) softcap: Option<f32>,
    /// Scores are multiplied by this.
    pub(super) scale: f32,
    /// Normalizes each head of the queries.
    pub(super) query_norm: Option<Norm>,
    /// Normalizes each head of the keys.
    pub(super) key_norm: Option<Norm>,
}

impl Attention {
    /// From `qkv`, `[rows, (num_heads + 2 * num_kv_heads) * head_dim]`, to `[rows, num_heads * head_dim]`. Stores the
    /// rows' keys and values, then attends. The batch has been checked.
    pub(super) fn forward(
        &self,
        qkv: &Tensor,
        turns: &Turns,
        kv: &mut LayerKv,
        batch: &StepBatch,
    ) -> Result<Tensor> {
        match kv {
            LayerKv::HostF32(kv) => self.forward_on_host(qkv, turns, kv, batch),
            LayerKv::HostF16(kv) => self.forward_on_host(qkv, turns, kv, batch),
            LayerKv::Device {
                keys,
                values,
                block_size,
            } => tensors::forward(self, qkv, turns, (keys, values), batch, *block_size),
        }
    }

    fn forward_on_host<T: KvNumber>(
        &self,
        qkv: &Tensor,
        turns: &Turns,
        kv: &mut HostKv<T>,
        batch: &StepBatch,
    ) -> Result<Tensor> {
        let queries = host::read(qkv, |qkv| {
            prepare::store_keys_and_values(self, qkv, turns, kv, batch)?;
            prepare::queries(self, qkv, turns)
        })??;
        let out = paged::attend(self, &queries, kv, batch);
        Tensor::from_vec(
            out,
            (batch.tokens.len(), self.num_heads * self.head_dim),
            qkv.device(),
        )
    }

    /// Query heads that share a key and value head.
    fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Columns of `qkv`.
    fn qkv_width(&self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }

    /// The positions that a row at `position` sees.
    fn visible(&self, position: usize) -> std::ops::Range<usize> {
        let end = position + 1;
        end.saturating_sub(self.window.unwrap_or(end))..end
    }
}
