//! The KV block index: maps a prompt's block hashes to the leading blocks that each target has cached.
//!
//! Blocks are stored in *runs*: chains of consecutive blocks. A run names its parent as (run, number of its blocks that precede),
//! so a branch starts a new run and nothing moves: runs are never split. The blocks that a target holds in a run are one
//! interval, or several if there are holes. One table maps a block's hash to its place (run and position). Hashes are chained, so
//! a lookup finds the depth of a match by probing instead of walking.
//!
//! One writer, [`IndexWriter`], and any number of lock-free readers, [`IndexReader`], share the index. Every word that readers
//! load is atomic; a reader retries if a run or a part of the table changes during the read. After too many retries it treats the
//! block as unknown: a result is a hint, and no reader waits for one.
//!
//! `tests/loom.rs` compiles these files with `loom`'s atomics. It checks a lookup concurrent with a change under the orders that
//! the memory model allows: table growth, holder changes, reuse of runs.
//!
//! Targets are small numbers; the caller defines their meaning. The index has no clocks and no threads, and logs nothing.

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

/// A holder of blocks: a number below [`MAX_TARGETS`] assigned by the caller.
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

/// State shared by the readers and the writer.
struct Shared {
    words: Arena,
    runs: Runs,
    table: Table,
    /// Blocks held by targets; a block with several holders counts once for each.
    held: AtomicU64,
}

/// Creates an empty index.
#[must_use]
pub fn index() -> (IndexWriter, IndexReader) {
    with_seed(RandomState::new().hash_one(0))
}

/// Creates an empty index; anyone who knows the seed can choose colliding hashes.
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
