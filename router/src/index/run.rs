//! The words of a run, and how readers load them during a change.
//!
//! Each run has a version, which is odd while several of its words change. A reader loads the version, the words, and the version
//! again; if the versions differ, it retries. Words that change on their own need no version.

use super::arena::{Arena, Offset};
use crate::sync::{AtomicU64, Ordering, TRIES, fence, spin_loop};

/// A run's number, starting at 1.
pub(super) type RunId = u32;

/// Bits of a run's number.
pub(super) const RUN_BITS: u32 = 27;
/// Bits of a block's position in its run.
pub(super) const POSITION_BITS: u32 = 13;
/// The most blocks in a run; a longer chain takes several runs.
pub(super) const MAX_LEN: u32 = (1 << POSITION_BITS) - 1;

/// Words of a run.
const WORDS: u64 = 8;

/// The words of a run.
#[derive(Clone, Copy)]
pub(super) enum Word {
    Version = 0,
    /// [`Link`].
    Link = 1,
    /// [`Size`].
    Size = 2,
    /// Where the hashes are.
    Hashes = 3,
    /// The only interval, or the offset of the intervals.
    Members = 4,
    /// The last block's hash.
    Tail = 5,
    /// [`Children`].
    Children = 6,
    /// The hash of the block before the first one, if that block is unknown.
    Missing = 7,
}

/// What precedes a run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Link {
    /// Nothing: the run begins a sequence.
    Root,
    /// The first `n` blocks of a run.
    After(RunId, u32),
    /// A block that no event has announced.
    Orphan,
}

impl Link {
    pub(super) fn pack(self) -> u64 {
        match self {
            Self::Root => 0,
            Self::After(run, len) => u64::from(run) | u64::from(len) << 32,
            Self::Orphan => 1 << 63,
        }
    }

    #[inline]
    pub(super) fn unpack(word: u64) -> Self {
        if word == 0 {
            Self::Root
        } else if word >> 63 == 1 {
            Self::Orphan
        } else {
            Self::After((word & 0xffff_ffff) as u32, (word >> 32 & 0xffff) as u32)
        }
    }
}

/// The sizes of a run.
#[derive(Clone, Copy, Default)]
pub(super) struct Size {
    /// Its number of blocks.
    pub(super) len: u32,
    /// The size class of its hashes.
    pub(super) hash_class: u8,
    /// The size class of its intervals.
    pub(super) member_class: u8,
    /// Its number of intervals. A single one is stored in the run itself.
    pub(super) members: u32,
}

impl Size {
    pub(super) fn pack(self) -> u64 {
        u64::from(self.len)
            | u64::from(self.hash_class) << 16
            | u64::from(self.member_class) << 24
            | u64::from(self.members) << 32
    }

    #[inline]
    pub(super) fn unpack(word: u64) -> Self {
        Self {
            len: (word & 0xffff) as u32,
            hash_class: (word >> 16 & 0xff) as u8,
            member_class: (word >> 24 & 0xff) as u8,
            members: (word >> 32 & 0xffff_ffff) as u32,
        }
    }
}

/// The runs that branch off a run.
#[derive(Clone, Copy, Default)]
pub(super) struct Children {
    pub(super) count: u32,
    /// Leading blocks to keep because a child follows them; an upper bound.
    pub(super) pinned: u32,
}

impl Children {
    pub(super) fn pack(self) -> u64 {
        u64::from(self.count) | u64::from(self.pinned) << 32
    }

    pub(super) fn unpack(word: u64) -> Self {
        Self {
            count: (word & 0xffff_ffff) as u32,
            pinned: (word >> 32 & 0xffff) as u32,
        }
    }
}

pub(super) struct Runs(Arena);

impl Runs {
    pub(super) fn new() -> Self {
        Self(Arena::new())
    }

    fn at(run: RunId) -> Offset {
        u64::from(run) * WORDS
    }

    pub(super) fn reserve(&self, run: RunId) -> bool {
        self.0.reserve(Self::at(run))
    }

    #[inline]
    fn words(&self, run: RunId) -> &[AtomicU64] {
        self.0.block(Self::at(run), 8)
    }

    #[inline]
    pub(super) fn load(&self, run: RunId, word: Word) -> u64 {
        self.0.load(Self::at(run) + word as u64)
    }

    #[inline]
    pub(super) fn store(&self, run: RunId, word: Word, value: u64) {
        self.0.store(Self::at(run) + word as u64, value);
    }

    /// Stores a word with release ordering: after all earlier stores.
    #[inline]
    pub(super) fn publish(&self, run: RunId, word: Word, value: u64) {
        if let Some(word) = self.0.word(Self::at(run) + word as u64) {
            word.store(value, Ordering::Release);
        }
    }

    #[inline]
    pub(super) fn link(&self, run: RunId) -> Link {
        Link::unpack(self.load(run, Word::Link))
    }

    #[inline]
    pub(super) fn size(&self, run: RunId) -> Size {
        Size::unpack(self.load(run, Word::Size))
    }

    pub(super) fn children(&self, run: RunId) -> Children {
        Children::unpack(self.load(run, Word::Children))
    }

    /// Changes several words of a run under its version.
    #[inline]
    pub(super) fn change<T>(&self, run: RunId, change: impl FnOnce() -> T) -> T {
        let version = self.load(run, Word::Version);
        self.store(run, Word::Version, version.wrapping_add(1));
        // Later stores become visible after the odd version.
        fence(Ordering::Release);
        let done = change();
        if let Some(word) = self.words(run).first() {
            word.store(version.wrapping_add(2), Ordering::Release);
        }
        done
    }

    /// Reads several words of a run consistently; `None` after too many concurrent changes.
    #[inline]
    pub(super) fn read<T>(&self, run: RunId, mut read: impl FnMut() -> T) -> Option<T> {
        let version = self.words(run).first()?;
        for _ in 0..TRIES {
            let before = version.load(Ordering::Acquire);
            if before.is_multiple_of(2) {
                let value = read();
                // The words are loaded before the version below.
                fence(Ordering::Acquire);
                if version.load(Ordering::Relaxed) == before {
                    return Some(value);
                }
            }
            spin_loop();
        }
        None
    }
}
