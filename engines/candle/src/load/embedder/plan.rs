//! All tensors that the configurations of an encoder and a head require.

use crate::error::LoadError;
use crate::load::TensorFiles;
use crate::load::plan::{PlannedTensor, Role};
use crate::load::quantize::Part;
use crate::load::safetensors::SafetensorsFolder;
use crate::model::{EncoderConfig, EncoderFamily, HeadConfig, HeadStep, Positions};

/// The prefix of an encoder's tensor names: empty, or the encoder's name in a model with a head.
pub(super) fn prefix(
    config: &EncoderConfig,
    folder: &SafetensorsFolder,
) -> Result<&'static str, LoadError> {
    let (words, known): (_, &[&'static str]) = match config.family {
        EncoderFamily::Bert => (
            "embeddings.word_embeddings.weight",
            &["", "bert.", "roberta.", "model."],
        ),
        EncoderFamily::ModernBert => ("embeddings.tok_embeddings.weight", &["", "model."]),
    };
    for prefix in known {
        if folder.tensor(&format!("{prefix}{words}"))?.is_some() {
            return Ok(prefix);
        }
    }
    // Errors about missing tensors use the plain name.
    Ok("")
}

/// Every tensor of an encoder, without a prefix.
pub(super) fn of_encoder(config: &EncoderConfig) -> Vec<PlannedTensor> {
    let mut plan = Plan {
        config,
        tensors: Vec::new(),
    };
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let is_bert = config.family == EncoderFamily::Bert;
    let (words, norm) = if is_bert {
        ("embeddings.word_embeddings", "embeddings.LayerNorm")
    } else {
        ("embeddings.tok_embeddings", "embeddings.norm")
    };
    plan.matrix(words, vocab, hidden, Part::Vocabulary);
    if let Positions::Absolute { table_len, .. } = config.positions {
        plan.table("embeddings.position_embeddings", table_len);
    }
    if config.num_token_types > 0 {
        plan.table("embeddings.token_type_embeddings", config.num_token_types);
    }
    plan.norm(norm);
    for layer in 0..config.num_layers {
        if is_bert {
            plan.bert_layer(layer);
        } else {
            plan.modern_layer(layer);
        }
    }
    if !is_bert {
        plan.norm("final_norm");
    }
    plan.tensors
}

struct Plan<'a> {
    config: &'a EncoderConfig,
    tensors: Vec<PlannedTensor>,
}

impl Plan<'_> {
    fn bert_layer(&mut self, layer: usize) {
        let (hidden, inner) = (self.config.hidden_size, self.config.intermediate_size);
        let name = |tail: &str| format!("encoder.layer.{layer}.{tail}");
        let attention = self.config.has_attention_bias;
        for part in ["query", "key", "value"] {
            let name = name(&format!("attention.self.{part}"));
            self.linear(&name, hidden, hidden, attention);
        }
        self.linear(&name("attention.output.dense"), hidden, hidden, attention);
        self.norm(&name("attention.output.LayerNorm"));
        let mlp = self.config.has_mlp_bias;
        self.linear(&name("intermediate.dense"), inner, hidden, mlp);
        self.linear(&name("output.dense"), hidden, inner, mlp);
        self.norm(&name("output.LayerNorm"));
    }

    fn modern_layer(&mut self, layer: usize) {
        let (hidden, inner) = (self.config.hidden_size, self.config.intermediate_size);
        let name = |tail: &str| format!("layers.{layer}.{tail}");
        if layer > 0 {
            self.norm(&name("attn_norm"));
        }
        let attention = self.config.has_attention_bias;
        self.linear(&name("attn.Wqkv"), 3 * hidden, hidden, attention);
        self.linear(&name("attn.Wo"), hidden, hidden, attention);
        self.norm(&name("mlp_norm"));
        let mlp = self.config.has_mlp_bias;
        self.linear(&name("mlp.Wi"), 2 * inner, hidden, mlp);
        self.linear(&name("mlp.Wo"), hidden, inner, mlp);
    }

    fn linear(&mut self, name: &str, rows: usize, columns: usize, has_bias: bool) {
        self.matrix(name, rows, columns, Part::Layer);
        if has_bias {
            self.push(format!("{name}.bias"), vec![rows], Role::Bias);
        }
    }

    fn matrix(&mut self, name: &str, rows: usize, columns: usize, part: Part) {
        let role = Role::Matrix(part);
        self.push(format!("{name}.weight"), vec![rows, columns], role);
    }

    /// A lookup table, whose rows stay as they are.
    fn table(&mut self, name: &str, rows: usize) {
        let shape = vec![rows, self.config.hidden_size];
        self.push(format!("{name}.weight"), shape, Role::Norm);
    }

    fn norm(&mut self, name: &str) {
        let shape = vec![self.config.hidden_size];
        self.push(format!("{name}.weight"), shape.clone(), Role::Norm);
        if self.config.has_norm_bias {
            self.push(format!("{name}.bias"), shape, Role::Norm);
        }
    }

    fn push(&mut self, name: String, shape: Vec<usize>, role: Role) {
        self.tensors.push(PlannedTensor { name, shape, role });
    }
}

/// Every tensor of a head, with its folder.
pub(super) fn of_head(head: &HeadConfig) -> Vec<(&str, PlannedTensor)> {
    let mut all = Vec::new();
    for step in &head.steps {
        let (name, folder, weight, bias) = match step {
            HeadStep::Dense {
                name,
                folder,
                in_features,
                out_features,
                has_bias,
                ..
            } => {
                let weight = vec![*out_features, *in_features];
                (name, folder, weight, has_bias.then_some(*out_features))
            }
            HeadStep::LayerNorm {
                name,
                folder,
                width,
                has_bias,
                ..
            } => (name, folder, vec![*width], has_bias.then_some(*width)),
            HeadStep::Normalize => continue,
        };
        let tensor = |tail: &str, shape| PlannedTensor {
            name: format!("{name}.{tail}"),
            shape,
            role: Role::Norm,
        };
        all.push((folder.as_str(), tensor("weight", weight)));
        if let Some(width) = bias {
            all.push((folder.as_str(), tensor("bias", vec![width])));
        }
    }
    all
}
