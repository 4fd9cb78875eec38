//! The index of who holds which KV blocks: from a prompt's block hashes to the leading blocks that each target has cached.
//!
//! Blocks live in *runs*: chains of blocks that were stored one after another. A run names its parent as (run, how many of its
//! blocks precede), so that a branch is a new run and nothing moves: runs are never split. What a target holds of a run is one
//! interval, or some when it has holes. One table maps a block's hash to its place (run and position). Hashes are chained, so
//! the depth of a match is found by probing, not by walking.
//!
//! There is one writer, [`IndexWriter`], and any number of readers, [`IndexReader`], which take no lock: every word they read is
//! atomic, and a run or a part of the table that changes under them is read again. A reader that has to read again too often
//! takes the block for unknown: an answer is a hint, and nobody waits for one.
//!
//! `tests/loom.rs` compiles these files with `loom`'s atomics, and tries a lookup beside a change in the orders that the memory model
//! allows: a table that grows, holders that change, runs that are used again.
//!
//! Targets are small numbers; what they stand for is the caller's. It keeps neither clocks nor threads, and logs nothing.

mod arena;
mod find;
mod members;
mod run;
mod table;
mod write;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use self::arena::Arena;
use self::run::Runs;
use self::table::Table;
use crate::sync::AtomicU64;

pub use self::find::{IndexReader, Lookup};
pub use self::write::{IndexWriter, Odd};

/// Who may hold blocks: a number below [`MAX_TARGETS`] that the caller gives.
pub type Target = u32;

/// The most targets.
pub const MAX_TARGETS: u32 = 1 << 24;

/// The leading blocks of a prompt that a target holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Overlap {
    /// The target.
    pub target: Target,
    /// Blocks from the start of the prompt, at least 1.
    pub blocks: u32,
}

/// What readers and the writer share.
struct Shared {
    words: Arena,
    runs: Runs,
    table: Table,
    /// Blocks held by targets, each counted as often as it is held.
    held: AtomicU64,
}

/// An empty index.
#[must_use]
pub fn index() -> (IndexWriter, IndexReader) {
    with_seed(RandomState::new().hash_one(0))
}

/// An empty index; whoever knows its seed can choose hashes that collide.
pub(crate) fn with_seed(seed: u64) -> (IndexWriter, IndexReader) {
    let shared = Arc::new(Shared {
        words: Arena::new(),
        runs: Runs::new(),
        table: Table::new(seed),
        held: AtomicU64::new(0),
    });
    (
        IndexWriter::new(Arc::clone(&shared)),
        IndexReader::new(shared),
    )
}
