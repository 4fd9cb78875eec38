//! Attention of packed rows over KV blocks in main memory: one operation for prefill chunks and decode rows of many sequences.
//!
//! `prepare` normalizes and rotates the heads and stores keys and values; then `paged` attends, directly on the KV blocks.

mod paged;
mod prepare;

use std::ops::Range;

pub use self::paged::attend;
pub use self::prepare::{HeadNorm, Projections, prepared_queries, store_keys_and_values};

/// One sequence's rows in a step, at consecutive positions up to `context_len - 1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceRows {
    /// Its rows.
    pub rows: Range<usize>,
    /// Tokens of this sequence in the KV cache after this step.
    pub context_len: usize,
    /// The KV blocks that hold them, in order.
    pub blocks: Vec<u32>,
}

/// The tokens of its sequence that a row attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Itself and earlier tokens; with a window, only the last of them.
    Causal,
    /// Tokens on both sides; with a window, at most that many on each side.
    Both,
}

/// The heads of one layer's attention, and the tokens that they attend to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionHeads {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The side of a row on which it attends.
    pub direction: Direction,
    /// The number of tokens that a row attends to, itself included, or with both sides those on each side; `None` for all.
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)` of scores.
    pub softcap: Option<f32>,
    /// The factor of scores.
    pub scale: f32,
}

impl AttentionHeads {
    /// Query heads that share a key and value head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// The width of a row's queries, keys and values: `(num_heads + 2 * num_kv_heads) * head_dim`.
    #[must_use]
    pub fn qkv_width(&self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }

    /// The positions that a row at `position` attends to, in a context of `context_len` tokens.
    #[must_use]
    pub fn visible(&self, position: usize, context_len: usize) -> Range<usize> {
        let end = position + 1;
        match (self.direction, self.window) {
            (Direction::Causal, window) => end.saturating_sub(window.unwrap_or(end))..end,
            (Direction::Both, None) => 0..context_len,
            (Direction::Both, Some(window)) => {
                position.saturating_sub(window)..context_len.min(end.saturating_add(window))
            }
        }
    }
}
