//! What the index's threads share memory by, and the sizes of that memory. The index names neither elsewhere: `tests/loom.rs`
//! compiles the same files with loom's types, which try every order of events, and with sizes that this is possible for.

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::OnceLock;
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Words of a chunk of an arena; no block of words is longer.
pub(crate) const CHUNK_WORDS: usize = 1 << 16;

/// Chunks an arena may have: 8 GiB.
pub(crate) const MAX_CHUNKS: usize = 1 << 14;

/// Bits of a hash that choose its part of the table.
pub(crate) const PART_BITS: u32 = 12;

/// The smallest part of the table, as a power of two.
pub(crate) const SMALLEST_PART: u32 = 4;

/// How often a reader looks at what changes before it gives up.
pub(crate) const TRIES: usize = 64;
