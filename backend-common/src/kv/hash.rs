//! Hashes of KV blocks.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::request::TokenId;

/// The hash of a KV block and all blocks before it: equal hashes mean equal prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash(pub u64);

/// Hashes a block of `tokens` that follows the block `parent` or starts the sequence: XXH3-64 over the parent's hash and the
/// tokens, all little-endian. Routers match only these hashes, so an engine must publish them, whatever it uses internally.
///
/// # Source
/// <https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>
#[must_use]
pub fn hash_block(parent: Option<BlockHash>, tokens: &[TokenId]) -> BlockHash {
    if tokens.len() <= SHORT_BLOCK {
        return hash_short_block(parent, tokens);
    }
    let mut state = Xxh3::new();
    if let Some(BlockHash(parent)) = parent {
        state.update(&parent.to_le_bytes());
    }
    for token in tokens {
        state.update(&token.to_le_bytes());
    }
    BlockHash(state.digest())
}

/// The most tokens of a block that is hashed at once: blocks of engines rarely have more.
const SHORT_BLOCK: usize = 64;

/// Hashes a block of at most [`SHORT_BLOCK`] tokens: one call costs much less than one for each token.
fn hash_short_block(parent: Option<BlockHash>, tokens: &[TokenId]) -> BlockHash {
    let mut bytes = [0_u8; 8 + 4 * SHORT_BLOCK];
    let mut len = 0;
    if let Some(BlockHash(parent)) = parent {
        bytes[..8].copy_from_slice(&parent.to_le_bytes());
        len = 8;
    }
    for (place, token) in bytes[len..].chunks_exact_mut(4).zip(tokens) {
        place.copy_from_slice(&token.to_le_bytes());
    }
    len += 4 * tokens.len();
    BlockHash(xxh3_64(&bytes[..len]))
}

/// Returns the parent hash for the first block of a salted sequence
/// ([`GenerateRequest::cache_salt`](crate::GenerateRequest::cache_salt)), with a seed that blocks do not use. Later blocks depend
/// on the salt through the first one.
#[must_use]
pub fn salt_root(salt: &str) -> BlockHash {
    BlockHash(xxhash_rust::xxh3::xxh3_64_with_seed(
        salt.as_bytes(),
        SALT_SEED,
    ))
}

/// "genset" in ASCII: any number except 0, the seed of block hashes.
const SALT_SEED: u64 = 0x6765_6e73_6574;

/// Returns the parent hash for the first block of a sequence: `None` without salt and adapter, [`salt_root`] without an adapter.
/// Keys and values depend on the adapter ([`GenerateRequest::adapter`](crate::GenerateRequest::adapter)), so sequences share
/// blocks only if they use the same adapter, or none.
///
/// # Examples
/// ```
/// use genset_backend_common::kv::{salt_root, sequence_root};
///
/// assert_eq!(sequence_root(None, None), None);
/// assert_eq!(sequence_root(Some("tenant"), None), Some(salt_root("tenant")));
/// assert_ne!(sequence_root(None, Some("french")), sequence_root(Some("french"), None));
/// ```
#[must_use]
pub fn sequence_root(salt: Option<&str>, adapter: Option<&str>) -> Option<BlockHash> {
    let salt = salt.map(salt_root);
    let Some(adapter) = adapter else {
        return salt;
    };
    let mut state = Xxh3::with_seed(ADAPTER_SEED);
    // Hashed first, so that an adapter's name cannot be confused with a salt.
    state.update(&[u8::from(salt.is_some())]);
    if let Some(BlockHash(salt)) = salt {
        state.update(&salt.to_le_bytes());
    }
    state.update(adapter.as_bytes());
    Some(BlockHash(state.digest()))
}

/// "adapter" in ASCII: any number except 0 and [`SALT_SEED`].
const ADAPTER_SEED: u64 = 0x0061_6461_7074_6572;

/// Hashes the full blocks of a sequence, in order; a partial last block is ignored.
///
/// `root`: the parent of the first block ([`sequence_root`]); `block_size`: tokens per KV block.
///
/// # Examples
/// ```
/// use std::num::NonZeroU32;
/// use genset_backend_common::kv::{hash_blocks, sequence_root};
///
/// let size = NonZeroU32::new(2).unwrap();
/// let short = hash_blocks(None, &[1, 2, 3], size);
/// let long = hash_blocks(None, &[1, 2, 9, 9], size);
/// let anothers = hash_blocks(sequence_root(Some("tenant"), None), &[1, 2, 9, 9], size);
/// assert_eq!((short.len(), long.len()), (1, 2));
/// assert_eq!(short[0], long[0]);
/// assert!(anothers[0] != long[0] && anothers[1] != long[1]);
/// ```
#[must_use]
pub fn hash_blocks(
    root: Option<BlockHash>,
    tokens: &[TokenId],
    block_size: NonZeroU32,
) -> Vec<BlockHash> {
    let size = usize::try_from(block_size.get()).unwrap_or(usize::MAX);
    let mut parent = root;
    tokens
        .chunks_exact(size)
        .map(|block| {
            let hash = hash_block(parent, block);
            parent = Some(hash);
            hash
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: NonZeroU32 = NonZeroU32::new(2).unwrap();

    /// Recorded values: fleets of mixed versions share hashes, so a change of the scheme must be deliberate.
    #[test]
    fn the_scheme_is_frozen() {
        let hashes = hash_blocks(None, &[1, 2, 3, 4], TWO);
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
        let root = xxhash_rust::xxh3::xxh3_64_with_seed(b"a", 0x6765_6e73_6574);
        let salted = hash_blocks(Some(salt_root("a")), &[1, 2], TWO);
        let bytes: Vec<u8> = root
            .to_le_bytes()
            .into_iter()
            .chain([1, 0, 0, 0, 2, 0, 0, 0])
            .collect();
        assert_eq!(salted, [BlockHash(xxhash_rust::xxh3::xxh3_64(&bytes))]);
        let seeded = |bytes: &[u8]| {
            let hash = xxhash_rust::xxh3::xxh3_64_with_seed(bytes, 0x0061_6461_7074_6572);
            Some(BlockHash(hash))
        };
        assert_eq!(sequence_root(None, Some("a")), seeded(b"\0a"));
        let both = [&[1], root.to_le_bytes().as_slice(), b"b"].concat();
        assert_eq!(sequence_root(Some("a"), Some("b")), seeded(&both));
    }

    #[test]
    fn a_block_of_any_length_has_the_hash_of_its_bytes() {
        let numbers = |count: u32| (1..=count).map(|number| number.wrapping_mul(0x9E37_79B9));
        for count in [0, 1, 16, 63, 64, 65, 200] {
            for parent in [None, Some(BlockHash(0x0123_4567_89AB_CDEF))] {
                let tokens: Vec<TokenId> = numbers(count).collect();
                let parents = parent.into_iter().flat_map(|hash| hash.0.to_le_bytes());
                let tokens_bytes = numbers(count).flat_map(u32::to_le_bytes);
                let bytes: Vec<u8> = parents.chain(tokens_bytes).collect();
                assert_eq!(hash_block(parent, &tokens), BlockHash(xxh3_64(&bytes)));
            }
        }
    }

    #[test]
    fn the_parent_the_salt_and_the_adapter_all_count() {
        let hashes = |salt, adapter| {
            let root = sequence_root(salt, adapter);
            hash_blocks(root, &[5, 5, 5, 5], TWO)
        };
        let words = [None, Some(""), Some("a"), Some("b")];
        let pairs = words.map(|salt| words.map(|adapter| hashes(salt, adapter)));
        let all: Vec<BlockHash> = pairs.into_iter().flatten().flatten().collect();
        let different: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(different.len(), 32, "{all:?}");
        assert_eq!(hashes(Some("a"), Some("b")), hashes(Some("a"), Some("b")));
    }
}
