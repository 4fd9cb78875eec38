//! The names in GGUF files of tensors that `transformers` names differently.

use crate::load::place::{ExpertName, Fused};

/// Tensors outside decoder blocks.
const GLOBAL: [(&str, &str); 4] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("model.norm.bias", "output_norm.bias"),
    ("lm_head.weight", "output.weight"),
];

/// The gate of the shared expert: a matrix of one row, which most files have as a vector.
pub(crate) const SHARED_GATE: &str = "mlp.shared_expert_gate";

/// Modules of a decoder block.
const MODULES: [(&str, &str); 15] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    (SHARED_GATE, "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
];

/// Matrices of several projections: phi3 files have both, glm4 files the second, which has both products of the feed-forward
/// block's input.
pub(crate) const FUSED: Fused = Fused {
    qkv: "attn_qkv",
    gate_up: "ffn_up",
};

/// Matrices of a layer's experts; one tensor has all experts.
const EXPERTS: [(&str, &str); 3] = [
    ("gate_proj", "ffn_gate_exps"),
    ("up_proj", "ffn_up_exps"),
    ("down_proj", "ffn_down_exps"),
];

/// The norm before the feed-forward block.
const ONE_NORM: [(&str, &str); 1] = [("post_attention_layernorm", "ffn_norm")];

/// Norms of blocks that also normalize outputs.
const POST_NORMS: [(&str, &str); 3] = [
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// The name in a GGUF file of the tensor that `transformers` calls `name`; `None` if there is none.
pub(crate) fn gguf_name(name: &str, has_post_norms: bool) -> Option<String> {
    if let Some((_, found)) = GLOBAL.iter().find(|(ours, _)| *ours == name) {
        return Some((*found).to_owned());
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, kind) = rest.rsplit_once('.')?;
    let norms: &[(&str, &str)] = if has_post_norms {
        &POST_NORMS
    } else {
        &ONE_NORM
    };
    let (_, found) = MODULES
        .iter()
        .chain(norms)
        .find(|(ours, _)| *ours == module)?;
    Some(format!("blk.{layer}.{found}.{kind}"))
}

/// The name of the tensor that contains an expert's matrix and those of all others.
pub(crate) fn experts_name(name: ExpertName<'_>) -> Option<String> {
    let mut known = EXPERTS.iter();
    let (_, found) = known.find(|(ours, _)| *ours == name.projection)?;
    Some(format!("blk.{}.{found}.{}", name.layer, name.kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_share_a_tensor() {
        let of = |name| experts_name(ExpertName::parse(name)?);
        assert_eq!(
            of("model.layers.2.mlp.experts.9.up_proj.weight").unwrap(),
            "blk.2.ffn_up_exps.weight"
        );
        assert_eq!(of("model.layers.2.mlp.experts.9.x.weight"), None);
        assert_eq!(
            gguf_name("model.layers.2.mlp.gate.weight", false).unwrap(),
            "blk.2.ffn_gate_inp.weight"
        );
    }

    #[test]
    fn norms_are_told_apart() {
        let of = |name, has_post_norms| gguf_name(name, has_post_norms).unwrap();
        let name = "model.layers.3.post_attention_layernorm.weight";
        assert_eq!(of(name, false), "blk.3.ffn_norm.weight");
        assert_eq!(of(name, true), "blk.3.post_attention_norm.weight");
        let name = "model.layers.12.self_attn.q_proj.bias";
        assert_eq!(of(name, false), "blk.12.attn_q.bias");
        assert_eq!(of("lm_head.weight", true), "output.weight");
        for name in ["model.layers.0.mlp.experts.weight", "model.layers.x", "x"] {
            assert_eq!(gguf_name(name, false), None);
        }
    }
}
