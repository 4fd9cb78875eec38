//! [`Arena`]: words that all threads may read at any time, and the writer's free list.
//!
//! Words are never returned to the system while the index lives, so a stale offset reads a reused word, never unmapped memory;
//! versions detect it.

use crate::sync::{AtomicU64, CHUNK_WORDS, MAX_CHUNKS, OnceLock, Ordering};

pub(super) struct Arena {
    chunks: Box<[OnceLock<Box<[AtomicU64]>>]>,
}

/// An offset into an arena, in words.
pub(super) type Offset = u64;

impl Arena {
    pub(super) fn new() -> Self {
        Self {
            chunks: (0..MAX_CHUNKS).map(|_| OnceLock::new()).collect(),
        }
    }

    #[inline]
    pub(super) fn word(&self, at: Offset) -> Option<&AtomicU64> {
        let at = usize::try_from(at).ok()?;
        let chunk = self.chunks.get(at / CHUNK_WORDS)?.get()?;
        chunk.get(at % CHUNK_WORDS)
    }

    /// Returns the words from `at` to the end of the chunk at most: a block of words never spans chunks.
    #[inline]
    pub(super) fn block(&self, at: Offset, words: usize) -> &[AtomicU64] {
        let Ok(at) = usize::try_from(at) else {
            return &[];
        };
        let chunk = self.chunks.get(at / CHUNK_WORDS).and_then(OnceLock::get);
        let start = at % CHUNK_WORDS;
        chunk
            .and_then(|chunk| chunk.get(start..start + words))
            .unwrap_or_default()
    }

    /// Loads a word; 0 if its chunk does not exist.
    #[inline]
    pub(super) fn load(&self, at: Offset) -> u64 {
        self.word(at).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    #[inline]
    pub(super) fn store(&self, at: Offset, value: u64) {
        if let Some(word) = self.word(at) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Allocates the chunk of `at` if it is missing; returns false when the arena is full.
    pub(super) fn reserve(&self, at: Offset) -> bool {
        let Ok(at) = usize::try_from(at) else {
            return false;
        };
        let Some(chunk) = self.chunks.get(at / CHUNK_WORDS) else {
            return false;
        };
        chunk.get_or_init(|| (0..CHUNK_WORDS).map(|_| AtomicU64::new(0)).collect());
        true
    }
}

/// The sizes of blocks of words: 2, 3, 4, 6, 8, 12 and so on to a whole chunk.
const CLASSES: usize = 31;

pub(super) const fn class_words(class: u8) -> usize {
    let base = if class.is_multiple_of(2) { 2 } else { 3 };
    base << (class / 2)
}

/// Returns the smallest class with at least `words` words; `None` when a chunk is too small.
pub(super) fn class_of(words: usize) -> Option<u8> {
    (0..31).find(|class| class_words(*class) >= words)
}

/// The writer's free list.
pub(super) struct Free {
    /// The first word never used.
    next: Offset,
    blocks: [Vec<Offset>; CLASSES],
}

impl Free {
    pub(super) fn new() -> Self {
        Self {
            // Offset 0 means "none".
            next: 2,
            blocks: std::array::from_fn(|_| Vec::new()),
        }
    }

    /// Allocates the words of a class; `None` when the arena is full.
    pub(super) fn take(&mut self, arena: &Arena, class: u8) -> Option<Offset> {
        if let Some(at) = self.blocks[usize::from(class)].pop() {
            return Some(at);
        }
        let (words, chunk) = (class_words(class) as u64, CHUNK_WORDS as u64);
        let left = chunk - self.next % chunk;
        if left < words {
            self.leave(left);
        }
        let at = self.next;
        if !arena.reserve(at) {
            return None;
        }
        self.next += words;
        Some(at)
    }

    /// Adds the unused end of a chunk to the free list.
    fn leave(&mut self, mut left: u64) {
        for class in (0..31_u8).rev() {
            let words = class_words(class) as u64;
            while left >= words {
                self.blocks[usize::from(class)].push(self.next);
                self.next += words;
                left -= words;
            }
        }
        self.next += left;
    }

    pub(super) fn give(&mut self, class: u8, at: Offset) {
        self.blocks[usize::from(class)].push(at);
    }

    pub(super) fn used_bytes(&self) -> u64 {
        let free: usize = (0..31_u8)
            .map(|class| class_words(class) * self.blocks[usize::from(class)].len())
            .sum();
        self.next.saturating_sub(free as u64) * 8
    }
}
