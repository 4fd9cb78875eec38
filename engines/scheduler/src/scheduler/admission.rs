//! Admission: how a sequence that waits gets a place and blocks, and who yields to it.

use super::{Planning, Rank, Scheduler};
use crate::pool::BlockId;
use crate::sequence::Sequence;

/// The blocks that a sequence begins in, of which the first `reused` have their content already.
struct Room {
    blocks: Vec<BlockId>,
    reused: usize,
}

impl Scheduler {
    /// Admits the best waiting sequence if there is room, or if there is after others gave theirs up.
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

    /// Makes room for a sequence that waits: a place among the running ones, and blocks for all its tokens.
    fn make_room(
        &mut self,
        rank: Rank,
        sequence: &Sequence,
        planning: &mut Planning,
    ) -> Option<Room> {
        while self.running.len() >= self.limits.max_num_seqs {
            if !self.preempt_for(rank, planning) {
                return None;
            }
        }
        let mut blocks = sequence.find_prefix(&self.pool);
        let reused = blocks.len();
        let all_tokens = sequence.tokens().len();
        if !self.is_chunking && all_tokens - reused * self.pool.block_size() > planning.budget {
            return None;
        }
        let missing = self.pool.blocks_for(all_tokens).saturating_sub(reused);
        self.pool.hold(&blocks);
        loop {
            if self.pool.available() >= missing + self.reserve(rank)
                && let Some(free) = self.pool.allocate(missing)
            {
                blocks.extend(free);
                return Some(Room { blocks, reused });
            }
            if !self.preempt_for(rank, planning) {
                self.pool.release(&blocks);
                return None;
            }
        }
    }

    fn begin(&mut self, rank: Rank, mut sequence: Sequence, room: Room, planning: &mut Planning) {
        let Room { blocks, reused } = room;
        let is_first_time = sequence.begin(blocks, reused, self.pool.block_size());
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

    /// Blocks to leave free when `newcomer` is admitted: one each for those that run beside it to grow into, or the newcomer
    /// would soon lose its own to them. Those that would yield to it need none.
    fn reserve(&self, newcomer: Rank) -> usize {
        let stays =
            |(rank, sequence): &(&Rank, &Sequence)| !sequence.is_paused && rank.0 <= newcomer.0;
        let growing = self.running.iter().filter(stays).count();
        if self.running.is_empty() {
            return growing;
        }
        growing.max(self.watermark_blocks)
    }

    /// Preempts one that yields to a waiting sequence: its reader is behind, or its priority is lower.
    fn preempt_for(&mut self, newcomer: Rank, planning: &mut Planning) -> bool {
        self.preempt(planning, |rank, sequence| {
            sequence.is_paused || rank.0 > newcomer.0
        })
    }
}

fn count(tokens: usize) -> u64 {
    u64::try_from(tokens).unwrap_or(u64::MAX)
}
