//! The names of tensors in the checkouts of families that differ from the usual ones.

use super::place::{ExpertName, Fused, PartOf, Place, of_layer, row_order};
use crate::model::config::ModelConfig;

/// Phi-3's matrices of several projections.
const PHI3: Fused = Fused {
    qkv: "self_attn.qkv_proj",
    gate_up: "mlp.gate_up_proj",
};

/// How a family's checkouts differ from the names that the decoder uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// Not at all.
    Usual,
    /// Mixtral's: the feed-forward block is `block_sparse_moe`, and an expert's matrices have numbers.
    Mixtral,
    /// Phi-3's: projections of one input are one matrix.
    Phi3,
    /// gpt-oss's: a layer's experts share tensors, in which rows of gate and up alternate.
    GptOss,
}

impl Naming {
    /// The place in a checkout of the tensor that the decoder calls `name`.
    pub(crate) fn place(self, name: &str, config: &ModelConfig) -> Place {
        let place = match self {
            Self::Usual => Place::whole(name.to_owned()),
            Self::Mixtral => Place::whole(mixtral(name)),
            Self::Phi3 => phi3(name, config),
            Self::GptOss => gpt_oss(name, config),
        };
        Place {
            rows: row_order(name, config, false),
            ..place
        }
    }
}

fn phi3(name: &str, config: &ModelConfig) -> Place {
    let fused = of_layer(name).and_then(|(layer, module, kind)| {
        let (own, part) = PHI3.part(module, config)?;
        Some(Place {
            part: Some(part),
            ..Place::whole(format!("model.layers.{layer}.{own}.{kind}"))
        })
    });
    fused.unwrap_or_else(|| Place::whole(name.to_owned()))
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
