//! [`KnownWords`]: a cache of the tokens of words, in bounded memory.
//!
//! Language repeats its words, so most words of a prompt were seen in another. The library caches words too, but keeps the first
//! ten thousand for ever and returns a copy of each token's text. This cache keeps the newest: it has two halves, and when the
//! newer half is full, it drops the older one.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};

use parking_lot::RwLock;

/// Longer words rarely occur again.
pub(super) const MAX_WORD_BYTES: usize = 64;

/// The number of locks: more locks mean less waiting between threads that look for different words.
const SHARDS: usize = 16;

/// The overhead of an entry besides its word and tokens: its slot in a half-empty map, and the allocator's overhead.
const ENTRY_BYTES: usize = 128;

/// Words with their tokens. A shard's lock is held for one map operation.
pub(super) struct KnownWords {
    /// It is seeded for this cache alone, so that clients cannot search for words with colliding hashes.
    hasher: RandomState,
    shards: [RwLock<Shard>; SHARDS],
    /// The limit for the newer words of a shard.
    max_bytes: usize,
}

#[derive(Default)]
struct Shard {
    newer: ByHash,
    older: ByHash,
    newer_bytes: usize,
}

/// Words by hash.
type ByHash = HashMap<u64, KnownWord, BuildHasherDefault<Hashed>>;

struct KnownWord {
    word: Box<str>,
    ids: Box<[u32]>,
}

/// A hasher for keys that are hashes already.
#[derive(Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

impl KnownWords {
    /// A cache of up to `max_bytes`.
    pub(super) fn new(max_bytes: usize) -> Self {
        Self {
            hasher: RandomState::new(),
            shards: Default::default(),
            max_bytes: max_bytes / SHARDS / 2,
        }
    }

    /// Returns the result of `take` for the tokens of `word`, if they are known.
    pub(super) fn with<T>(&self, word: &str, take: impl FnOnce(&[u32]) -> T) -> Option<T> {
        let hash = self.hasher.hash_one(word);
        let shard = self.shard(hash).read();
        let known = shard.newer.get(&hash).or_else(|| shard.older.get(&hash))?;
        // Another word may have the same hash.
        (*known.word == *word).then(|| take(&known.ids))
    }

    /// Caches the tokens of `word`.
    pub(super) fn insert(&self, word: &str, ids: &[u32]) {
        let hash = self.hasher.hash_one(word);
        let bytes = ENTRY_BYTES + word.len() + size_of_val(ids);
        let known = KnownWord {
            word: word.into(),
            ids: ids.into(),
        };
        let mut shard = self.shard(hash).write();
        if shard.newer_bytes + bytes > self.max_bytes {
            shard.newer_bytes = 0;
            let full = std::mem::take(&mut shard.newer);
            let gone = std::mem::replace(&mut shard.older, full);
            drop(shard);
            // Freed outside the lock.
            drop(gone);
            shard = self.shard(hash).write();
        }
        // Two threads may insert the same word, which then counts twice until its half is dropped.
        shard.newer_bytes += bytes;
        shard.newer.insert(hash, known);
    }

    fn shard(&self, hash: u64) -> &RwLock<Shard> {
        // The map uses the lowest and the highest bits.
        &self.shards[(hash >> 32) as usize % SHARDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(words: &KnownWords, word: &str) -> Option<Vec<u32>> {
        words.with(word, <[u32]>::to_vec)
    }

    fn kept(words: &KnownWords) -> usize {
        let bytes = |known: &KnownWord| ENTRY_BYTES + known.word.len() + size_of_val(&*known.ids);
        let shard = |shard: &RwLock<Shard>| -> usize {
            let shard = shard.read();
            shard
                .newer
                .values()
                .chain(shard.older.values())
                .map(bytes)
                .sum()
        };
        words.shards.iter().map(shard).sum()
    }

    #[test]
    fn a_word_has_its_own_tokens() {
        let words = KnownWords::new(1 << 20);
        for (id, word) in (0..).zip(["a", "b", " a", ""]) {
            words.insert(word, &[id, id + 1]);
        }
        for (id, word) in (0..).zip(["a", "b", " a", ""]) {
            assert_eq!(ids(&words, word), Some(vec![id, id + 1]));
        }
        assert_eq!(ids(&words, "c"), None);
    }

    #[test]
    fn words_that_share_a_hash_never_get_each_others_tokens() {
        let words = KnownWords::new(1 << 20);
        words.insert("a", &[1]);
        let hash = words.hasher.hash_one("a");
        let mut shard = words.shard(hash).write();
        shard.newer.get_mut(&hash).unwrap().word = "b".into();
        drop(shard);
        assert_eq!(ids(&words, "a"), None);
    }

    #[test]
    fn memory_stays_bounded_and_the_newest_stay() {
        let max_bytes = 64 << 10;
        let words = KnownWords::new(max_bytes);
        for index in 0..20_000_u32 {
            words.insert(&format!("word {index}"), &[index; 3]);
            if index % 100 == 0 {
                assert!(kept(&words) <= max_bytes, "{index}");
            }
        }
        assert!(kept(&words) > max_bytes / 4);
        assert_eq!(ids(&words, "word 19999"), Some(vec![19_999; 3]));
        assert_eq!(ids(&words, "word 0"), None);
    }

    /// An entry larger than its half is kept until the next one arrives: at most one for each lock.
    #[test]
    fn no_memory_keeps_nothing_for_long() {
        let words = KnownWords::new(0);
        for index in 0..1000_u32 {
            words.insert(&format!("word {index}"), &[index]);
        }
        assert!(kept(&words) <= 2 * SHARDS * (ENTRY_BYTES + 12));
    }
}
