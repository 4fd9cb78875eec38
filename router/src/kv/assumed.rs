//! [`Assumed`]: updates the index from routed requests, for workers that publish no KV events. A prompt's blocks count as cached
//! for a while at the instance it went to.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use genset_backend_common::kv::BlockHash;
use tokio::time::Instant;

use crate::index::{IndexWriter, Target};

/// The maximum number of assumed blocks, counted once per request; the oldest are dropped first.
const MAX_BLOCKS: usize = 1 << 20;

/// Routed requests, oldest first.
#[derive(Debug)]
pub(super) struct Assumed {
    ttl: Duration,
    max_blocks: usize,
    routed: VecDeque<Routed>,
    /// The number of blocks in `routed`; a shared block counts once per request.
    routed_blocks: usize,
    /// The number of the last request, counted from 1.
    count: u64,
    /// The last request that had each block. The block is dropped with it.
    last: HashMap<(Target, BlockHash), u64>,
}

#[derive(Debug)]
struct Routed {
    number: u64,
    until: Instant,
    target: Target,
    blocks: std::sync::Arc<[BlockHash]>,
}

impl Assumed {
    pub(super) fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            max_blocks: MAX_BLOCKS,
            routed: VecDeque::new(),
            routed_blocks: 0,
            count: 0,
            last: HashMap::new(),
        }
    }

    /// Records that a prompt with these blocks went to `target`.
    pub(super) fn routed(
        &mut self,
        index: &mut IndexWriter,
        target: Target,
        blocks: &std::sync::Arc<[BlockHash]>,
    ) {
        if blocks.is_empty() || blocks.len() > self.max_blocks {
            return;
        }
        self.count += 1;
        for block in blocks.iter() {
            self.last.insert((target, *block), self.count);
        }
        // Always consistent: this router hashed the blocks.
        let _ = index.store(target, None, blocks);
        self.routed_blocks += blocks.len();
        self.routed.push_back(Routed {
            number: self.count,
            until: Instant::now() + self.ttl,
            target,
            blocks: std::sync::Arc::clone(blocks),
        });
        while self.routed_blocks > self.max_blocks && self.forget_oldest(index) {}
    }

    /// Returns whether an entry has expired.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let oldest = self.routed.front();
        oldest.is_some_and(|oldest| oldest.until <= now)
    }

    /// Drops expired entries.
    pub(super) fn expire(&mut self, index: &mut IndexWriter) {
        let now = Instant::now();
        while self.is_due(now) && self.forget_oldest(index) {}
    }

    /// Drops a target that has gone; the index drops its entries separately.
    pub(super) fn forget(&mut self, target: Target) {
        self.routed.retain(|routed| routed.target != target);
        let blocks = self.routed.iter().map(|routed| routed.blocks.len());
        self.routed_blocks = blocks.sum();
        self.last.retain(|(holder, _), _| *holder != target);
    }

    fn forget_oldest(&mut self, index: &mut IndexWriter) -> bool {
        let Some(oldest) = self.routed.pop_front() else {
            return false;
        };
        self.routed_blocks -= oldest.blocks.len();
        let is_over = |block: &&BlockHash| {
            let last = self.last.get(&(oldest.target, **block));
            last.is_some_and(|last| *last == oldest.number)
        };
        // From the end, so that the remaining blocks form a prefix.
        let over: Vec<BlockHash> = oldest
            .blocks
            .iter()
            .rev()
            .filter(is_over)
            .copied()
            .collect();
        for block in &over {
            self.last.remove(&(oldest.target, *block));
        }
        let _ = index.remove(oldest.target, &over);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::index::{Lookup, index};

    #[tokio::test(start_paused = true)]
    async fn what_was_routed_is_assumed_until_its_time_is_over() {
        let (mut writer, reader) = index();
        let mut assumed = Assumed::new(Duration::from_secs(120));
        let blocks = |range: std::ops::Range<u64>| -> Arc<[BlockHash]> {
            range
                .map(|n| BlockHash(n.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
                .collect()
        };
        let leading = |prompt: &[BlockHash]| {
            let mut lookup = Lookup::default();
            reader.find(prompt, &mut lookup);
            lookup
                .overlaps()
                .first()
                .map_or(0, |overlap| overlap.blocks)
        };
        let (long, short) = (blocks(1..11), blocks(1..5));
        assumed.routed(&mut writer, 3, &long);
        tokio::time::advance(Duration::from_secs(100)).await;
        assumed.routed(&mut writer, 3, &short);
        assumed.expire(&mut writer);
        assert_eq!(leading(&long), 10);
        tokio::time::advance(Duration::from_secs(20)).await;
        assumed.expire(&mut writer);
        assert_eq!(leading(&long), 4);
        tokio::time::advance(Duration::from_secs(100)).await;
        assumed.expire(&mut writer);
        assert_eq!(
            (leading(&long), reader.held_blocks(), assumed.last.len()),
            (0, 0, 0)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_go_when_there_are_too_many() {
        let (mut writer, reader) = index();
        let mut assumed = Assumed::new(Duration::from_secs(120));
        assumed.max_blocks = 1000;
        for prompt in 0..40_u64 {
            let block = |n: u64| BlockHash((prompt << 32 | n).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let blocks: Arc<[BlockHash]> = (1..60).map(block).collect();
            assumed.routed(&mut writer, 1, &blocks);
        }
        assert!(assumed.last.len() <= 1000 && assumed.last.len() > 900);
        assert_eq!(reader.held_blocks(), assumed.last.len() as u64);
    }

    #[tokio::test(start_paused = true)]
    async fn a_prompt_that_is_sent_again_takes_no_room_without_end() {
        let (mut writer, reader) = index();
        let mut assumed = Assumed::new(Duration::from_secs(120));
        assumed.max_blocks = 1000;
        let block = |n: u64| BlockHash(n.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        for _ in 0..10_000 {
            // Each request has its own hashes.
            let blocks: Arc<[BlockHash]> = (1..60).map(block).collect();
            assumed.routed(&mut writer, 1, &blocks);
            let held = assumed.routed.iter().map(|routed| routed.blocks.len());
            let held: usize = held.sum();
            assert!(held <= 1000 && held == assumed.routed_blocks, "{held}");
            assert_eq!((assumed.last.len(), reader.held_blocks()), (59, 59));
            let mut lookup = Lookup::default();
            reader.find(&blocks, &mut lookup);
            let overlaps = lookup.overlaps();
            assert_eq!(overlaps.first().map(|overlap| overlap.blocks), Some(59));
        }
        assumed.forget(1);
        assert_eq!((assumed.routed_blocks, assumed.last.len()), (0, 0));
    }
}
