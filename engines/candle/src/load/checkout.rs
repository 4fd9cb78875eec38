//! What checkouts of a family call the tensors that others call something else.

use super::place::{ExpertName, Place};

/// How a family's checkouts differ from the names that the decoder asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// They do not.
    Usual,
    /// Mixtral's: the feed-forward block is `block_sparse_moe`, and an expert's matrices have numbers.
    Mixtral,
}

impl Naming {
    /// Where a checkout has the tensor that the decoder calls `name`.
    pub(crate) fn place(self, name: &str) -> Place {
        Place::whole(match self {
            Self::Usual => name.to_owned(),
            Self::Mixtral => mixtral(name),
        })
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
    use super::*;

    #[test]
    fn names_of_mixtral_are_its_own() {
        let of = |name| Naming::Mixtral.place(name).name;
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
}
