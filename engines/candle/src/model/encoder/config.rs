//! What an encoder is: its sizes and its variations.

/// Everything an encoder needs to know that is not a weight.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderConfig {
    /// Whose layers it has, and how its tensors are called.
    pub family: EncoderFamily,
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward block.
    pub intermediate_size: usize,
    /// Layers.
    pub num_layers: usize,
    /// Attention heads; divides `hidden_size` into even parts.
    pub num_heads: usize,
    /// Added to the variance before the root.
    pub norm_eps: f64,
    /// The feed-forward block's activation.
    pub activation: Nonlinearity,
    /// How rows know where they stand.
    pub positions: Positions,
    /// Kinds of token that embeddings tell apart; 0 for none.
    pub num_token_types: usize,
    /// Whether norms have biases.
    pub has_norm_bias: bool,
    /// Whether the attention's projections have biases.
    pub has_attention_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub has_mlp_bias: bool,
}

/// Whose layers an encoder has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EncoderFamily {
    /// BERT, RoBERTa, XLM-RoBERTa: a norm after each block, and a plain feed-forward block.
    Bert,
    /// ModernBERT: a norm before each block, and a gated feed-forward block.
    ModernBert,
}

/// How an encoder's rows know where they stand.
#[derive(Debug, Clone, PartialEq)]
pub enum Positions {
    /// An embedding for each position is added.
    Absolute {
        /// Positions that the table has.
        table_len: usize,
        /// The first position's row: behind the padding's in RoBERTa.
        first: usize,
    },
    /// Queries and keys are turned.
    Rotary {
        /// The base of the frequencies in layers that see everything.
        theta: f32,
        /// The base in the other layers.
        window_theta: f32,
        /// Layers that see only their neighbours, by their number.
        is_windowed: Vec<bool>,
        /// Neighbours on each side that such a layer's rows see.
        window_tokens: usize,
    },
}

/// An activation, of a feed-forward block or of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nonlinearity {
    /// GELU by the error function.
    Gelu,
    /// GELU by its tanh approximation.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// `x * sigmoid(x)`.
    Silu,
    /// `tanh(x)`.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `x`.
    Identity,
}

impl EncoderConfig {
    /// Width of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.hidden_size.checked_div(self.num_heads).unwrap_or(0)
    }

    /// How many tokens positions are there for; `None` where there is no end.
    #[must_use]
    pub fn positions_len(&self) -> Option<usize> {
        match self.positions {
            Positions::Absolute { table_len, first } => Some(table_len.saturating_sub(first)),
            Positions::Rotary { .. } => None,
        }
    }
}
