//! Admission: how a waiting sequence gets a place and blocks, and which sequences yield to it.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::{Planning, Rank, Scheduler, yield_order};
use crate::pool::BlockId;
use crate::sequence::Sequence;

/// The blocks that a sequence begins with. The first `reused` ones already have their content.
struct Room {
    blocks: Vec<BlockId>,
    reused: usize,
}

impl Scheduler {
    /// Admits the best waiting sequence if there is room, or if preemption can make room.
    pub(super) fn admit_next(&mut self, planning: &mut Planning) -> bool {
        let best = self.waiting.extract_if(.., |_, it| !it.is_paused).next();
        let Some((rank, sequence)) = best else {
            return false;
        };
        let Some(room) = self.make_room(rank, &sequence, planning) else {
            self.waiting.insert(rank, sequence);
            return false;
        };
        self.begin(rank, sequence, room, planning);
        true
    }

    /// Makes room for a waiting sequence: a place among the running ones, and blocks for all its tokens. Preempts nobody if it
    /// would not fit even after all preemptions that its rank allows.
    fn make_room(
        &mut self,
        rank: Rank,
        sequence: &Sequence,
        planning: &mut Planning,
    ) -> Option<Room> {
        let yielding = self.yielding_to(rank);
        let places = (self.running.len() + 1).saturating_sub(self.limits.max_num_seqs);
        let for_places = yielding.get(..places)?;
        let mut blocks = sequence.find_prefix(&self.pool);
        let reused = blocks.len();
        let all_tokens = sequence.tokens().len();
        let left = all_tokens - reused * self.pool.block_size();
        if !self.is_chunking && left > planning.budget + self.planned_of(for_places) {
            return None;
        }
        let missing = self.pool.blocks_for(all_tokens).saturating_sub(reused);
        self.pool.hold(&blocks);
        if self.can_free(missing, rank, &yielding) {
            for first in yielding {
                if self.running.len() < self.limits.max_num_seqs
                    && self.pool.available() >= missing + self.reserve(rank)
                {
                    break;
                }
                self.preempt(first, planning);
            }
            if let Some(free) = self.pool.allocate(missing) {
                blocks.extend(free);
                return Some(Room { blocks, reused });
            }
        }
        self.pool.release(&blocks);
        None
    }

    /// The running sequences that yield to a waiting one, in order: their readers are behind, or their priority is lower.
    fn yielding_to(&self, newcomer: Rank) -> Vec<Rank> {
        let running = self.running.iter();
        let yielding = running.filter(|(rank, sequence)| sequence.is_paused || rank.0 > newcomer.0);
        let mut yielding: Vec<(bool, Rank)> = yielding
            .map(|(rank, sequence)| yield_order(rank, sequence))
            .collect();
        yielding.sort_unstable_by_key(|it| Reverse(*it));
        yielding.into_iter().map(|(_, rank)| rank).collect()
    }

    /// The number of tokens of running sequences in the step under way.
    fn planned_of(&self, ranks: &[Rank]) -> usize {
        let sequences = ranks.iter().filter_map(|rank| self.running.get(rank));
        sequences.map(|sequence| sequence.planned).sum()
    }

    /// Whether a newcomer can get `missing` blocks, beside the reserve, once all `yielding` sequences are preempted.
    fn can_free(&self, missing: usize, newcomer: Rank, yielding: &[Rank]) -> bool {
        let available = self.pool.available();
        if available >= missing + self.reserve(newcomer) {
            return true;
        }
        let staying = self.running.len() - yielding.len();
        let needed = missing + self.reserve_beside(staying);
        let sequences = yielding.iter().filter_map(|rank| self.running.get(rank));
        let held = sequences.flat_map(Sequence::blocks);
        // An upper bound, which is cheap to compute.
        if available + held.clone().count() < needed {
            return false;
        }
        let mut holders = HashMap::<BlockId, u32>::new();
        held.for_each(|block| *holders.entry(*block).or_default() += 1);
        let freed = holders
            .iter()
            .filter(|(block, holders)| self.pool.holders(**block) == **holders);
        available + freed.count() >= needed
    }

    fn begin(&mut self, rank: Rank, mut sequence: Sequence, room: Room, planning: &mut Planning) {
        let Room { blocks, reused } = room;
        let is_first_time = sequence.begin(rank.2, blocks, reused, self.pool.block_size());
        if is_first_time {
            self.prompt_tokens += count(sequence.prompt_tokens());
            self.cached_tokens += count(sequence.cached_tokens());
        }
        if sequence.is_receiving() {
            planning.step.receiving.push(rank.2);
        } else {
            let tokens = sequence.remaining().min(planning.budget);
            planning.schedule(rank.2, &mut sequence, tokens);
        }
        self.running.insert(rank, sequence);
    }

    /// Blocks to leave free when `newcomer` is admitted: one for each sequence that runs beside it. Otherwise these would soon
    /// preempt the newcomer as they grow. Sequences that would yield to it need none.
    fn reserve(&self, newcomer: Rank) -> usize {
        let stays =
            |(rank, sequence): &(&Rank, &Sequence)| !sequence.is_paused && rank.0 <= newcomer.0;
        let staying = self.running.iter().filter(stays).count();
        if self.running.is_empty() {
            return 0;
        }
        staying.max(self.watermark_blocks)
    }

    /// The reserve of a newcomer beside `staying` sequences that do not yield to it.
    fn reserve_beside(&self, staying: usize) -> usize {
        if staying == 0 {
            return 0;
        }
        staying.max(self.watermark_blocks)
    }
}

fn count(tokens: usize) -> u64 {
    u64::try_from(tokens).unwrap_or(u64::MAX)
}
