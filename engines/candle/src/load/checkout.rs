//! What checkouts of a family call the tensors that others call something else.

use super::place::{ExpertName, Fused, Place, of_layer, row_order};
use crate::model::config::ModelConfig;

/// Phi-3's matrices of several projections.
const PHI3: Fused = Fused {
    qkv: "self_attn.qkv_proj",
    gate_up: "mlp.gate_up_proj",
};

/// How a family's checkouts differ from the names that the decoder asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// They do not.
    Usual,
    /// Mixtral's: the feed-forward block is `block_sparse_moe`, and an expert's matrices have numbers.
    Mixtral,
    /// Phi-3's: projections of one input are one matrix.
    Phi3,
}

impl Naming {
    /// Where a checkout has the tensor that the decoder calls `name`.
    pub(crate) fn place(self, name: &str, config: &ModelConfig) -> Place {
        let place = match self {
            Self::Usual => Place::whole(name.to_owned()),
            Self::Mixtral => Place::whole(mixtral(name)),
            Self::Phi3 => phi3(name, config),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::SyntheticSize;

    #[test]
    fn names_of_mixtral_are_its_own() {
        let config = SyntheticSize::Tiny.config();
        let of = |name| Naming::Mixtral.place(name, &config).name;
        assert_eq!(
            of("model.layers.3.mlp.experts.5.down_proj.weight"),
            "model.layers.3.block_sparse_moe.experts.5.w2.weight"
        );
        assert_eq!(
            of("model.layers.3.mlp.gate.weight"),
            "model.layers.3.block_sparse_moe.gate.weight"
        );
        let usual = "model.layers.3.self_attn.q_proj.weight";
        assert_eq!(of(usual), usual);
    }

    #[test]
    fn projections_of_phi_3_are_rows_of_one_matrix() {
        // 4 and 2 heads of 64, and 512 within the feed-forward block.
        let config = SyntheticSize::Tiny.config();
        let of = |name: &str| {
            let place = Naming::Phi3.place(name, &config);
            (place.name, place.part.map(|part| (part.first, part.whole)))
        };
        let qkv = || "model.layers.1.self_attn.qkv_proj.weight".to_owned();
        for (name, first) in [("q", 0), ("k", 256), ("v", 384)] {
            let found = of(&format!("model.layers.1.self_attn.{name}_proj.weight"));
            assert_eq!(found, (qkv(), Some((first, vec![512, 256]))));
        }
        let up = "model.layers.0.mlp.gate_up_proj.weight".to_owned();
        assert_eq!(
            of("model.layers.0.mlp.up_proj.weight"),
            (up, Some((512, vec![1024, 256])))
        );
        let down = "model.layers.0.mlp.down_proj.weight";
        assert_eq!(of(down), (down.to_owned(), None));
    }
}
