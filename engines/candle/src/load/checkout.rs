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

#[cfg(test)]
mod tests {
    use genset_devtools::synthetic::SyntheticSize;

    use super::*;
    use crate::load::tests::config_of;
    use crate::model::config::Experts;

    #[test]
    fn names_of_mixtral_are_its_own() {
        let config = config_of(SyntheticSize::Tiny);
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
        let config = config_of(SyntheticSize::Tiny);
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

    #[test]
    fn experts_of_gpt_oss_are_rows_of_one_tensor_in_turn() {
        let config = ModelConfig {
            experts: Some(Experts {
                count: 4,
                per_token: 2,
                is_normalized: true,
                has_router_bias: true,
            }),
            ..config_of(SyntheticSize::Tiny)
        };
        let of = |name: &str| {
            let place = Naming::GptOss.place(name, &config);
            let part = place.part.unwrap();
            (place.name, part.first, part.step, part.whole, part.shape)
        };
        let both = "model.layers.1.mlp.experts.gate_up_proj".to_owned();
        let found = of("model.layers.1.mlp.experts.3.up_proj.weight");
        let whole = vec![4, 1024, 256];
        assert_eq!(found, (both.clone(), 3073, 2, whole, vec![512, 256]));
        let found = of("model.layers.1.mlp.experts.2.gate_proj.bias");
        let bias = format!("{both}_bias");
        assert_eq!(found, (bias, 2048, 2, vec![4, 1024], vec![512]));
        let found = of("model.layers.0.mlp.experts.1.down_proj.weight");
        let down = "model.layers.0.mlp.experts.down_proj".to_owned();
        assert_eq!(found, (down, 256, 1, vec![4, 256, 512], vec![256, 512]));
        let router = Naming::GptOss.place("model.layers.0.mlp.gate.bias", &config);
        assert_eq!(
            router,
            Place::whole("model.layers.0.mlp.router.bias".into())
        );
    }
}
