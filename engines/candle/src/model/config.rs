//! What a decoder-only model is: its sizes and its variations on the one decoder block.
//!
//! `load` fills it from a `config.json` or from a GGUF file's metadata; `model` builds the decoder that it describes.

/// Everything the decoder needs to know that is not a weight.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Entries of the vocabulary, and rows of the output matrix.
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
    /// The most tokens of prompt and answer together that the model was trained for.
    pub context_length: usize,
    /// Added to the mean square before the root.
    pub rms_norm_eps: f64,
    /// Added to every norm's weight: 1 in Gemma's checkpoints (GGUF files have it added already), else 0.
    pub norm_weight_offset: f32,
    /// Whether each head's queries and keys are normalized (Qwen3, Gemma 3).
    pub has_qk_norm: bool,
    /// Whether attention and feed-forward outputs are normalized before they are added (Gemma 2 and 3).
    pub has_post_norms: bool,
    /// Whether query, key and value projections have biases (Qwen2).
    pub has_qkv_bias: bool,
    /// Whether the attention's output projection has a bias (Llama with `attention_bias`).
    pub has_output_bias: bool,
    /// Whether the feed-forward projections have biases (Llama with `mlp_bias`).
    pub has_mlp_bias: bool,
    /// Whether each query head has a sink: a score of its own beside those of the positions (gpt-oss).
    pub has_sinks: bool,
    /// Feed-forward blocks that a router chooses among in each layer; `None` where each layer has one.
    pub experts: Option<Experts>,
    /// The feed-forward block's activation.
    pub activation: Activation,
    /// Positions.
    pub rope: Rope,
    /// Layers that see only the last tokens; `None` when all layers see everything.
    pub window: Option<SlidingWindow>,
    /// Scores are multiplied by this; `1 / sqrt(head_dim)` unless the model says otherwise.
    pub attention_scale: f32,
    /// `cap * tanh(score / cap)` of attention scores (Gemma 2).
    pub attention_softcap: Option<f32>,
    /// `cap * tanh(logit / cap)` of logits (Gemma 2).
    pub logit_softcap: Option<f32>,
    /// Token embeddings are multiplied by this: `sqrt(hidden_size)` in Gemma, else 1.
    pub embedding_scale: f32,
    /// Whether the output matrix is the token embedding.
    pub is_tied: bool,
}

/// The activation of a gated feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU by its tanh approximation.
    GeluTanh,
    /// `x * sigmoid(1.702 * x)` of gates up to `limit`, and what they are multiplied with is at most `limit` away from 0 and
    /// has 1 added (gpt-oss).
    ClampedSwish {
        /// Above 0.
        limit: f32,
    },
}

impl Activation {
    /// What `ClampedSwish` multiplies by inside of the sigmoid.
    pub(crate) const SWISH_SLOPE: f32 = 1.702;
}

/// Experts of a layer, and how its router chooses among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// Experts of each layer.
    pub count: usize,
    /// Experts that a token goes to: those of the largest router logits; at most `count`.
    pub per_token: usize,
    /// Whether the chosen experts' probabilities are divided by their sum.
    pub is_normalized: bool,
    /// Whether router logits have a bias (gpt-oss).
    pub has_router_bias: bool,
}

/// Rotary position embedding, over halves of a head (the layout of `transformers`; `load` reorders rows of files that
/// have another one).
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f32,
    /// The base in layers with a sliding window, where it differs (Gemma 3).
    pub window_theta: Option<f32>,
    /// How frequencies are stretched for longer contexts; not applied where `window_theta` is.
    pub scaling: RopeScaling,
    /// Dimensions of a head that turn, the first ones; the others keep their values. Even, and at most the head's width.
    pub rotary_dim: usize,
    /// What turned dimensions of queries and keys are multiplied by (YaRN's and LongRoPE's attention
    /// factor), else 1.
    pub amplitude: f32,
    /// Every how many layers one does not turn its heads at all (SmolLM3): layer `i` where `(i + 1) % n == 0`.
    pub still_every: Option<usize>,
}

/// How rotary frequencies are stretched.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// They are not.
    None,
    /// All are divided by `factor`.
    Linear {
        /// At least 1.
        factor: f32,
    },
    /// Llama 3's: low frequencies are divided, high ones kept, those between blended.
    Llama3 {
        /// What low frequencies are divided by.
        factor: f32,
        /// Wavelengths above `original_context_length / low_freq_factor` are low frequencies.
        low_freq_factor: f32,
        /// Wavelengths below `original_context_length / high_freq_factor` are high frequencies.
        high_freq_factor: f32,
        /// The context the model was first trained with, in tokens.
        original_context_length: usize,
    },
    /// Every pair's frequency is divided by a factor of its own (LongRoPE, and `rope_freqs.weight` of GGUF files).
    Factors(Vec<f32>),
    /// YaRN's: pairs that turn less than `slow_turns` times in the first context are divided, those that turn more than
    /// `fast_turns` times kept, those between blended by their place.
    Yarn {
        /// What slow frequencies are divided by, at least 1.
        factor: f32,
        /// `beta_fast`.
        fast_turns: f32,
        /// `beta_slow`.
        slow_turns: f32,
        /// The context the model was first trained with, in tokens.
        original_context_length: usize,
        /// Whether the bounds are rounded to whole pairs.
        is_rounded: bool,
    },
}

/// Which layers see only the last tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Tokens a windowed layer sees, the newest included.
    pub size_tokens: usize,
    /// Every how many layers one sees everything; `None` when none does (Mistral). Layer `i` of Gemma 2 sees everything
    /// when `(i + 1) % 2 == 0`, of Gemma 3 when `(i + 1) % 6 == 0`.
    pub full_every: Option<usize>,
}
