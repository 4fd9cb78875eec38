//! The words of a run, and how they are read while they change.
//!
//! Each run has a version that is odd while its words change together. A reader takes the version, reads, and takes it again:
//! when they differ, it reads again. Words that change alone need no version.

use super::arena::{Arena, Offset};
use crate::sync::{AtomicU64, Ordering, TRIES, fence, spin_loop};

/// A run's number, from 1.
pub(super) type RunId = u32;

/// Bits of a run's number.
pub(super) const RUN_BITS: u32 = 27;
/// Bits of a block's position in its run.
pub(super) const POSITION_BITS: u32 = 13;
/// The most blocks of a run; a longer chain is several.
pub(super) const MAX_LEN: u32 = (1 << POSITION_BITS) - 1;

/// Words of a run.
const WORDS: u64 = 8;

/// The words, by what they hold.
#[derive(Clone, Copy)]
pub(super) enum Word {
    Version = 0,
    /// [`Link`].
    Link = 1,
    /// [`Size`].
    Size = 2,
    /// Where the hashes are.
    Hashes = 3,
    /// The only interval, or where the intervals are.
    Members = 4,
    /// The last block's hash.
    Tail = 5,
    /// [`Children`].
    Children = 6,
    /// The hash of the block before the first, when its run is unknown.
    Missing = 7,
}

/// What precedes a run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Link {
    /// Nothing: it begins a sequence.
    Root,
    /// So many blocks of a run.
    After(RunId, u32),
    /// A block that nobody told of.
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

/// How much a run holds.
#[derive(Clone, Copy, Default)]
pub(super) struct Size {
    /// Its blocks.
    pub(super) len: u32,
    /// The class of the words of its hashes.
    pub(super) hash_class: u8,
    /// The class of the words of its intervals.
    pub(super) member_class: u8,
    /// Its intervals. The only one is in the run itself.
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

/// The runs that begin in a run.
#[derive(Clone, Copy, Default)]
pub(super) struct Children {
    pub(super) count: u32,
    /// Blocks that must stay because one of them follows. Too many rather than too few.
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

    /// Stores a word after all that was stored before it.
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

    /// Changes words of a run together.
    #[inline]
    pub(super) fn change<T>(&self, run: RunId, change: impl FnOnce() -> T) -> T {
        let version = self.load(run, Word::Version);
        self.store(run, Word::Version, version.wrapping_add(1));
        // What is stored from here on is seen after the odd version.
        fence(Ordering::Release);
        let done = change();
        if let Some(word) = self.words(run).first() {
            word.store(version.wrapping_add(2), Ordering::Release);
        }
        done
    }

    /// Reads words of a run that belong together; `None` when they changed again and again.
    #[inline]
    pub(super) fn read<T>(&self, run: RunId, mut read: impl FnMut() -> T) -> Option<T> {
        let version = self.words(run).first()?;
        for _ in 0..TRIES {
            let before = version.load(Ordering::Acquire);
            if before.is_multiple_of(2) {
                let value = read();
                // What was read until here is older than the version read next.
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
