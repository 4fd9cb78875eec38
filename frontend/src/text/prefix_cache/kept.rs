//! [`KeptWindows`]: a cache of texts with their tokens, in bounded memory. Drops the least recently used first.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use parking_lot::Mutex;

/// The overhead of an entry besides its text and tokens: its slots in two maps, and the allocator's overhead.
const ENTRY_BYTES: usize = 192;

/// One text may take at most this fraction (one in `LARGEST_SHARE`) of the memory: a huge prompt must not evict all others.
const LARGEST_SHARE: usize = 4;

/// A text and its tokens.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Known {
    text: Box<str>,
    /// All tokens, including those of both borders.
    pub(super) ids: Box<[u32]>,
}

impl Known {
    fn bytes(&self) -> usize {
        self.text.len() + size_of_val(&*self.ids) + ENTRY_BYTES
    }
}

/// Texts with their tokens. The lock is held for one map operation, not while texts are hashed, compared or freed.
pub(super) struct KeptWindows<S = RandomState> {
    /// It is seeded for this cache alone, so that clients cannot search for texts with colliding hashes.
    hasher: S,
    max_bytes: usize,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    by_hash: HashMap<u64, Entry>,
    /// Hashes by the tick of their last use.
    by_use: BTreeMap<u64, u64>,
    tick: u64,
    bytes: usize,
}

struct Entry {
    known: Arc<Known>,
    last_use: u64,
}

impl KeptWindows {
    /// A cache of up to `max_bytes`.
    pub(super) fn new(max_bytes: usize) -> Self {
        Self::with_hasher(max_bytes, RandomState::new())
    }
}

impl<S: BuildHasher> KeptWindows<S> {
    fn with_hasher(max_bytes: usize, hasher: S) -> Self {
        Self {
            hasher,
            max_bytes,
            entries: Mutex::default(),
        }
    }

    /// Returns the tokens of `text`, if they are known under `salt`.
    pub(super) fn get(&self, salt: Option<&str>, text: &str) -> Option<Arc<Known>> {
        if !self.has_room(text.len()) {
            return None;
        }
        let hash = self.hasher.hash_one((salt, text));
        let known = self.entries.lock().take_note_of(hash)?;
        // Another text may have the same hash.
        (*known.text == *text).then_some(known)
    }

    /// Stores the tokens of `text` under `salt`, unless they are too large.
    pub(super) fn insert(&self, salt: Option<&str>, text: &str, ids: Vec<u32>) {
        let known = Known {
            text: text.into(),
            ids: ids.into(),
        };
        if !self.has_room(known.bytes()) {
            return;
        }
        let hash = self.hasher.hash_one((salt, text));
        let gone = self
            .entries
            .lock()
            .insert(hash, Arc::new(known), self.max_bytes);
        drop(gone);
    }

    fn has_room(&self, bytes: usize) -> bool {
        bytes <= self.max_bytes / LARGEST_SHARE
    }
}

impl Entries {
    fn take_note_of(&mut self, hash: u64) -> Option<Arc<Known>> {
        let entry = self.by_hash.get_mut(&hash)?;
        self.tick += 1;
        self.by_use.remove(&entry.last_use);
        self.by_use.insert(self.tick, hash);
        entry.last_use = self.tick;
        Some(Arc::clone(&entry.known))
    }

    /// Adds an entry, and replaces the one with its hash. Returns the evicted entries, for the caller to free.
    fn insert(&mut self, hash: u64, known: Arc<Known>, max_bytes: usize) -> Vec<Arc<Known>> {
        let mut gone = Vec::new();
        gone.extend(self.remove(hash));
        self.tick += 1;
        self.bytes += known.bytes();
        let last_use = self.tick;
        self.by_use.insert(last_use, hash);
        self.by_hash.insert(hash, Entry { known, last_use });
        while self.bytes > max_bytes {
            let Some((_, &oldest)) = self.by_use.first_key_value() else {
                break;
            };
            gone.extend(self.remove(oldest));
        }
        gone
    }

    fn remove(&mut self, hash: u64) -> Option<Arc<Known>> {
        let entry = self.by_hash.remove(&hash)?;
        self.by_use.remove(&entry.last_use);
        self.bytes -= entry.known.bytes();
        Some(entry.known)
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasherDefault, Hasher};

    use super::*;

    /// Gives every text the same hash.
    #[derive(Default)]
    struct Constant;

    impl Hasher for Constant {
        fn finish(&self) -> u64 {
            7
        }

        fn write(&mut self, _: &[u8]) {}
    }

    fn ids(kept: &KeptWindows<impl BuildHasher>, text: &str) -> Option<Vec<u32>> {
        kept.get(None, text).map(|known| known.ids.to_vec())
    }

    #[test]
    fn texts_with_one_hash_never_get_each_others_tokens() {
        let kept = KeptWindows::with_hasher(1 << 20, BuildHasherDefault::<Constant>::default());
        kept.insert(None, "a", vec![1]);
        assert_eq!(ids(&kept, "a"), Some(vec![1]));
        assert_eq!(ids(&kept, "b"), None);
        kept.insert(None, "b", vec![2]);
        assert_eq!(ids(&kept, "b"), Some(vec![2]));
        assert_eq!(ids(&kept, "a"), None);
        let entries = kept.entries.lock();
        assert_eq!((entries.by_hash.len(), entries.by_use.len()), (1, 1));
        assert_eq!(entries.bytes, 1 + 4 + ENTRY_BYTES);
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let kept = KeptWindows::new(5 * (ENTRY_BYTES + 5));
        for (id, text) in (0..).zip(["a", "b", "c", "d", "e"]) {
            kept.insert(None, text, vec![id]);
        }
        assert_eq!(ids(&kept, "a"), Some(vec![0]));
        kept.insert(None, "f", vec![5]);
        assert_eq!(ids(&kept, "b"), None);
        assert_eq!(ids(&kept, "a"), Some(vec![0]));
        assert_eq!(ids(&kept, "f"), Some(vec![5]));
    }

    #[test]
    fn memory_stays_bounded_and_is_counted_exactly() {
        let max_bytes = 8 * ENTRY_BYTES;
        let kept = KeptWindows::new(max_bytes);
        for round in 0..200_usize {
            let text = "x".repeat(round * 37 % 250);
            kept.insert(None, &text, vec![0; round * 11 % 60]);
            let entries = kept.entries.lock();
            let counted: usize = entries.by_hash.values().map(|e| e.known.bytes()).sum();
            assert_eq!(entries.bytes, counted);
            assert!(counted <= max_bytes, "{counted}");
            assert_eq!(entries.by_hash.len(), entries.by_use.len());
        }
    }

    #[test]
    fn what_would_take_too_large_a_share_is_not_kept() {
        let kept = KeptWindows::new(4 * (ENTRY_BYTES + 10));
        kept.insert(None, "ab", vec![1, 2]);
        kept.insert(None, "abc", vec![1, 2]);
        assert_eq!(ids(&kept, "ab"), Some(vec![1, 2]));
        assert_eq!(ids(&kept, "abc"), None);
    }
}
