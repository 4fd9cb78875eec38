//! The holders of a run's blocks: the part of the writer that changes the intervals in [`members`].

use super::super::arena::class_of;
use super::super::members::{self, Interval};
use super::super::run::{RunId, Size, Word};
use super::super::table::Place;
use super::super::{Shared, Target};
use super::{IndexWriter, Odd};
use crate::sync::{AtomicU64, Ordering};

impl IndexWriter {
    /// Records that the target holds the blocks `start..end` of a run.
    pub(super) fn hold(
        &mut self,
        target: Target,
        run: RunId,
        start: u32,
        end: u32,
    ) -> Result<(), Odd> {
        let added = Interval::new(target, start, end);
        let gained = match self.grow_alone(run, added) {
            Some(gained) => gained,
            None => {
                self.read_members(run);
                let gained = members::add(&mut self.list, added);
                if !self.write_members(run) {
                    return Err(Odd::Full);
                }
                gained
            }
        };
        self.count(target, i64::from(gained));
        Ok(())
    }

    /// Adds an interval by changing one word, after the hashes it covers; `None` if that is not enough.
    #[inline]
    fn grow_alone(&self, run: RunId, added: Interval) -> Option<u32> {
        let Shared { words, runs, .. } = &*self.shared;
        let size = runs.size(run);
        let members = runs.load(run, Word::Members);
        if size.members == 1 {
            let (grown, gained) = members::grown(Interval::from_word(members), added)?;
            runs.publish(run, Word::Members, grown.word());
            return Some(gained);
        }
        let list = words.block(members, usize::try_from(size.members).ok()?);
        let interval = |word: &AtomicU64| Interval::from_word(word.load(Ordering::Relaxed));
        let index = list.partition_point(|word| {
            let old = interval(word);
            (old.target(), old.end()) < (added.target(), added.start())
        });
        let (grown, gained) = members::grown(interval(list.get(index)?), added)?;
        let next = list.get(index + 1).map(interval);
        if next.is_some_and(|next| members::grown(next, grown).is_some()) {
            return None;
        }
        list.get(index)?.store(grown.word(), Ordering::Release);
        Some(gained)
    }

    /// Records that the target no longer holds this block; returns false if it did not hold it.
    pub(super) fn release(&mut self, target: Target, place: Place) -> bool {
        let Place { run, position } = place;
        let Shared { words, runs, .. } = &*self.shared;
        let size = runs.size(run);
        let members = runs.load(run, Word::Members);
        let only = Interval::from_word(members);
        if size.members == 1
            && only.target() == target
            && only.end() == position + 1
            && only.start() < position
        {
            let less = Interval::new(target, only.start(), position);
            runs.store(run, Word::Members, less.word());
        } else {
            let count = usize::try_from(size.members).unwrap_or_default();
            let list = words.block(members, count);
            let interval = |word: &AtomicU64| Interval::from_word(word.load(Ordering::Relaxed));
            let index = list.partition_point(|word| {
                let old = interval(word);
                (old.target(), old.end()) <= (target, position)
            });
            let old = list.get(index).map(interval);
            match old {
                Some(old)
                    if size.members > 1
                        && old.target() == target
                        && old.end() == position + 1
                        && old.start() < position =>
                {
                    let less = Interval::new(target, old.start(), position);
                    if let Some(word) = list.get(index) {
                        word.store(less.word(), Ordering::Relaxed);
                    }
                }
                Some(_) | None => {
                    self.read_members(run);
                    if !members::remove(&mut self.list, target, position) {
                        return false;
                    }
                    // The list may grow by one interval: without room for it, the block stays held.
                    if !self.write_members(run) {
                        return false;
                    }
                }
            }
        }
        self.count(target, -1);
        if position + 1 == size.len || self.shared.runs.size(run).members == 0 {
            self.trim(run);
        }
        true
    }

    /// Reads a run's intervals into the list.
    pub(super) fn read_members(&mut self, run: RunId) {
        let Shared { words, runs, .. } = &*self.shared;
        let size = runs.size(run);
        let members = runs.load(run, Word::Members);
        self.list.clear();
        if size.members == 1 {
            self.list.push(Interval::from_word(members));
        } else {
            let count = usize::try_from(size.members).unwrap_or_default();
            let intervals = words.block(members, count).iter();
            self.list
                .extend(intervals.map(|word| Interval::from_word(word.load(Ordering::Relaxed))));
        }
    }

    /// Writes the list as a run's intervals; returns false when there is no room. Several intervals are written to new words, so
    /// that only two words change under readers.
    pub(super) fn write_members(&mut self, run: RunId) -> bool {
        let Shared { words, runs, .. } = &*self.shared;
        let (mut size, old) = (runs.size(run), runs.load(run, Word::Members));
        let old_class = (size.members > 1).then_some(size.member_class);
        size.members = u32::try_from(self.list.len()).unwrap_or(u32::MAX);
        let new = match &self.list[..] {
            [] => 0,
            [only] => only.word(),
            list => {
                let Some(class) = class_of(list.len()) else {
                    return false;
                };
                let Some(at) = self.free.take(words, class) else {
                    return false;
                };
                for (at, interval) in (at..).zip(list) {
                    words.store(at, interval.word());
                }
                size.member_class = class;
                at
            }
        };
        runs.change(run, || {
            runs.store(run, Word::Members, new);
            runs.store(run, Word::Size, size.pack());
        });
        if let Some(class) = old_class {
            self.free.give(class, old);
        }
        true
    }

    /// Returns the largest interval end, at most the run's length.
    pub(super) fn longest(&self, run: RunId, size: Size) -> u32 {
        let Shared { words, runs, .. } = &*self.shared;
        let members = runs.load(run, Word::Members);
        if size.members <= 1 {
            return if size.members == 1 {
                Interval::from_word(members).end()
            } else {
                0
            };
        }
        let count = usize::try_from(size.members).unwrap_or_default();
        let mut longest = 0;
        for word in words.block(members, count) {
            longest = longest.max(Interval::from_word(word.load(Ordering::Relaxed)).end());
            if longest >= size.len {
                break;
            }
        }
        longest
    }
}
