//! [`plan`]: every tensor that a configuration requires, in the order in which the decoder reads them.

use super::quantize::Part;
use crate::model::config::{BlockNorms, ModelConfig, NormKind, QueryKeyNorm};

/// A required tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedTensor {
    /// Its name in `transformers`.
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    /// The part of the model that multiplies with it; `None` for norms, biases and lookup tables.
    pub(crate) matrix: Option<Part>,
}

/// Every tensor of the model.
pub(crate) fn plan(config: &ModelConfig) -> Vec<PlannedTensor> {
    let mut all = Plan::default();
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    all.matrix("model.embed_tokens", vocab, hidden, Part::Vocabulary);
    for layer in 0..config.num_layers {
        all.layer(&format!("model.layers.{layer}"), config);
    }
    all.stream_norm("model.norm", config);
    if !config.is_tied {
        all.matrix("lm_head", vocab, hidden, Part::Vocabulary);
    }
    all.0
}

/// The tensors of a model so far.
#[derive(Default)]
pub(super) struct Plan(pub(super) Vec<PlannedTensor>);

impl Plan {
    fn layer(&mut self, prefix: &str, config: &ModelConfig) {
        let hidden = config.hidden_size;
        let queries = config.num_heads * config.head_dim;
        let keys = config.num_kv_heads * config.head_dim;
        if config.block_norms.has_inputs() {
            self.stream_norm(&format!("{prefix}.input_layernorm"), config);
        }
        for (name, rows) in [("q", queries), ("k", keys), ("v", keys)] {
            let name = format!("{prefix}.self_attn.{name}_proj");
            self.linear(&name, rows, hidden, config.has_qkv_bias);
        }
        let name = format!("{prefix}.self_attn.o_proj");
        self.linear(&name, hidden, queries, config.has_output_bias);
        if config.has_sinks {
            let name = format!("{prefix}.self_attn.sinks");
            self.push(name, vec![config.num_heads], None);
        }
        if config.query_key_norm != QueryKeyNorm::None {
            let (query, key) = (config.query_norm_width(), config.key_norm_width());
            self.norm(&format!("{prefix}.self_attn.q_norm"), query);
            self.norm(&format!("{prefix}.self_attn.k_norm"), key);
        }
        if config.block_norms != BlockNorms::Shared {
            self.stream_norm(&format!("{prefix}.post_attention_layernorm"), config);
        }
        if config.block_norms == BlockNorms::Both {
            self.stream_norm(&format!("{prefix}.pre_feedforward_layernorm"), config);
        }
        if config.block_norms.has_outputs() {
            self.stream_norm(&format!("{prefix}.post_feedforward_layernorm"), config);
        }
        let prefix = format!("{prefix}.mlp");
        let Some(experts) = config.experts else {
            self.feed_forward(&prefix, config, config.intermediate_size);
            return;
        };
        let router = format!("{prefix}.gate");
        self.matrix(&router, experts.count, hidden, Part::Router);
        if experts.has_router_bias {
            self.push(format!("{router}.bias"), vec![experts.count], None);
        }
        for expert in 0..experts.count {
            let prefix = format!("{prefix}.experts.{expert}");
            self.feed_forward(&prefix, config, config.intermediate_size);
        }
        if let Some(wide) = experts.shared_size {
            let prefix = format!("{prefix}.shared_expert");
            self.matrix(&format!("{prefix}_gate"), 1, hidden, Part::Router);
            self.feed_forward(&prefix, config, wide);
        }
    }

    fn feed_forward(&mut self, prefix: &str, config: &ModelConfig, wide: usize) {
        let hidden = config.hidden_size;
        for (name, rows, columns) in [
            ("gate", wide, hidden),
            ("up", wide, hidden),
            ("down", hidden, wide),
        ] {
            if name == "gate" && !config.is_gated {
                continue;
            }
            let name = format!("{prefix}.{name}_proj");
            self.linear(&name, rows, columns, config.has_mlp_bias);
        }
    }

    /// The tensors of a layer's product.
    pub(super) fn linear(&mut self, name: &str, rows: usize, columns: usize, has_bias: bool) {
        self.matrix(name, rows, columns, Part::Layer);
        if has_bias {
            self.push(format!("{name}.bias"), vec![rows], None);
        }
    }

    pub(super) fn matrix(&mut self, name: &str, rows: usize, columns: usize, part: Part) {
        self.push(format!("{name}.weight"), vec![rows, columns], Some(part));
    }

    /// A norm of the residual stream.
    fn stream_norm(&mut self, name: &str, config: &ModelConfig) {
        self.norm(name, config.hidden_size);
        if config.norm_kind == (NormKind::Layer { has_bias: true }) {
            self.push(format!("{name}.bias"), vec![config.hidden_size], None);
        }
    }

    fn norm(&mut self, name: &str, size: usize) {
        self.push(format!("{name}.weight"), vec![size], None);
    }

    pub(super) fn push(&mut self, name: String, shape: Vec<usize>, matrix: Option<Part>) {
        self.0.push(PlannedTensor {
            name,
            shape,
            matrix,
        });
    }
}
