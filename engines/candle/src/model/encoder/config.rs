//! The configuration of an encoder: its sizes and its variations.

pub use genset_kernels::Nonlinearity;

/// Everything an encoder needs beside the weights.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderConfig {
    /// The family, which decides its layers and the names of its tensors.
    pub family: EncoderFamily,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward block.
    pub intermediate_size: usize,
    /// Layers.
    pub num_layers: usize,
    /// Attention heads; divides `hidden_size` into even parts.
    pub num_heads: usize,
    /// Added to the variance before the square root.
    pub norm_eps: f64,
    /// The feed-forward block's activation.
    pub activation: Nonlinearity,
    /// How positions are encoded.
    pub positions: Positions,
    /// Token kinds with their own embeddings; 0 for none.
    pub num_token_types: usize,
    /// Whether norms have biases.
    pub has_norm_bias: bool,
    /// Whether the attention's projections have biases.
    pub has_attention_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub has_mlp_bias: bool,
}

/// The family of an encoder's layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EncoderFamily {
    /// BERT, RoBERTa, XLM-RoBERTa: a norm after each block, and a plain feed-forward block.
    Bert,
    /// ModernBERT: a norm before each block, and a gated feed-forward block.
    ModernBert,
}

/// How an encoder encodes positions.
#[derive(Debug, Clone, PartialEq)]
pub enum Positions {
    /// Adds an embedding for each position.
    Absolute {
        /// The number of positions in the table.
        table_len: usize,
        /// The first position's row: after the padding's in RoBERTa.
        first: usize,
    },
    /// Rotates queries and keys.
    Rotary {
        /// The base of the frequencies in layers with full attention.
        theta: f32,
        /// The base in the other layers.
        window_theta: f32,
        /// For each layer, whether it attends only to neighbours.
        is_windowed: Vec<bool>,
        /// The number of neighbours on each side in such a layer.
        window_tokens: usize,
    },
}

impl EncoderConfig {
    /// Width of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.hidden_size.checked_div(self.num_heads).unwrap_or(0)
    }

    /// The number of positions; `None` if unlimited.
    #[must_use]
    pub fn positions_len(&self) -> Option<usize> {
        match self.positions {
            Positions::Absolute { table_len, first } => Some(table_len.saturating_sub(first)),
            Positions::Rotary { .. } => None,
        }
    }
}
