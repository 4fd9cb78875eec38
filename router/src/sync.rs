//! Shared-memory primitives of the index, and the sizes of its memory. The index imports them only from here: `tests/loom.rs`
//! compiles the same files with loom's types and with sizes small enough for exhaustive tests.

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::OnceLock;
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Words in an arena's chunk; no block of words is longer.
pub(crate) const CHUNK_WORDS: usize = 1 << 16;

/// The maximum number of chunks in an arena: 8 GiB.
pub(crate) const MAX_CHUNKS: usize = 1 << 14;

/// Bits of a hash that choose its part of the table.
pub(crate) const PART_BITS: u32 = 12;

/// The smallest part of the table, as a power of two.
pub(crate) const SMALLEST_PART: u32 = 4;

/// Read attempts before a reader gives up.
pub(crate) const TRIES: usize = 64;
