//! [`IndexWriter`]: changes an index.

mod holders;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use genset_backend_common::kv::BlockHash;

use super::arena::{Free, class_of, class_words};
use super::members::{self, Interval};
use super::run::{Children, Link, MAX_LEN, RUN_BITS, RunId, Size, Word};
use super::table::{Place, TableWriter};
use super::{MAX_TARGETS, Shared, Target};
use crate::sync::Ordering;

/// What is wrong with an event. The index applied the valid part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Odd {
    /// A block was stored with another parent than before. Its hash identifies its whole prefix, so one of the events is wrong.
    #[error("a block was stored behind a block that it does not follow")]
    OtherParent,
    /// Blocks were removed that were not held.
    #[error("blocks were removed that were not held")]
    NotHeld,
    /// The target holds the maximum number of blocks. Further blocks are dropped until it removes others.
    #[error("more blocks were stored than the index keeps for one worker")]
    TooMany,
    /// The index is full.
    #[error("the index is full")]
    Full,
}

/// Changes an index. Each index has one.
pub struct IndexWriter {
    shared: Arc<Shared>,
    free: Free,
    table: TableWriter,
    /// The next unused run, and the free list of runs.
    next_run: RunId,
    free_runs: Vec<RunId>,
    /// Runs whose first block follows an unknown block, by that block's hash.
    orphans: HashMap<u64, BTreeSet<RunId>>,
    /// How many links between runs the current call may still follow or create before it returns.
    links_left: usize,
    /// Scratch memory for intervals.
    list: Vec<Interval>,
    /// The number of blocks each target holds, by target, and the limit for each.
    held: Vec<u32>,
    max_held: u32,
}

genset_backend_common::debug_as!(|it| IndexWriter {
    runs: it.runs(),
    used_bytes: it.used_bytes(),
    ..
});

impl IndexWriter {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            free: Free::new(),
            table: TableWriter::new(),
            next_run: 1,
            free_runs: Vec::new(),
            orphans: HashMap::new(),
            links_left: usize::MAX,
            list: Vec::new(),
            held: Vec::new(),
            max_held: u32::MAX,
        }
    }

    /// Limits the blocks of each target. Blocks already held stay.
    pub fn bound_targets(&mut self, max_blocks: u32) {
        self.max_held = max_blocks;
    }

    /// Returns how many more blocks a target may hold.
    fn room(&self, target: Target) -> u32 {
        let held = usize::try_from(target).ok();
        let held = held.and_then(|target| self.held.get(target));
        self.max_held.saturating_sub(held.copied().unwrap_or(0))
    }

    /// Adds `gained`, which may be negative, to a target's block count.
    fn count(&mut self, target: Target, gained: i64) {
        let Ok(index) = usize::try_from(target) else {
            return;
        };
        if self.held.len() <= index {
            self.held.resize(index + 1, 0);
        }
        if let Some(held) = self.held.get_mut(index) {
            let count = i64::from(*held).saturating_add(gained);
            *held = u32::try_from(count.max(0)).unwrap_or(u32::MAX);
        }
        let all = &self.shared.held;
        all.fetch_add(gained.cast_unsigned(), Ordering::Relaxed);
    }

    /// Returns the bytes in use, without the runs' own words.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.free.used_bytes()
    }

    /// Returns the number of runs in use.
    #[must_use]
    pub fn runs(&self) -> usize {
        usize::try_from(self.next_run).unwrap_or(usize::MAX) - 1 - self.free_runs.len()
    }

    /// Records that the target holds `blocks`: a chain whose first block follows `parent`, or starts a sequence.
    ///
    /// # Errors
    /// [`Odd`], when some of them could not be stored.
    pub fn store(
        &mut self,
        target: Target,
        parent: Option<BlockHash>,
        blocks: &[BlockHash],
    ) -> Result<(), Odd> {
        self.store_part(target, parent, blocks, usize::MAX)?;
        Ok(())
    }

    /// Like [`Self::store`], but stops after the leading blocks once it has followed or created `max_links` links between runs.
    /// Returns the number of blocks stored, at least one.
    ///
    /// # Errors
    /// As [`Self::store`].
    pub fn store_part(
        &mut self,
        target: Target,
        parent: Option<BlockHash>,
        blocks: &[BlockHash],
        max_links: usize,
    ) -> Result<usize, Odd> {
        if target >= MAX_TARGETS {
            return Err(Odd::Full);
        }
        self.links_left = max_links;
        let mut last = parent.and_then(|parent| self.place_of(parent.0));
        let mut rest = blocks;
        while let Some(first) = rest.first() {
            if self.links_left == 0 && rest.len() < blocks.len() {
                break;
            }
            let Some(place) = self.place_of(first.0) else {
                let count = self.store_new(target, parent, last, rest)?;
                last = self.place_of(rest[count - 1].0);
                rest = &rest[count..];
                continue;
            };
            // The parent's hash applies to the first block only.
            let missing = (rest.len() == blocks.len()).then_some(parent).flatten();
            if !self.follows(place, last, missing) {
                return Err(Odd::OtherParent);
            }
            let same = match self.room(target) {
                0 => return Err(Odd::TooMany),
                room => self.same_blocks(place, rest).min(room),
            };
            let end = place.position + same;
            self.hold(target, place.run, place.position, end)?;
            last = Some(Place {
                run: place.run,
                position: end - 1,
            });
            rest = rest
                .get(usize::try_from(same).unwrap_or(usize::MAX)..)
                .unwrap_or_default();
        }
        Ok(blocks.len() - rest.len())
    }

    /// Records that the target no longer holds these blocks.
    ///
    /// # Errors
    /// [`Odd::NotHeld`] when it did not hold some; the others are removed.
    pub fn remove(&mut self, target: Target, blocks: &[BlockHash]) -> Result<(), Odd> {
        let mut all_held = true;
        for block in blocks {
            all_held &= match self.place_of(block.0) {
                Some(place) => self.release(target, place),
                None => false,
            };
        }
        if all_held { Ok(()) } else { Err(Odd::NotHeld) }
    }

    /// Removes the target from at most `count` runs, starting with run number `from`. Returns the next run number, or `None` at
    /// the end. Nothing may be stored for the target between calls.
    pub fn remove_target(&mut self, target: Target, from: u32, count: u32) -> Option<u32> {
        let end = from.saturating_add(count).min(self.next_run);
        for run in from.max(1)..end {
            if self.shared.runs.size(run).members == 0 {
                continue;
            }
            self.read_members(run);
            let held = members::remove_target(&mut self.list, target);
            if held > 0 {
                self.count(target, -i64::from(held));
                self.write_members(run);
                self.trim(run);
            }
        }
        (end < self.next_run).then_some(end)
    }

    #[inline]
    fn place_of(&self, hash: u64) -> Option<Place> {
        let Shared { table, words, .. } = &*self.shared;
        let mixed = table.mix(hash);
        let found = table.find(words, mixed, |place| self.hash_at(place) == hash);
        found.ok().flatten()
    }

    #[inline]
    fn hash_at(&self, place: Place) -> u64 {
        let Shared { runs, words, .. } = &*self.shared;
        if runs.size(place.run).len == place.position + 1 {
            return runs.load(place.run, Word::Tail);
        }
        words.load(runs.load(place.run, Word::Hashes) + u64::from(place.position))
    }

    /// Returns whether the block at `place` follows the block at `last`, the unknown block `missing`, or nothing.
    fn follows(&self, place: Place, last: Option<Place>, missing: Option<BlockHash>) -> bool {
        let runs = &self.shared.runs;
        if place.position > 0 {
            return last
                .is_some_and(|last| last.run == place.run && last.position + 1 == place.position);
        }
        match (runs.link(place.run), last) {
            (Link::Root, None) => missing.is_none(),
            (Link::After(run, len), Some(last)) => run == last.run && len == last.position + 1,
            (Link::Orphan, None) => {
                missing.is_some_and(|missing| missing.0 == runs.load(place.run, Word::Missing))
            }
            (Link::Root | Link::Orphan, Some(_)) | (Link::After(..), None) => false,
        }
    }

    /// Returns how many of `blocks` match the run from `place` on; at least one.
    fn same_blocks(&self, place: Place, blocks: &[BlockHash]) -> u32 {
        let Shared { runs, words, .. } = &*self.shared;
        let hashes = runs.load(place.run, Word::Hashes);
        let len = runs.size(place.run).len;
        let same = (place.position + 1..len)
            .zip(&blocks[1..])
            .take_while(|(position, block)| words.load(hashes + u64::from(*position)) == block.0);
        1 + u32::try_from(same.count()).unwrap_or(u32::MAX)
    }

    /// Stores the leading unknown blocks; returns their number, at least one.
    fn store_new(
        &mut self,
        target: Target,
        parent: Option<BlockHash>,
        last: Option<Place>,
        blocks: &[BlockHash],
    ) -> Result<usize, Odd> {
        let room = match self.room(target) {
            0 => return Err(Odd::TooMany),
            room => usize::try_from(room).unwrap_or(usize::MAX),
        };
        let extends = |place: &Place| {
            let len = self.shared.runs.size(place.run).len;
            len == place.position + 1 && len < MAX_LEN
        };
        let run = match last.filter(extends) {
            Some(place) => place.run,
            None => self.new_run(last, parent)?,
        };
        let start = self.shared.runs.size(run).len;
        let mut end = start;
        let mut result = Ok(());
        for block in blocks.iter().take(room) {
            let may_stop = end > start;
            if end == MAX_LEN
                || (may_stop && (self.links_left == 0 || self.place_of(block.0).is_some()))
            {
                break;
            }
            if !self.append(run, end, block.0) {
                result = Err(Odd::Full);
                break;
            }
            end += 1;
        }
        if end > start {
            self.hold(target, run, start, end)?;
        }
        if self.shared.runs.size(run).len == 0 {
            self.trim(run);
        }
        result.map(|()| usize::try_from(end - start).unwrap_or_default())
    }

    fn new_run(&mut self, last: Option<Place>, parent: Option<BlockHash>) -> Result<RunId, Odd> {
        let run = match self.free_runs.pop() {
            Some(run) => run,
            None if self.next_run >> RUN_BITS == 0 && self.shared.runs.reserve(self.next_run) => {
                self.next_run += 1;
                self.next_run - 1
            }
            None => return Err(Odd::Full),
        };
        let (link, missing) = match (last, parent) {
            (Some(last), _) => (Link::After(last.run, last.position + 1), 0),
            (None, None) => (Link::Root, 0),
            (None, Some(parent)) => (Link::Orphan, parent.0),
        };
        let runs = &self.shared.runs;
        runs.change(run, || {
            runs.store(run, Word::Link, link.pack());
            runs.store(run, Word::Size, Size::default().pack());
            runs.store(run, Word::Hashes, 0);
            runs.store(run, Word::Members, 0);
            runs.store(run, Word::Children, 0);
            runs.store(run, Word::Missing, missing);
        });
        match link {
            Link::After(parent, len) => self.adopt(parent, len),
            Link::Orphan => {
                self.orphans.entry(missing).or_default().insert(run);
            }
            Link::Root => {}
        }
        Ok(run)
    }

    /// Counts one more run that begins after `len` blocks of `parent`.
    fn adopt(&self, parent: RunId, len: u32) {
        let runs = &self.shared.runs;
        let old = runs.children(parent);
        let new = Children {
            count: old.count + 1,
            pinned: old.pinned.max(len),
        };
        runs.store(parent, Word::Children, new.pack());
    }

    /// Appends a block to a run of length `len`.
    fn append(&mut self, run: RunId, len: u32, hash: u64) -> bool {
        let Shared {
            words, runs, table, ..
        } = &*self.shared;
        let mut size = runs.size(run);
        let has_hashes = runs.load(run, Word::Hashes) != 0;
        let needed = usize::try_from(len).unwrap_or(usize::MAX) + 1;
        if !has_hashes || class_words(size.hash_class) < needed {
            let Some(class) = class_of(needed.max(4)) else {
                return false;
            };
            let Some(at) = self.free.take(words, class) else {
                return false;
            };
            let old = runs.load(run, Word::Hashes);
            for position in 0..u64::from(len) {
                words.store(at + position, words.load(old + position));
            }
            let old_class = size.hash_class;
            size.hash_class = class;
            runs.change(run, || {
                runs.store(run, Word::Hashes, at);
                runs.store(run, Word::Size, size.pack());
            });
            if has_hashes {
                self.free.give(old_class, old);
            }
        }
        words.store(runs.load(run, Word::Hashes) + u64::from(len), hash);
        let place = Place { run, position: len };
        let mixed = table.mix(hash);
        if !self
            .table
            .insert(table, words, &mut self.free, mixed, place)
        {
            return false;
        }
        size.len = len + 1;
        runs.store(run, Word::Tail, hash);
        runs.store(run, Word::Size, size.pack());
        if !self.orphans.is_empty() {
            self.link_orphans(hash, place);
        }
        true
    }

    /// Links the runs that waited for this block.
    fn link_orphans(&mut self, hash: u64, place: Place) {
        let Some(waiting) = self.orphans.remove(&hash) else {
            return;
        };
        let first = self.first_above(place.run);
        self.links_left = self.links_left.saturating_sub(waiting.len());
        for orphan in waiting {
            // Prefix hashes cannot form a cycle, but invalid hashes can.
            if orphan == first {
                self.orphans.entry(hash).or_default().insert(orphan);
                continue;
            }
            let link = Link::After(place.run, place.position + 1);
            self.shared.runs.store(orphan, Word::Link, link.pack());
            self.adopt(place.run, place.position + 1);
        }
    }

    /// Returns the topmost ancestor of `run`: the only one of them that can be an orphan.
    fn first_above(&mut self, run: RunId) -> RunId {
        let mut first = run;
        while let Link::After(parent, _) = self.shared.runs.link(first) {
            self.links_left = self.links_left.saturating_sub(1);
            first = parent;
        }
        first
    }

    /// Drops blocks at the end of a run that nobody holds, and the run itself when empty; then continues with its parent.
    fn trim(&mut self, mut run: RunId) {
        loop {
            let Shared {
                words, runs, table, ..
            } = &*self.shared;
            let mut size = runs.size(run);
            let children = runs.children(run);
            let keep = children.pinned.max(self.longest(run, size));
            let hashes = runs.load(run, Word::Hashes);
            for position in (keep..size.len).rev() {
                let mixed = table.mix(words.load(hashes + u64::from(position)));
                self.table
                    .remove(table, words, mixed, Place { run, position });
            }
            if keep > 0 || children.count > 0 {
                size.len = keep;
                runs.store(
                    run,
                    Word::Tail,
                    words.load(hashes + u64::from(keep.max(1) - 1)),
                );
                runs.store(run, Word::Size, size.pack());
                return;
            }
            let link = runs.link(run);
            runs.change(run, || {
                runs.store(run, Word::Size, Size::default().pack());
                runs.store(run, Word::Hashes, 0);
                runs.store(run, Word::Members, 0);
            });
            if hashes != 0 {
                self.free.give(size.hash_class, hashes);
            }
            let missing = runs.load(run, Word::Missing);
            self.free_runs.push(run);
            match link {
                Link::Root => return,
                Link::Orphan => {
                    if let Some(waiting) = self.orphans.get_mut(&missing) {
                        waiting.remove(&run);
                        if waiting.is_empty() {
                            self.orphans.remove(&missing);
                        }
                    }
                    return;
                }
                Link::After(parent, _) => {
                    let mut left = self.shared.runs.children(parent);
                    left.count -= 1;
                    if left.count == 0 {
                        left.pinned = 0;
                    }
                    self.shared.runs.store(parent, Word::Children, left.pack());
                    if left.count > 0 {
                        return;
                    }
                    run = parent;
                }
            }
        }
    }
}
