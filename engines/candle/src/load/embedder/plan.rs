//! All tensors that the configurations of an encoder and a head require.

use crate::error::LoadError;
use crate::load::TensorFiles;
use crate::load::plan::{Plan, PlannedTensor};
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
    let mut all = Plan::default();
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let is_bert = config.family == EncoderFamily::Bert;
    let (words, embedding_norm) = if is_bert {
        ("embeddings.word_embeddings", "embeddings.LayerNorm")
    } else {
        ("embeddings.tok_embeddings", "embeddings.norm")
    };
    all.matrix(words, vocab, hidden, Part::Vocabulary);
    // Lookup tables, whose rows stay as they are.
    if let Positions::Absolute { table_len, .. } = config.positions {
        let name = "embeddings.position_embeddings.weight".to_owned();
        all.push(name, vec![table_len, hidden], None);
    }
    if config.num_token_types > 0 {
        let name = "embeddings.token_type_embeddings.weight".to_owned();
        all.push(name, vec![config.num_token_types, hidden], None);
    }
    norm(&mut all, embedding_norm, config);
    for layer in 0..config.num_layers {
        if is_bert {
            bert_layer(&mut all, layer, config);
        } else {
            modern_layer(&mut all, layer, config);
        }
    }
    if !is_bert {
        norm(&mut all, "final_norm", config);
    }
    all.0
}

fn bert_layer(all: &mut Plan, layer: usize, config: &EncoderConfig) {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let name = |tail: &str| format!("encoder.layer.{layer}.{tail}");
    let attention = config.has_attention_bias;
    for part in ["query", "key", "value"] {
        let name = name(&format!("attention.self.{part}"));
        all.linear(&name, hidden, hidden, attention);
    }
    all.linear(&name("attention.output.dense"), hidden, hidden, attention);
    norm(all, &name("attention.output.LayerNorm"), config);
    let mlp = config.has_mlp_bias;
    all.linear(&name("intermediate.dense"), inner, hidden, mlp);
    all.linear(&name("output.dense"), hidden, inner, mlp);
    norm(all, &name("output.LayerNorm"), config);
}

fn modern_layer(all: &mut Plan, layer: usize, config: &EncoderConfig) {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let name = |tail: &str| format!("layers.{layer}.{tail}");
    if layer > 0 {
        norm(all, &name("attn_norm"), config);
    }
    let attention = config.has_attention_bias;
    all.linear(&name("attn.Wqkv"), 3 * hidden, hidden, attention);
    all.linear(&name("attn.Wo"), hidden, hidden, attention);
    norm(all, &name("mlp_norm"), config);
    let mlp = config.has_mlp_bias;
    all.linear(&name("mlp.Wi"), 2 * inner, hidden, mlp);
    all.linear(&name("mlp.Wo"), hidden, inner, mlp);
}

fn norm(all: &mut Plan, name: &str, config: &EncoderConfig) {
    all.push(format!("{name}.weight"), vec![config.hidden_size], None);
    if config.has_norm_bias {
        all.push(format!("{name}.bias"), vec![config.hidden_size], None);
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
            matrix: None,
        };
        all.push((folder.as_str(), tensor("weight", weight)));
        if let Some(width) = bias {
            all.push((folder.as_str(), tensor("bias", vec![width])));
        }
    }
    all
}
