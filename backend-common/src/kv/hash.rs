//! Hashes of KV blocks.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::request::TokenId;

/// The hash of a KV block and of everything before it: equal hashes mean equal prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash(pub u64);

/// How an engine hashes its blocks. Engines with a scheme of their own implement it, so that routers hash alike.
pub trait BlockHasher: Send + Sync {
    /// The hash of a block of `tokens` that follows the block `parent`, or starts the sequence.
    fn hash_block(&self, parent: Option<BlockHash>, tokens: &[TokenId]) -> BlockHash;
}

/// The default scheme: XXH3-64 over the parent's hash and the tokens, all little-endian.
///
/// The salt keeps sequences apart that share tokens but not KV blocks: adapters, tenants.
///
/// # Source
/// <https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>
#[derive(Debug, Clone, Default)]
pub struct Xxh3BlockHasher {
    seed: u64,
}

impl Xxh3BlockHasher {
    /// A hasher for sequences of the base model.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A hasher whose hashes never equal those of another salt.
    #[must_use]
    pub fn with_salt(salt: &str) -> Self {
        Self {
            seed: xxhash_rust::xxh3::xxh3_64(salt.as_bytes()),
        }
    }
}

impl BlockHasher for Xxh3BlockHasher {
    fn hash_block(&self, parent: Option<BlockHash>, tokens: &[TokenId]) -> BlockHash {
        let mut state = Xxh3::with_seed(self.seed);
        if let Some(BlockHash(parent)) = parent {
            state.update(&parent.to_le_bytes());
        }
        for token in tokens {
            state.update(&token.to_le_bytes());
        }
        BlockHash(state.digest())
    }
}

/// The hashes of the full blocks of a sequence, in order; tokens past the last full block have none.
///
/// `block_size`: tokens per KV block.
///
/// # Examples
/// ```
/// use std::num::NonZeroU32;
/// use genset_backend_common::kv::{Xxh3BlockHasher, hash_blocks};
///
/// let size = NonZeroU32::new(2).unwrap();
/// let hasher = Xxh3BlockHasher::new();
/// let short = hash_blocks(&hasher, &[1, 2, 3], size);
/// let long = hash_blocks(&hasher, &[1, 2, 9, 9], size);
/// assert_eq!((short.len(), long.len()), (1, 2));
/// assert_eq!(short[0], long[0]);
/// ```
#[must_use]
pub fn hash_blocks(
    hasher: &dyn BlockHasher,
    tokens: &[TokenId],
    block_size: NonZeroU32,
) -> Vec<BlockHash> {
    let size = usize::try_from(block_size.get()).unwrap_or(usize::MAX);
    let mut parent = None;
    tokens
        .chunks_exact(size)
        .map(|block| {
            let hash = hasher.hash_block(parent, block);
            parent = Some(hash);
            hash
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: NonZeroU32 = NonZeroU32::new(2).unwrap();

    /// Recorded values: a change of the scheme must be a decision, since fleets of mixed versions share hashes.
    #[test]
    fn the_scheme_is_frozen() {
        let hashes = hash_blocks(&Xxh3BlockHasher::new(), &[1, 2, 3, 4], TWO);
        let mut bytes = vec![1, 0, 0, 0, 2, 0, 0, 0];
        let first = xxhash_rust::xxh3::xxh3_64(&bytes);
        bytes = first
            .to_le_bytes()
            .into_iter()
            .chain([3, 0, 0, 0, 4, 0, 0, 0])
            .collect();
        assert_eq!(
            hashes,
            [
                BlockHash(first),
                BlockHash(xxhash_rust::xxh3::xxh3_64(&bytes))
            ]
        );
    }

    #[test]
    fn the_parent_and_the_salt_both_count() {
        let plain = Xxh3BlockHasher::new();
        let salted = Xxh3BlockHasher::with_salt("adapter-a");
        let tokens = [5, 5, 5, 5];
        let hashes = hash_blocks(&plain, &tokens, TWO);
        assert_ne!(hashes[0], hashes[1]);
        assert_ne!(hashes, hash_blocks(&salted, &tokens, TWO));
    }
}
