//! [`IndexReader`]: finds which targets hold how much of a prompt.

use std::cell::Cell;
use std::sync::Arc;

use genset_backend_common::kv::BlockHash;

use super::members::Interval;
use super::run::{Link, RunId, Word};
use super::table::{Busy, Place};
use super::{Overlap, Shared};
use crate::sync::{Ordering, TRIES, fence};

/// Table slots probed together.
const WAYS: usize = 8;

/// Looks up prompts. Clones share the index; a lookup waits neither for the writer nor for another lookup.
#[derive(Clone)]
pub struct IndexReader {
    shared: Arc<Shared>,
}

genset_backend_common::debug_as!(|_| IndexReader { .. });

/// The result of a lookup and its scratch memory. Meant for reuse.
#[derive(Debug, Default)]
pub struct Lookup {
    /// Something changed too often during the lookup.
    gave_up: bool,
    overlaps: Vec<Overlap>,
    path: Vec<Step>,
    more: Vec<Overlap>,
}

impl Lookup {
    /// Returns whether the lookup saw everything that is known. If not, the writer was preempted during a change or changed the
    /// data too often, and there may be more overlaps than were found.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        !self.gave_up
    }

    /// Returns the overlaps of the last lookup, sorted by target.
    #[must_use]
    pub fn overlaps(&self) -> &[Overlap] {
        &self.overlaps
    }
}

/// Part of a path through the runs: the blocks up to `upto` of a run, and the hash of the last of them.
#[derive(Debug, Clone, Copy)]
struct Step {
    run: RunId,
    upto: u32,
    last: BlockHash,
}

/// Whether the runs above a block match the prompt.
enum Walked {
    /// They match.
    Whole,
    /// They do not: continue with only this many blocks of the prompt.
    Only(usize),
}

impl IndexReader {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Returns the blocks held by targets; a block with several holders counts once for each.
    #[must_use]
    pub fn held_blocks(&self) -> u64 {
        self.shared.held.load(Ordering::Relaxed)
    }

    /// Finds every target that holds the first block of the prompt, and the number of leading blocks it holds. Allocates only if
    /// `lookup` has never held as many.
    pub fn find(&self, prompt: &[BlockHash], lookup: &mut Lookup) {
        let gave_up = Cell::new(false);
        lookup.overlaps.clear();
        let mut prompt = prompt;
        let mut is_sure = false;
        let mut tries = 0;
        while let Some((index, place)) = self.deepest(prompt, is_sure, &gave_up) {
            match self.walk(&prompt[..=index], place, &mut lookup.path, &gave_up) {
                Walked::Whole if self.gather(lookup, &gave_up) => break,
                // A run was reused during the lookup.
                Walked::Whole => {
                    lookup.overlaps.clear();
                    tries += 1;
                    if tries == TRIES {
                        gave_up.set(true);
                        break;
                    }
                }
                // The place may belong to another block whose hash has the same tag bits.
                Walked::Only(_) if !is_sure => is_sure = true,
                Walked::Only(blocks) => prompt = &prompt[..blocks.min(index)],
            }
        }
        lookup.gave_up = gave_up.get();
    }

    /// Returns the last known block of the prompt, assuming that all blocks before a known one are known. Without `is_sure` it
    /// may be another block with the same tag bits.
    fn deepest(
        &self,
        prompt: &[BlockHash],
        is_sure: bool,
        gave_up: &Cell<bool>,
    ) -> Option<(usize, Place)> {
        let Shared { words, table, .. } = &*self.shared;
        let (mut low, mut high) = (0, prompt.len());
        let mut best = None;
        while low < high {
            let span = high - low;
            let ways = WAYS.min(span);
            let probe = |way: usize| low + span * (way + 1) / ways - 1;
            let mut may = [false; WAYS];
            let mut mixed = [table.mix(0); WAYS];
            for way in 0..ways {
                mixed[way] = table.mix(prompt[probe(way)].0);
                may[way] = table.may_have(words, mixed[way]);
            }
            let mut next = (low, probe(0));
            for way in (0..ways).rev().filter(|way| may[*way]) {
                let at = probe(way);
                let accept = |place| !is_sure || self.is_at(place, prompt[at], gave_up);
                let found = table.find(words, mixed[way], accept);
                if let Some(place) = found.unwrap_or_else(|Busy| {
                    gave_up.set(true);
                    None
                }) {
                    best = Some((at, place));
                    next = (at + 1, if way + 1 < ways { probe(way + 1) } else { high });
                    break;
                }
            }
            (low, high) = next;
        }
        best
    }

    fn is_at(&self, place: Place, hash: BlockHash, gave_up: &Cell<bool>) -> bool {
        let Shared { words, runs, .. } = &*self.shared;
        let read = || {
            place.position < runs.size(place.run).len
                && words.load(runs.load(place.run, Word::Hashes) + u64::from(place.position))
                    == hash.0
        };
        runs.read(place.run, read).unwrap_or_else(|| {
            gave_up.set(true);
            false
        })
    }

    /// Walks from a block, the last one of `prompt`, up to the start; compares hashes where runs meet.
    fn walk(
        &self,
        prompt: &[BlockHash],
        place: Place,
        path: &mut Vec<Step>,
        gave_up: &Cell<bool>,
    ) -> Walked {
        path.clear();
        let mut left = prompt.len();
        let mut at = Place {
            run: place.run,
            position: place.position,
        };
        loop {
            let upto = at.position + 1;
            let blocks = usize::try_from(upto).unwrap_or(usize::MAX);
            if blocks > left || !self.is_at(at, prompt[left - 1], gave_up) {
                return Walked::Only(prompt.len() - 1);
            }
            path.push(Step {
                run: at.run,
                upto,
                last: prompt[left - 1],
            });
            left -= blocks;
            match self.shared.runs.link(at.run) {
                Link::Root if left == 0 => return Walked::Whole,
                Link::After(run, len) if left > 0 && len > 0 => {
                    at = Place {
                        run,
                        position: len - 1,
                    };
                }
                // The block before is unknown; earlier blocks may be known.
                Link::Orphan => return Walked::Only(left),
                Link::Root | Link::After(..) => return Walked::Only(prompt.len() - 1),
            }
        }
    }

    /// Sums the blocks that targets hold along the path, from the first run to the last. Returns false if a run was reused.
    fn gather(&self, lookup: &mut Lookup, gave_up: &Cell<bool>) -> bool {
        let Lookup {
            overlaps,
            path,
            more,
            ..
        } = lookup;
        let mut steps = path.iter().rev();
        let Some(first) = steps.next() else {
            return true;
        };
        if !self.leading(*first, overlaps, gave_up) {
            return false;
        }
        let mut depth = first.upto;
        for step in steps {
            if !self.leading(*step, more, gave_up) {
                return false;
            }
            for held in more.iter() {
                let found = overlaps.binary_search_by_key(&held.target, |overlap| overlap.target);
                if let Ok(index) = found
                    && overlaps[index].blocks == depth
                {
                    overlaps[index].blocks += held.blocks;
                }
            }
            depth += step.upto;
        }
        true
    }

    /// Collects the leading blocks that targets hold in a run, up to the step's end. Returns false if the run has other blocks by
    /// now.
    fn leading(&self, step: Step, into: &mut Vec<Overlap>, gave_up: &Cell<bool>) -> bool {
        let Shared { words, runs, .. } = &*self.shared;
        let read = || {
            into.clear();
            let size = runs.size(step.run);
            let members = runs.load(step.run, Word::Members);
            let mut push = |word| {
                let interval = Interval::from_word(word);
                if interval.start() == 0 {
                    into.push(Overlap {
                        target: interval.target(),
                        blocks: interval.end().min(step.upto),
                    });
                }
            };
            if size.members == 1 {
                push(members);
            } else {
                let count = usize::try_from(size.members).unwrap_or_default();
                for word in words.block(members, count) {
                    push(word.load(Ordering::Relaxed));
                }
            }
            // An interval that covers other blocks was stored after their hashes.
            fence(Ordering::Acquire);
            let last = runs.load(step.run, Word::Hashes) + u64::from(step.upto - 1);
            words.load(last) == step.last.0
        };
        runs.read(step.run, read).unwrap_or_else(|| {
            gave_up.set(true);
            into.clear();
            true
        })
    }
}
