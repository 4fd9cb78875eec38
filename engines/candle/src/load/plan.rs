//! [`plan`]: every tensor that a configuration requires, in the order in which the decoder reads them.

use super::quantize::Part;
use crate::model::config::ModelConfig;

/// A required tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedTensor {
    /// Its name in `transformers`.
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) role: Role,
}

/// The use of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Weights of a norm.
    Norm,
    Bias,
    /// A matrix of a product.
    Matrix(Part),
}

/// Every tensor of the model.
pub(crate) fn plan(config: &ModelConfig) -> Vec<PlannedTensor> {
    let mut all = Plan::default();
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    all.matrix("model.embed_tokens.weight", vocab, hidden, Part::Vocabulary);
    for layer in 0..config.num_layers {
        all.layer(&format!("model.layers.{layer}"), config);
    }
    all.norm("model.norm", hidden);
    if !config.is_tied {
        all.matrix("lm_head.weight", vocab, hidden, Part::Vocabulary);
    }
    all.0
}

/// The part of the model that uses the matrix of that name; the loader handles the token embedding itself.
pub(crate) fn part_of(name: &str) -> Part {
    if name == "lm_head.weight" {
        Part::Vocabulary
    } else if name.ends_with(".mlp.gate.weight") {
        Part::Router
    } else {
        Part::Layer
    }
}

#[derive(Default)]
struct Plan(Vec<PlannedTensor>);

impl Plan {
    fn layer(&mut self, prefix: &str, config: &ModelConfig) {
        let hidden = config.hidden_size;
        let queries = config.num_heads * config.head_dim;
        let keys = config.num_kv_heads * config.head_dim;
        self.norm(&format!("{prefix}.input_layernorm"), hidden);
        for (name, rows) in [("q", queries), ("k", keys), ("v", keys)] {
            let name = format!("{prefix}.self_attn.{name}_proj");
            self.linear(&name, rows, hidden, config.has_qkv_bias);
        }
        let name = format!("{prefix}.self_attn.o_proj");
        self.linear(&name, hidden, queries, config.has_output_bias);
        if config.has_sinks {
            let name = format!("{prefix}.self_attn.sinks");
            self.push(name, vec![config.num_heads], Role::Bias);
        }
        if config.has_qk_norm {
            self.norm(&format!("{prefix}.self_attn.q_norm"), config.head_dim);
            self.norm(&format!("{prefix}.self_attn.k_norm"), config.head_dim);
        }
        self.norm(&format!("{prefix}.post_attention_layernorm"), hidden);
        if config.has_post_norms {
            self.norm(&format!("{prefix}.pre_feedforward_layernorm"), hidden);
            self.norm(&format!("{prefix}.post_feedforward_layernorm"), hidden);
        }
        let prefix = format!("{prefix}.mlp");
        let Some(experts) = config.experts else {
            self.feed_forward(&prefix, config);
            return;
        };
        let router = format!("{prefix}.gate.weight");
        self.matrix(&router, experts.count, hidden, Part::Router);
        if experts.has_router_bias {
            let name = format!("{prefix}.gate.bias");
            self.push(name, vec![experts.count], Role::Bias);
        }
        for expert in 0..experts.count {
            self.feed_forward(&format!("{prefix}.experts.{expert}"), config);
        }
    }

    fn feed_forward(&mut self, prefix: &str, config: &ModelConfig) {
        let (hidden, wide) = (config.hidden_size, config.intermediate_size);
        for (name, rows, columns) in [
            ("gate", wide, hidden),
            ("up", wide, hidden),
            ("down", hidden, wide),
        ] {
            let name = format!("{prefix}.{name}_proj");
            self.linear(&name, rows, columns, config.has_mlp_bias);
        }
    }

    fn linear(&mut self, name: &str, rows: usize, columns: usize, has_bias: bool) {
        self.matrix(&format!("{name}.weight"), rows, columns, Part::Layer);
        if has_bias {
            self.push(format!("{name}.bias"), vec![rows], Role::Bias);
        }
    }

    fn matrix(&mut self, name: &str, rows: usize, columns: usize, part: Part) {
        self.push(name.to_owned(), vec![rows, columns], Role::Matrix(part));
    }

    fn norm(&mut self, name: &str, size: usize) {
        self.push(format!("{name}.weight"), vec![size], Role::Norm);
    }

    fn push(&mut self, name: String, shape: Vec<usize>, role: Role) {
        self.0.push(PlannedTensor { name, shape, role });
    }
}
