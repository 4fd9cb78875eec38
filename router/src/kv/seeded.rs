//! [`Seeded`]: the hasher of maps by block hash.
//!
//! A block hash is a hash already, but clients choose tokens, and so could choose blocks whose hashes share the bits that a map
//! looks at. With a seed that nobody else knows they cannot, and it costs much less than the standard hasher.

use std::hash::{BuildHasher, Hasher, RandomState};

use genset_backend_common::random::mix;

/// A random seed: each default has another.
#[derive(Debug, Clone)]
pub(super) struct Seeded(u64);

impl Default for Seeded {
    fn default() -> Self {
        Self(RandomState::new().hash_one(0))
    }
}

impl BuildHasher for Seeded {
    type Hasher = Mixed;

    fn build_hasher(&self) -> Mixed {
        Mixed(self.0)
    }
}

/// The seed, mixed with what was hashed.
#[derive(Debug)]
pub(super) struct Mixed(u64);

impl Hasher for Mixed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0 ^ value);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use genset_backend_common::kv::BlockHash;

    use super::*;

    #[test]
    fn a_block_has_another_hash_with_each_seed() {
        let [one, other] = [Seeded::default(), Seeded::default()];
        let block = BlockHash(1);
        assert_eq!(one.hash_one(block), one.clone().hash_one(block));
        assert_ne!(one.hash_one(block), other.hash_one(block));
    }

    /// A map looks at the lowest bits and at the highest.
    #[test]
    fn blocks_that_share_the_bits_of_a_map_do_not_share_them_when_hashed() {
        let seeded = Seeded::default();
        let chosen: [fn(u64) -> BlockHash; 2] = [|n| BlockHash(n << 58), BlockHash];
        let looked_at: [fn(u64) -> u64; 2] = [|hash| hash % 64, |hash| hash >> 58];
        for (block, bits) in chosen.into_iter().zip(looked_at) {
            assert!((0..64).all(|n| bits(block(n).0) == 0));
            let hashed = (0..64).map(|n| bits(seeded.hash_one(block(n))));
            let different = hashed.collect::<BTreeSet<u64>>().len();
            // Of 64 random ones, 40 differ.
            assert!(different > 20, "{different}");
        }
    }
}
