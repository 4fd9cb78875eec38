//! The index's reader concurrent with its writer, in the orders of events that the memory model allows, under `loom`.
//!
//! This test compiles the index's own files with loom's atomics instead of the standard library's, and with sizes that make a
//! table grow at its fourth block. Each model names what it detects: it fails when one of those orderings, fences or reads is
//! weakened. The orderings of slots and the fence that ends a read are redundant: the test does not detect the loss of one of
//! them alone.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[path = "../src"]
mod crate_under_test {
    #[allow(
        dead_code,
        unreachable_pub,
        unused_imports,
        reason = "a public module, used in part"
    )]
    pub mod index;
}

/// Replaces the crate's `src/sync.rs`.
mod sync {
    pub(crate) use loom::hint::spin_loop;
    pub(crate) use loom::sync::atomic::{Ordering, fence};

    pub(crate) const CHUNK_WORDS: usize = 64;
    pub(crate) const MAX_CHUNKS: usize = 2;
    pub(crate) const PART_BITS: u32 = 1;
    pub(crate) const SMALLEST_PART: u32 = 2;
    pub(crate) const TRIES: usize = 2;

    loom::thread_local! {
        static IS_WRITER: std::cell::Cell<bool> = std::cell::Cell::new(false);
    }

    /// Marks this thread as the index's writer.
    pub(crate) fn be_writer() {
        IS_WRITER.with(|is_writer| is_writer.set(true));
    }

    /// A word with a single writer, which reads its own last store without asking `loom`. Otherwise `loom` takes such a load for
    /// the latest access to the word, and forgets earlier readers.
    pub(crate) struct AtomicU64 {
        word: loom::sync::atomic::AtomicU64,
        latest: std::sync::atomic::AtomicU64,
    }

    impl AtomicU64 {
        pub(crate) fn new(value: u64) -> Self {
            Self {
                word: loom::sync::atomic::AtomicU64::new(value),
                latest: std::sync::atomic::AtomicU64::new(value),
            }
        }

        pub(crate) fn load(&self, order: Ordering) -> u64 {
            if IS_WRITER.with(std::cell::Cell::get) {
                return self.latest.load(Ordering::Relaxed);
            }
            self.word.load(order)
        }

        pub(crate) fn store(&self, value: u64, order: Ordering) {
            self.latest.store(value, Ordering::Relaxed);
            self.word.store(value, order);
        }

        pub(crate) fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
            self.latest.fetch_add(value, Ordering::Relaxed);
            self.word.fetch_add(value, order)
        }
    }

    /// The standard library's type with its guarantee: a thread that sees the value set also sees everything done before.
    pub(crate) struct OnceLock<T> {
        is_set: AtomicU64,
        value: std::sync::OnceLock<T>,
    }

    impl<T> OnceLock<T> {
        pub(crate) fn new() -> Self {
            Self {
                is_set: AtomicU64::new(0),
                value: std::sync::OnceLock::new(),
            }
        }

        pub(crate) fn get(&self) -> Option<&T> {
            let is_set = self.is_set.load(Ordering::Acquire) == 1;
            is_set.then(|| self.value.get()).flatten()
        }

        pub(crate) fn get_or_init(&self, init: impl FnOnce() -> T) -> &T {
            let value = self.value.get_or_init(init);
            self.is_set.store(1, Ordering::Release);
            value
        }
    }
}

use genset_backend_common::kv::BlockHash;

use self::crate_under_test::index::{IndexReader, IndexWriter, Lookup, Target, with_seed};

/// Blocks in one part of the table. The first one is in its home slot.
const A: BlockHash = BlockHash(1);
const B: BlockHash = BlockHash(3);
const C: BlockHash = BlockHash(6);
const D: BlockHash = BlockHash(8);

/// Runs `write` concurrently with a lookup of `prompt`, in every order, and checks the result.
fn model(
    before: fn(&mut IndexWriter),
    write: fn(&mut IndexWriter),
    prompt: &'static [BlockHash],
    check: fn(&Lookup, &[(Target, u32)]),
) {
    let mut builder = loom::model::Builder::new();
    // At most one preemption, at any point; every old or new value that a load may return is tried.
    builder.preemption_bound = Some(1);
    builder.max_branches = 10_000;
    builder.check(move || {
        let (mut writer, reader) = with_seed(0);
        before(&mut writer);
        let writing = loom::thread::spawn(move || {
            sync::be_writer();
            write(&mut writer);
        });
        let mut lookup = Lookup::default();
        let found = find(&reader, prompt, &mut lookup);
        check(&lookup, &found);
        writing.join().unwrap();
    });
}

fn find(reader: &IndexReader, prompt: &[BlockHash], lookup: &mut Lookup) -> Vec<(Target, u32)> {
    reader.find(prompt, lookup);
    let overlaps = lookup.overlaps().iter();
    overlaps.map(|found| (found.target, found.blocks)).collect()
}

/// Detects, in `index::table`: the ordering of the store and load of a grown part's head, and the fence before its old slots are
/// reused.
#[test]
fn a_block_is_found_while_its_part_of_the_table_grows() {
    let before = |writer: &mut IndexWriter| {
        for target in [5, 6, 7] {
            writer.store(target, None, &[A]).unwrap();
        }
        writer.store(6, None, &[B, C]).unwrap();
    };
    // The fourth block makes the part grow, and its run's fourth interval takes the old slots.
    let write = |writer: &mut IndexWriter| writer.store(8, Some(A), &[D]).unwrap();
    model(before, write, &[A], |lookup, found| {
        let is_found = found == [(5, 1), (6, 1), (7, 1)];
        assert!(!lookup.is_complete() || is_found, "{found:?}");
    });
}

/// Detects, in `index::run`: the fence after the start of a change, the ordering of its end, the ordering of the first version
/// load, and the second version load.
#[test]
fn who_holds_a_run_is_read_as_one() {
    let before = |writer: &mut IndexWriter| writer.store(5, None, &[A]).unwrap();
    // From one interval, stored in the run, to two in separate words, and back.
    let write = |writer: &mut IndexWriter| {
        writer.store(6, None, &[A]).unwrap();
        writer.remove(6, &[A]).unwrap();
    };
    model(before, write, &[A], |lookup, found| {
        let is_true = found == [(5, 1)] || found == [(5, 1), (6, 1)];
        assert!(
            is_true || !lookup.is_complete() && found.is_empty(),
            "{found:?}"
        );
    });
}

/// Detects, in `index::run`: the same, for a run that is reused.
#[test]
fn a_run_used_again_is_not_taken_for_what_it_was() {
    let before = |writer: &mut IndexWriter| writer.store(5, None, &[A]).unwrap();
    let write = |writer: &mut IndexWriter| {
        writer.remove(5, &[A]).unwrap();
        writer.store(6, None, &[B]).unwrap();
    };
    model(before, write, &[B], |_, found| {
        assert!(found.is_empty() || found == [(6, 1)], "{found:?}");
    });
}

/// Detects, in `index::find`: the second check of the hash together with its holders, and the fence before it. In `index::write`:
/// that an interval grows only after the hashes it covers are stored.
#[test]
fn the_end_of_a_run_that_is_another_now_is_not_taken_for_what_it_was() {
    let before = |writer: &mut IndexWriter| {
        writer.store(6, None, &[A]).unwrap();
        writer.store(5, None, &[A, B]).unwrap();
    };
    let write = |writer: &mut IndexWriter| {
        writer.remove(5, &[B]).unwrap();
        writer.store(6, Some(A), &[C]).unwrap();
    };
    let check = |lookup: &Lookup, found: &[(Target, u32)]| {
        assert!(!found.contains(&(6, 2)), "{found:?}");
        let is_there = found.contains(&(6, 1));
        assert!(is_there || !lookup.is_complete(), "{found:?}");
    };
    model(before, write, &[A, B], check);
    // The same with a single interval, stored in the run.
    let write = |writer: &mut IndexWriter| {
        writer.remove(5, &[B, A]).unwrap();
        writer.store(6, Some(A), &[C]).unwrap();
    };
    model(before, write, &[A, B], check);
}

/// Detects, in `index::run`: the same as [`who_holds_a_run_is_read_as_one`], with new memory.
#[test]
fn the_first_block_is_found_whole_or_not_at_all() {
    let write = |writer: &mut IndexWriter| writer.store(5, None, &[A, B]).unwrap();
    model(
        |_| (),
        write,
        &[A, B],
        |_, found| {
            assert!(matches!(found, [] | [(5, 1 | 2)]), "{found:?}");
        },
    );
}
