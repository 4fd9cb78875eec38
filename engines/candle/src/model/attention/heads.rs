//! [`AttentionHeads`]: the numbers of one layer's attention.

use std::ops::Range;

/// The tokens of its sequence that a row attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::model) enum Direction {
    /// Itself and earlier tokens; with a window, only the last of them.
    Causal,
    /// Tokens on both sides; with a window, at most that many on each side.
    Both,
}

/// The heads of one layer's attention, and the tokens that they attend to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::model) struct AttentionHeads {
    /// Query heads.
    pub(in crate::model) num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub(in crate::model) num_kv_heads: usize,
    /// Width of a head.
    pub(in crate::model) head_dim: usize,
    /// The side of a row on which it attends.
    pub(in crate::model) direction: Direction,
    /// The number of tokens that a row attends to, itself included, or with both sides those on each side; `None` for all.
    pub(in crate::model) window: Option<usize>,
    /// `cap * tanh(score / cap)` of scores.
    pub(in crate::model) softcap: Option<f32>,
    /// The factor of scores.
    pub(in crate::model) scale: f32,
}

impl AttentionHeads {
    /// Query heads that share a key and value head.
    pub(super) fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// The width of a row's queries, keys and values: `(num_heads + 2 * num_kv_heads) * head_dim`.
    pub(super) fn qkv_width(&self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }

    /// The positions that a row at `position` attends to, in a context of `context_len` tokens.
    pub(super) fn visible(&self, position: usize, context_len: usize) -> Range<usize> {
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
