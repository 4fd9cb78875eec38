//! Reads [`Experts`] from the keys of a `config.json`.

use super::Source;
use super::family::Family;
use crate::error::LoadError;
use crate::model::config::Experts;

/// More experts per layer than any model has.
const MAX_EXPERTS: usize = 1 << 10;
/// More experts over all layers than any model has; each has three matrices.
const MAX_IN_ALL: usize = 1 << 17;

impl Source<'_> {
    /// The experts of the family's layers; `None` for families without experts.
    pub(super) fn experts(&self) -> Result<Option<Experts>, LoadError> {
        let raw = &self.raw;
        let Some((count, per_token)) = self.family.facts().experts else {
            return Ok(None);
        };
        self.refuse_mixed_layers()?;
        Ok(Some(Experts {
            count: raw.num_experts.or(raw.num_local_experts).unwrap_or(count),
            per_token: raw.num_experts_per_tok.unwrap_or(per_token),
            is_normalized: raw.norm_topk_prob.unwrap_or(false)
                || !matches!(
                    self.family,
                    Family::Qwen2Moe | Family::Qwen3Moe | Family::Olmoe
                ),
            has_router_bias: self.family == Family::GptOss,
            shared_size: (self.family == Family::Qwen2Moe)
                .then(|| raw.shared_expert_intermediate_size.unwrap_or(5632)),
        }))
    }

    /// Rejects models in which only some layers have experts.
    fn refuse_mixed_layers(&self) -> Result<(), LoadError> {
        let raw = &self.raw;
        if let Some(step) = raw.decoder_sparse_step.filter(|step| *step != 1) {
            return self.unsupported(
                "decoder_sparse_step",
                step,
                "it must be 1: experts in every layer",
            );
        }
        if let Some([first, ..]) = raw.mlp_only_layers.as_deref() {
            let fix = "it must be empty: experts in every layer";
            return self.unsupported("mlp_only_layers", format!("[{first}, ...]"), fix);
        }
        Ok(())
    }
}

/// What is wrong with the numbers of experts, and with which one; `None` if they are valid.
pub(super) fn problem(experts: Experts, num_layers: usize) -> Option<(&'static str, String)> {
    let Experts {
        count, per_token, ..
    } = experts;
    if count == 0 || count > MAX_EXPERTS {
        let problem = format!("is {count}; it must be 1 to {MAX_EXPERTS}");
        return Some(("number of experts", problem));
    }
    if count.saturating_mul(num_layers) > MAX_IN_ALL {
        let problem = format!("is {count} in each of {num_layers} layers, which no model has");
        return Some(("number of experts", problem));
    }
    if let Some(size) = experts
        .shared_size
        .filter(|size| *size == 0 || *size > 1 << 20)
    {
        return Some(("size of the shared expert", format!("is {size}")));
    }
    (per_token == 0 || per_token > count).then(|| {
        let problem = format!("is {per_token}; it must be 1 to {count}, the number of experts");
        ("number of experts of a token", problem)
    })
}
