//! Reads [`Experts`] from a GGUF file's metadata.

use super::Metadata;
use crate::error::LoadError;
use crate::model::config::Experts;

/// The experts of a layer; `None` without experts.
pub(super) fn experts(metadata: Metadata<'_>) -> Result<Option<Experts>, LoadError> {
    let is_always = matches!(
        metadata.architecture,
        "qwen2moe" | "qwen3moe" | "olmoe" | "granitemoe"
    );
    let count = match metadata.size("expert_count")? {
        Some(count @ 1..) => count,
        Some(0) | None if is_always => return metadata.bad("expert_count", "missing"),
        Some(_) | None => return Ok(None),
    };
    if !is_always && metadata.architecture != "llama" {
        let fix = "files of llama, qwen2moe, qwen3moe, olmoe and granitemoe may have experts";
        return metadata.unsupported("expert_count", count, fix);
    }
    let shared = "expert_shared_feed_forward_length";
    let shared_size = if metadata.architecture == "qwen2moe" {
        match metadata.size(shared)? {
            Some(size) => Some(size),
            None => Some(metadata.required_size("feed_forward_length")?),
        }
    } else {
        None
    };
    let refused = ["expert_shared_count", "leading_dense_block_count", shared];
    for key in refused
        .iter()
        .filter(|key| shared_size.is_none() || **key != shared)
    {
        if let Some(value @ 1..) = metadata.size(key)? {
            return metadata.unsupported(key, value, "it must be 0");
        }
    }
    Ok(Some(Experts {
        count,
        per_token: metadata.required_size("expert_used_count")?,
        is_normalized: !matches!(metadata.architecture, "olmoe" | "qwen2moe"),
        has_router_bias: false,
        shared_size,
    }))
}

/// The width inside the feed-forward block, or inside one expert.
pub(super) fn intermediate_size(
    metadata: Metadata<'_>,
    experts: Option<Experts>,
) -> Result<usize, LoadError> {
    let whole = || metadata.required_size("feed_forward_length");
    let Some(experts) = experts else {
        return whole();
    };
    match metadata.size("expert_feed_forward_length")? {
        Some(size) => Ok(size),
        // In older files of these, the width of all experts of a token, as llama.cpp reads it.
        None if matches!(metadata.architecture, "qwen2moe" | "qwen3moe") => {
            Ok(whole()? / experts.per_token.max(1))
        }
        None => whole(),
    }
}
