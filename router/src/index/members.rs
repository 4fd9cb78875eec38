//! Intervals: the blocks of a run that a target holds. A list is sorted, and no two intervals of a target touch.

use super::Target;

/// A target and the blocks it holds, `start..end`, in one word: ordered by target, then start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Interval(u64);

impl Interval {
    pub(super) fn new(target: Target, start: u32, end: u32) -> Self {
        Self(u64::from(target) << 32 | u64::from(start) << 16 | u64::from(end))
    }

    #[inline]
    pub(super) fn from_word(word: u64) -> Self {
        Self(word)
    }

    #[inline]
    pub(super) fn word(self) -> u64 {
        self.0
    }

    #[inline]
    pub(super) fn target(self) -> Target {
        (self.0 >> 32 & 0xffff_ffff) as u32
    }

    #[inline]
    pub(super) fn start(self) -> u32 {
        (self.0 >> 16 & 0xffff) as u32
    }

    #[inline]
    pub(super) fn end(self) -> u32 {
        (self.0 & 0xffff) as u32
    }

    fn len(self) -> u32 {
        self.end() - self.start()
    }
}

/// Returns the interval that replaces `old` after adding `add`, and the number of blocks gained; `None` when more than one word
/// must change.
pub(super) fn grown(old: Interval, add: Interval) -> Option<(Interval, u32)> {
    if old.target() != add.target() || add.start() > old.end() || add.end() < old.start() {
        return None;
    }
    let start = old.start().min(add.start());
    let grown = Interval::new(old.target(), start, old.end().max(add.end()));
    Some((grown, grown.len() - old.len()))
}

/// Adds an interval to a list; returns the number of blocks that were not held before.
pub(super) fn add(list: &mut Vec<Interval>, add: Interval) -> u32 {
    let first = list.partition_point(|old| {
        old.target() < add.target() || (old.target() == add.target() && old.end() < add.start())
    });
    let (mut merged, mut had, mut last) = (add, 0, first);
    while let Some(old) = list.get(last)
        && let Some((grown, _)) = grown(*old, merged)
    {
        had += old.len();
        merged = grown;
        last += 1;
    }
    list.splice(first..last, [merged]);
    merged.len() - had
}

/// Removes one block of a target from a list; returns false when it was not held.
pub(super) fn remove(list: &mut Vec<Interval>, target: Target, position: u32) -> bool {
    let Some(index) = holding(list, target, position) else {
        return false;
    };
    let old = list[index];
    let before = Interval::new(target, old.start(), position);
    let after = Interval::new(target, position + 1, old.end());
    let left = [before, after].into_iter().filter(|part| part.len() > 0);
    list.splice(index..=index, left);
    true
}

/// Removes a target from a list; returns the number of blocks it held.
pub(super) fn remove_target(list: &mut Vec<Interval>, target: Target) -> u32 {
    let mut held = 0;
    list.retain(|interval| {
        let is_its = interval.target() == target;
        held += if is_its { interval.len() } else { 0 };
        !is_its
    });
    held
}

/// Returns the index of the interval that contains the target's block.
pub(super) fn holding(list: &[Interval], target: Target, position: u32) -> Option<usize> {
    let index = list.partition_point(|old| (old.target(), old.end()) <= (target, position));
    let old = list.get(index)?;
    (old.target() == target && old.start() <= position).then_some(index)
}
