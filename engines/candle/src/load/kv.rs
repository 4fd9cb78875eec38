//! The size of the KV cache.

use super::memory::MemoryEstimate;
use super::weights::to_u64;
use crate::error::{Bytes, LoadError};
use crate::model::config::ModelConfig;

/// The inputs to the size of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCacheOptions {
    /// `--kv-cache-memory`: the most bytes; if unset, see [`kv_cache_size`].
    pub memory: Option<u64>,
    /// `--block-size`: tokens per KV block, > 0.
    pub block_size: usize,
    /// `--max-num-seqs`: running sequences.
    pub max_num_seqs: usize,
    /// The maximum length of a sequence.
    pub context_length: usize,
    /// Bytes per number in the cache: 2, or 4 for f32.
    pub bytes_per_value: usize,
    /// Bytes per block of the draft model's cache, which has the same number of blocks; 0 without one.
    pub more_bytes_per_block: u64,
}

/// A KV cache's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCacheSize {
    /// KV blocks; at least one.
    pub blocks: usize,
    /// Bytes per block over all layers, including the draft model's.
    pub bytes_per_block: u64,
}

impl KvCacheSize {
    /// The total size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes_per_block.saturating_mul(to_u64(self.blocks))
    }
}

/// Bytes of a KV block: keys and values of `block_size` tokens, in all layers.
#[must_use]
pub fn kv_bytes_per_block(config: &ModelConfig, block_size: usize, bytes_per_value: usize) -> u64 {
    [
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        block_size,
        bytes_per_value,
    ]
    .into_iter()
    .fold(2, |bytes: u64, factor| bytes.saturating_mul(to_u64(factor)))
}

/// Computes the number of blocks of the cache.
///
/// With `--kv-cache-memory`, as many as fit in it. Otherwise, enough for `max_num_seqs` sequences of full length, but at most
/// half of what the weights leave of `available`, or nine tenths if half does not hold one sequence. If `available` is
/// unknown, enough for one sequence of full length and at least 512 MiB.
///
/// # Errors
/// `KvCacheTooSmall`: `--kv-cache-memory` is smaller than one block. `NotEnoughMemory`: one block does not fit beside the
/// weights, or the requested memory is not available.
pub fn kv_cache_size(
    config: &ModelConfig,
    options: &KvCacheOptions,
    estimate: &MemoryEstimate,
    available: Option<u64>,
) -> Result<KvCacheSize, LoadError> {
    let bytes_per_block = kv_bytes_per_block(config, options.block_size, options.bytes_per_value)
        .saturating_add(options.more_bytes_per_block)
        .max(1);
    let per_sequence = to_u64(options.context_length.div_ceil(options.block_size.max(1)));
    let wanted = per_sequence.saturating_mul(to_u64(options.max_num_seqs.max(1)));
    let blocks = match (options.memory, available) {
        (Some(memory), _) => memory / bytes_per_block,
        (None, Some(available)) => {
            let left = available.saturating_sub(estimate.total());
            let half = left / 2 / bytes_per_block;
            let most = left.saturating_sub(left / 10) / bytes_per_block;
            wanted.min(half.max(per_sequence.min(most)))
        }
        (None, None) => per_sequence.max((512 << 20) / bytes_per_block),
    };
    // Block tables have 32-bit block numbers.
    let blocks = blocks.min(u64::from(u32::MAX - 1));
    let size = KvCacheSize {
        blocks: usize::try_from(blocks).unwrap_or(usize::MAX),
        bytes_per_block,
    };
    if blocks == 0 {
        return Err(too_small(options, estimate, available, bytes_per_block));
    }
    if let Some(available) = available {
        estimate.check(size.bytes(), available)?;
    }
    Ok(size)
}

/// The error if not even one block fits.
fn too_small(
    options: &KvCacheOptions,
    estimate: &MemoryEstimate,
    available: Option<u64>,
    bytes_per_block: u64,
) -> LoadError {
    if let Some(memory) = options.memory {
        return LoadError::KvCacheTooSmall {
            memory,
            block: bytes_per_block,
            block_size: options.block_size,
        };
    }
    let available = available.unwrap_or(0);
    match estimate.check(bytes_per_block, available) {
        Err(error) => error,
        Ok(()) => LoadError::NotEnoughMemory {
            estimate: format!(
                "the weights leave no room for one KV block of {}",
                Bytes(bytes_per_block)
            ),
            available,
            fix: "set --kv-cache-memory, or take a smaller model".into(),
        },
    }
}
