//! The names of tensors in the checkouts of families that differ from the usual ones.

use super::place::{ExpertName, Fused, PartOf, Place, of_layer, row_order};
use crate::model::config::ModelConfig;

/// The matrices of several projections: Phi-3 has both, GLM the second.
const FUSED: Fused = Fused {
    qkv: "self_attn.qkv_proj",
    gate_up: "mlp.gate_up_proj",
};

/// The matrix of both products of the feed-forward block's input in Granite 4.
const GRANITE4: Fused = Fused {
    qkv: FUSED.qkv,
    gate_up: "shared_mlp.input_linear",
};

/// The norms of GLM-4: the decoder's names, and its own.
const GLM4_NORMS: [(&str, &str); 3] = [
    ("post_attention_layernorm", "post_self_attn_layernorm"),
    ("pre_feedforward_layernorm", "post_attention_layernorm"),
    ("post_feedforward_layernorm", "post_mlp_layernorm"),
];

/// How a family's checkouts differ from the names that the decoder uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// Not at all.
    Usual,
    /// Mixtral's: the feed-forward block is `block_sparse_moe`, and an expert's matrices have numbers.
    Mixtral,
    /// Phi-3's: projections of one input are one matrix.
    Phi3,
    /// GLM's: both products of the feed-forward block's input are one matrix, and GLM-4 has other names of norms.
    Glm,
    /// Granite 4's: the feed-forward block is called as the shared expert of its models with experts.
    Granite4,
    /// Granite's with experts: a layer's experts share tensors, in which the rows of gate come before those of up.
    GraniteMoe,
    /// Hunyuan's: the norms of queries and keys are layer norms by name.
    Hunyuan,
    /// StarCoder2's: the matrices of the feed-forward block are called as those of GPT-2.
    Starcoder2,
    /// gpt-oss's: a layer's experts share tensors, in which rows of gate and up alternate.
    GptOss,
}

impl Naming {
    /// The place in a checkout of the tensor that the decoder calls `name`.
    pub(crate) fn place(self, name: &str, config: &ModelConfig) -> Place {
        let place = match self {
            Self::Usual => Place::whole(name.to_owned()),
            Self::Mixtral => Place::whole(mixtral(name)),
            Self::Phi3 => {
                fused(name, config, FUSED).unwrap_or_else(|| Place::whole(name.to_owned()))
            }
            Self::Glm => glm(name, config),
            Self::Granite4 => granite4(name, config),
            Self::GraniteMoe => granite_moe(name, config),
            Self::Hunyuan => Place::whole(
                name.replace(".q_norm.", ".query_layernorm.")
                    .replace(".k_norm.", ".key_layernorm."),
            ),
            Self::Starcoder2 => Place::whole(
                name.replace(".mlp.up_proj.", ".mlp.c_fc.")
                    .replace(".mlp.down_proj.", ".mlp.c_proj."),
            ),
            Self::GptOss => gpt_oss(name, config),
        };
        Place {
            rows: row_order(name, config, false),
            ..place
        }
    }
}

/// The place of a projection in the matrix of several; `None` for other tensors.
fn fused(name: &str, config: &ModelConfig, names: Fused) -> Option<Place> {
    let (layer, module, kind) = of_layer(name)?;
    let (own, part) = names.part(module, config)?;
    Some(Place {
        part: Some(part),
        ..Place::whole(format!("model.layers.{layer}.{own}.{kind}"))
    })
}

/// As [`fused`], for the feed-forward block only.
fn fused_gate_up(name: &str, config: &ModelConfig, names: Fused) -> Option<Place> {
    fused(name, config, names).filter(|_| name.contains(".mlp."))
}

fn granite4(name: &str, config: &ModelConfig) -> Place {
    fused_gate_up(name, config, GRANITE4).unwrap_or_else(|| {
        Place::whole(name.replace(".mlp.down_proj.", ".shared_mlp.output_linear."))
    })
}

fn granite_moe(name: &str, config: &ModelConfig) -> Place {
    const BLOCK: &str = "block_sparse_moe";
    let (Some(expert), Some(experts)) = (ExpertName::parse(name), config.experts) else {
        return Place::whole(name.replace(".mlp.gate.", &format!(".{BLOCK}.router.layer.")));
    };
    let (hidden, wide) = (config.hidden_size, config.intermediate_size);
    let input = ("input_linear", [2 * wide, hidden]);
    let ((own, [rows, columns]), first, own_rows) = match expert.projection {
        "gate_proj" => (input, 0, wide),
        "up_proj" => (input, wide, wide),
        _ => (("output_linear", [hidden, wide]), 0, hidden),
    };
    let part = PartOf {
        whole: vec![experts.count, rows, columns],
        first: expert.expert.saturating_mul(rows).saturating_add(first),
        shape: vec![own_rows, columns],
        step: 1,
    };
    let (layer, kind) = (expert.layer, expert.kind);
    Place {
        part: Some(part),
        ..Place::whole(format!("model.layers.{layer}.{BLOCK}.{own}.{kind}"))
    }
}

fn glm(name: &str, config: &ModelConfig) -> Place {
    if let Some(place) = fused_gate_up(name, config, FUSED) {
        return place;
    }
    let renamed = of_layer(name).and_then(|(layer, module, kind)| {
        let mut known = GLM4_NORMS.iter();
        let (_, own) = known.find(|(ours, _)| *ours == module)?;
        Some(format!("model.layers.{layer}.{own}.{kind}"))
    });
    let renamed = renamed.filter(|_| config.block_norms.has_outputs());
    Place::whole(renamed.unwrap_or_else(|| name.to_owned()))
}

fn gpt_oss(name: &str, config: &ModelConfig) -> Place {
    let (Some(expert), Some(experts)) = (ExpertName::parse(name), config.experts) else {
        return Place::whole(name.replace(".mlp.gate.", ".mlp.router."));
    };
    let (hidden, wide) = (config.hidden_size, config.intermediate_size);
    let (own, [rows, columns], first, step) = match expert.projection {
        "gate_proj" => ("gate_up_proj", [2 * wide, hidden], 0, 2),
        "up_proj" => ("gate_up_proj", [2 * wide, hidden], 1, 2),
        other => (other, [hidden, wide], 0, 1),
    };
    let (kind, whole, shape) = if expert.kind == "bias" {
        ("_bias", vec![experts.count, rows], vec![rows / step])
    } else {
        let whole = vec![experts.count, rows, columns];
        ("", whole, vec![rows / step, columns])
    };
    let part = PartOf {
        whole,
        first: expert.expert.saturating_mul(rows).saturating_add(first),
        shape,
        step,
    };
    Place {
        part: Some(part),
        ..Place::whole(format!(
            "model.layers.{}.mlp.experts.{own}{kind}",
            expert.layer
        ))
    }
}

fn mixtral(name: &str) -> String {
    const BLOCK: &str = "block_sparse_moe";
    let Some(expert) = ExpertName::parse(name) else {
        return name.replace(".mlp.gate.", &format!(".{BLOCK}.gate."));
    };
    let matrix = match expert.projection {
        "gate_proj" => "w1",
        "down_proj" => "w2",
        "up_proj" => "w3",
        other => other,
    };
    let (layer, number, kind) = (expert.layer, expert.expert, expert.kind);
    format!("model.layers.{layer}.{BLOCK}.experts.{number}.{matrix}.{kind}")
}
