//! The configuration of a decoder-only model: its sizes, and its variations of the decoder block.
//!
//! `load` reads it from a `config.json` or from a GGUF file's metadata; `model` builds the decoder from it.

pub use genset_kernels::Activation;

/// Everything the decoder needs beside the weights.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Size of the vocabulary, and rows of the output matrix.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward block, or inside one expert.
    pub intermediate_size: usize,
    /// Decoder blocks.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The longest sequence of prompt and answer that the model was trained for, in tokens.
    pub context_length: usize,
    /// How the residual stream is normalized.
    pub norm_kind: NormKind,
    /// Added to the mean square before the square root.
    pub norm_eps: f64,
    /// Added to every norm's weight: 1 in Gemma's checkpoints (GGUF files include it already), else 0.
    pub norm_weight_offset: f32,
    /// How queries and keys are normalized.
    pub query_key_norm: QueryKeyNorm,
    /// What a decoder block normalizes.
    pub block_norms: BlockNorms,
    /// Whether query, key and value projections have biases (Qwen2).
    pub has_qkv_bias: bool,
    /// Whether the attention's output projection has a bias (Llama with `attention_bias`).
    pub has_output_bias: bool,
    /// Whether the feed-forward projections have biases (Llama with `mlp_bias`).
    pub has_mlp_bias: bool,
    /// Whether each query head has a sink, an additional attention score (gpt-oss).
    pub has_sinks: bool,
    /// Feed-forward blocks that a router chooses from in each layer; `None` if each layer has only one.
    pub experts: Option<Experts>,
    /// Whether the feed-forward block multiplies two products of its input; StarCoder2's has one.
    pub is_gated: bool,
    /// The feed-forward block's activation.
    pub activation: Activation,
    /// The rotary position embedding.
    pub rope: Rope,
    /// Layers that attend only to the last tokens; `None` if all layers attend to everything.
    pub window: Option<SlidingWindow>,
    /// The factor of attention scores; `1 / sqrt(head_dim)` unless the model overrides it.
    pub attention_scale: f32,
    /// How queries grow with their position (Ministral 3).
    pub query_growth: Option<QueryGrowth>,
    /// `cap * tanh(score / cap)` of attention scores (Gemma 2).
    pub attention_softcap: Option<f32>,
    /// `cap * tanh(logit / cap)` of logits (Gemma 2).
    pub logit_softcap: Option<f32>,
    /// The factor of token embeddings: `sqrt(hidden_size)` in Gemma, Granite's own, else 1.
    pub embedding_scale: f32,
    /// The factor of attention and feed-forward outputs before they are added: Granite's own, else 1.
    pub residual_scale: f32,
    /// The factor of logits: Granite's and Cohere's own, else 1.
    pub logit_scale: f32,
    /// Whether the output matrix is the token embedding.
    pub is_tied: bool,
}

impl ModelConfig {
    /// The number of weights of the norm of queries, if there is one.
    pub(crate) fn query_norm_width(&self) -> usize {
        self.norm_width(self.num_heads)
    }

    /// The number of weights of the norm of keys, if there is one.
    pub(crate) fn key_norm_width(&self) -> usize {
        self.norm_width(self.num_kv_heads)
    }

    fn norm_width(&self, heads: usize) -> usize {
        match self.query_key_norm {
            QueryKeyNorm::None | QueryKeyNorm::Heads | QueryKeyNorm::RotatedHeads => self.head_dim,
            QueryKeyNorm::Whole => heads * self.head_dim,
        }
    }

    /// Numbers that a step holds at once per token: a layer's activations, and its keys and values.
    pub(crate) fn step_numbers_per_token(&self) -> usize {
        let hidden = self.hidden_size.max(self.num_heads * self.head_dim);
        let kv = 2 * self.num_kv_heads * self.head_dim;
        let shared = self.experts.and_then(|experts| experts.shared_size);
        let wide = self.intermediate_size.max(shared.unwrap_or(0));
        8 * hidden + 3 * wide + kv
    }
}

/// How rows are normalized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// Divided by the root of their mean square.
    RootMeanSquare,
    /// As that, after their mean is subtracted (Cohere 2, StarCoder2).
    Layer {
        /// Whether a bias is added afterwards (StarCoder2).
        has_bias: bool,
    },
}

/// How queries and keys are normalized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryKeyNorm {
    /// Not at all.
    None,
    /// Each head before it rotates (Qwen3, Gemma 3, EXAONE 4).
    Heads,
    /// Each head after it rotated (Hunyuan).
    RotatedHeads,
    /// The queries of all heads together before they rotate, and the keys likewise (OLMo 2 and 3, OLMoE).
    Whole,
}

/// What a decoder block normalizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockNorms {
    /// The inputs of attention and of the feed-forward block.
    Inputs,
    /// The outputs of both, before they are added to the residual stream (OLMo 2 and 3, EXAONE 4).
    Outputs,
    /// Inputs and outputs (Gemma 2 and 3, GLM-4).
    Both,
    /// One input, which attention and the feed-forward block share; their outputs are added together (Cohere 2).
    Shared,
}

impl BlockNorms {
    /// Whether inputs are normalized.
    pub(crate) const fn has_inputs(self) -> bool {
        match self {
            Self::Inputs | Self::Both | Self::Shared => true,
            Self::Outputs => false,
        }
    }

    /// Whether outputs are normalized.
    pub(crate) const fn has_outputs(self) -> bool {
        match self {
            Self::Outputs | Self::Both => true,
            Self::Inputs | Self::Shared => false,
        }
    }
}

/// The experts of a layer, and how the router chooses among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// Experts per layer.
    pub count: usize,
    /// Experts per token: those of the largest router logits; at most `count`.
    pub per_token: usize,
    /// Whether the chosen experts' probabilities are divided by their sum.
    pub is_normalized: bool,
    /// Whether router logits have a bias (gpt-oss).
    pub has_router_bias: bool,
    /// Width inside the expert that each row goes to beside the chosen ones, weighted by a gate of its own (Qwen2-MoE).
    pub shared_size: Option<usize>,
}

/// Rotary position embedding over the halves of a head (the layout of `transformers`; `load` reorders rows of files with
/// another layout).
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f32,
    /// The base in layers with a sliding window, if they rotate in another way (Gemma 3, OLMo 3).
    pub window_theta: Option<f32>,
    /// How frequencies are scaled for longer contexts; not applied where `window_theta` is.
    pub scaling: RopeScaling,
    /// The number of leading dimensions per head that rotate; the others are unchanged. Even, and at most the head's width.
    pub rotary_dim: usize,
    /// The factor of the rotated dimensions of queries and keys: the attention factor of YaRN and LongRoPE, else 1.
    pub amplitude: f32,
    /// Whether checkouts have rows `2j` and `2j + 1` of a head as partners (GLM, Ernie, Cohere).
    pub is_paired: bool,
    /// The period of layers without rotation (SmolLM3, EXAONE 4, Cohere 2): layer `i` if `(i + 1) % n == 0`.
    pub still_every: Option<usize>,
}

/// How queries grow with their position: by the factor `1 + slope * ln(1 + floor(position / period))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryGrowth {
    /// Not negative.
    pub slope: f32,
    /// The original context length in tokens, at least 1.
    pub period: usize,
}

impl QueryGrowth {
    /// The factor of queries at `position`.
    pub(crate) fn factor(self, position: u32) -> f32 {
        let period = u32::try_from(self.period).unwrap_or(u32::MAX);
        let periods = position.checked_div(period).unwrap_or(0);
        #[expect(clippy::cast_precision_loss, reason = "few periods")]
        let periods = periods as f32;
        1.0 + self.slope * (1.0 + periods).ln()
    }
}

/// How rotary frequencies are scaled.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All are divided by `factor`.
    Linear {
        /// At least 1.
        factor: f32,
    },
    /// Llama 3's: divides low frequencies, keeps high ones, and blends those between.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f32,
        /// Wavelengths above `original_context_length / low_freq_factor` are low frequencies.
        low_freq_factor: f32,
        /// Wavelengths below `original_context_length / high_freq_factor` are high frequencies.
        high_freq_factor: f32,
        /// The original context length in tokens.
        original_context_length: usize,
    },
    /// Divides each pair's frequency by its own factor (LongRoPE, and `rope_freqs.weight` of GGUF files).
    Factors(Vec<f32>),
    /// YaRN's: divides pairs that rotate less than `slow_turns` times in the original context, keeps those that rotate more than
    /// `fast_turns` times, and blends those between by their index.
    Yarn {
        /// The divisor of slow frequencies, at least 1.
        factor: f32,
        /// `beta_fast`.
        fast_turns: f32,
        /// `beta_slow`.
        slow_turns: f32,
        /// The original context length in tokens.
        original_context_length: usize,
        /// Whether the bounds are rounded to whole pairs.
        is_rounded: bool,
    },
}

/// The layers that attend only to the last tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Tokens that a windowed layer attends to, the newest included.
    pub size_tokens: usize,
    /// The period of layers that attend to everything; `None` if none does (Mistral). In Gemma 2 these are the layers `i` with
    /// `(i + 1) % 2 == 0`, in Gemma 3 those with `(i + 1) % 6 == 0`.
    pub full_every: Option<usize>,
}
